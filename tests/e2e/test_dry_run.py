"""A dry run predicts what a real run of the same script does, byte for byte."""

import json
from pathlib import Path

import pytest
from job_runner import WORKERS

CASES = [(2, how) for how in ("plain", "level3", "tensor parallel", "recompute", "micro batches", "data parallel")]
CASES += [(4, how) for how in ("level1", "level3", "pipeline", "data parallel level3")]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "how"), CASES)
def test_memory_and_traffic_are_those_of_a_real_run(msrun, tmp_path, ranks, how):
    script, seen = WORKERS / "runtime" / "dry_run.py", tmp_path / "seen"
    real = msrun.run(f"--worker_num={ranks}", script, how, seen, cwd=tmp_path)
    assert real.code == 0, real.stderr
    profile = Path(f"{seen}.json")
    device = f"--sim_device={profile if profile.exists() else 'cpu'}"
    dry = msrun.run("--sim_level=2", f"--worker_num={ranks}", device, "--log_dir=dry", script, how, seen, cwd=tmp_path)
    assert dry.code == 0, dry.stderr
    report = json.loads((tmp_path / "dry" / "simulation.json").read_text())
    assert report["worker_num"] == ranks
    assert report["step"]["seconds"] > 0
    for alike in report["classes"]:
        for rank in range(alike["first_rank"], alike["last_rank"] + 1):
            right = json.loads(Path(f"{seen}.{rank}").read_text())
            assert alike["traffic"] == right["traffic"]
            found = alike["memory"]
            assert found["parameter_bytes"] == right["parameter_bytes"]
            counters = right["optimizer_state_bytes"] - found["optimizer_state_bytes"]
            assert 0 <= counters <= (64 if how == "pipeline" else 0)  # steps of parameters that other stages hold
            assert sum(found["at_peak"].values()) == found["peak_bytes"] > right["parameter_bytes"]
    if profile.exists():
        trace = json.loads((tmp_path / "dry" / "simulation_trace.json").read_text())
        assert_operators_take_what_was_measured(trace["traceEvents"], json.loads(profile.read_text()), ranks)


def assert_operators_take_what_was_measured(events, profile, ranks):
    """Every operator of the dry run has a point of its own size; other operators would be scaled."""
    measured = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "send"]
    assert sorted(profile["collectives"]) == measured
    between_two = profile["collectives"].pop("send")
    assert {size for size, *_ in between_two} == {2}
    assert {size for points in profile["collectives"].values() for size, *_ in points} == {ranks}
    assert min(profile[name] for name in ("overhead_s", "fsdp_s")) > 0
    measured_us = {}
    for name, points in profile["operators"].items():
        found = [1e6 * (seconds + profile["overhead_s"]) for *_, seconds in points]
        measured_us.setdefault(name.split()[0].removeprefix("aten."), []).extend(found)
    operators = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(operators) > 100
    for event in operators:
        assert event["dur"] == pytest.approx(
            min(measured_us[event["name"]], key=lambda us: abs(us - event["dur"])), abs=2e-3
        )


@pytest.mark.slow
def test_level_3_runs_the_steps_of_one_rank(msrun, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    done = msrun.run("--sim_level=3", "--worker_num=64", "--sim_rank_id=5", script, cwd=tmp_path)
    assert done.code == 0, done.stderr
    printed = done.stdout.decode()
    assert "rank 5 of 64" in printed
    assert "steps begun: 3" in printed
    assert "steps begun: 4" not in printed
    report = json.loads((tmp_path / "log_output" / "simulation.json").read_text())
    assert report["measured"]["rank"] == 5
    assert report["measured"]["step_s"] > 0


@pytest.mark.slow
def test_estimate_names_the_change_that_makes_a_job_fit(msrun, tmp_path):
    from msrun.runtime.cost.devices import PROFILES

    profile = PROFILES["cpu"].to_json() | {"name": "tiny", "memory_bytes": 4_000_000}
    (tmp_path / "tiny.json").write_text(json.dumps(profile))
    (tmp_path / "train.py").write_text(TRAINS)
    done = msrun.run("estimate", "train.py", "--device=tiny.json", "--worker_num=8", "--log_dir=out", cwd=tmp_path)
    assert done.code == 0, done.stderr
    report = json.loads((tmp_path / "out" / "simulation.json").read_text())
    changes = report["changes"]
    assert report["fits"] is changes["present"]["fits"] is False
    fitting = [change for change in changes["tried"] if change["fits"]]
    assert [words for change in changes["tried"] for words in change["words"] if words.startswith("search_degrees: ")]
    assert changes["best"] == min(fitting, key=lambda change: change["step_s"])["words"]
    assert f"It does not fit; better: {' and '.join(changes['best'])}" in done.stdout.decode()


def test_script_with_nothing_to_look_at_gets_one_clear_line(msrun, tmp_path):
    (tmp_path / "log_output").mkdir(mode=0o700)
    (tmp_path / "log_output" / "simulation.json").write_text("of an earlier dry run")
    (tmp_path / "train.py").write_text("print('nothing')\n")
    done = msrun.run("--sim_level=1", "--worker_num=8", "train.py", cwd=tmp_path)
    assert done.code != 0
    assert "without a training step of AutoParallel" in done.stderr
    assert not (tmp_path / "log_output" / "simulation.json").exists()


STEP = """
import torch
from msrun.runtime import AutoParallel, init
init()
net = torch.nn.Linear(4, 4)
AutoParallel(lambda x: net(x).sum().backward())(torch.ones(8, 4))
"""


@pytest.mark.slow
def test_script_that_cannot_be_looked_at_is_told_why(msrun, tmp_path):
    (tmp_path / "train.py").write_text(STEP)
    done = msrun.run("--sim_level=1", "--worker_num=8", "train.py", cwd=tmp_path)
    assert done.code != 0
    assert "the step function called no function of value_and_grad" in done.stderr


def test_option_that_estimate_has_not_is_refused(msrun_here, tmp_path):
    (tmp_path / "step.py").touch()
    done = msrun_here("estimate", "step.py", "--width", "3", cwd=tmp_path)
    assert done.code == 2
    assert done.stderr.startswith("msrun: error: --width: no such option; msrun estimate --help lists them")


TRAINS = """
import torch
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_group_size, get_rank, init

init()
print(f"rank {get_rank()} of {get_group_size()}")
layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
net = WithLoss(nn.Sequential(*layers, nn.Linear(256, 10)), nn.CrossEntropyLoss())
optimizer = torch.optim.AdamW(net.parameters())
parallel = AutoParallel(net)
for step in range(6):
    print("steps begun:", step + 1 if step < 3 else step)
    loss = parallel(torch.randn(64, 256), torch.randint(10, (64,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
