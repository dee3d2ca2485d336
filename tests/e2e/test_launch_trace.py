"""What of a job is written for other tools: `--trace`, one time line of all ranks, and `--metrics_file`."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise

import pytest
from job_runner import DEADLINE_S, PRELOAD, REPOSITORY, wait_until

from msrun.launch.metrics_file import render_samples
from msrun.launch.trace import LAUNCHER, PROCESS, STEPS, WAITS, build_trace

SCRIPT = """
import time
import torch
from msrun.runtime import all_reduce, get_rank, init, report_progress
init()
for step in range(1, 4):
    report_progress(step)
    time.sleep(0.2 * get_rank())
    all_reduce(torch.zeros(2))
"""
STUCK = """
import os, time
from msrun.runtime import report_progress
for step in range(1, 4):
    report_progress(step)
    time.sleep(0.5)
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def trace(*words, cwd):
    command = [sys.executable, "-m", "msrun", "trace", *map(str, words)]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S)


def spans(path):
    """Return (rank, row) -> its spans in order of time."""
    found = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"] - 1, event["tid"]].append(event)
    return {key: sorted(own, key=lambda event: event["ts"]) for key, own in found.items()}


def end(event):
    return int(event["ts"] + event["dur"])


@pytest.mark.slow
def test_steps_and_waits_of_all_ranks_are_on_the_clock_of_the_launcher(msrun, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    finished = msrun.run("--worker_num=2", "--trace", *PRELOAD, "train.py", cwd=tmp_path, env=msrun.warm())
    assert finished.code == 0, finished.stderr
    done = trace("log_output", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = finished.log_dir / "trace.json"
    assert done.stdout.startswith(f"wrote {path}: 2 ranks, 6 steps, ")
    found = spans(path)
    for rank in (0, 1):
        [process] = found[rank, PROCESS]
        assert process["name"] == "done: exit code 0"
        steps = found[rank, STEPS]
        assert [step["name"] for step in steps] == ["step 1", "step 2", "step 3"]
        assert all(end(step) == later["ts"] for step, later in pairwise(steps))
        assert process["ts"] <= steps[0]["ts"] and end(steps[-1]) <= end(process)
    waits = [wait for wait in found[0, WAITS] if wait["name"].startswith("all_reduce of 2 ranks")]
    assert len(waits) == 3
    for wait, step, late in zip(waits, found[0, STEPS], found[1, STEPS], strict=True):
        assert wait["dur"] > 100_000  # for rank 1, which sleeps for 200 ms
        assert step["ts"] <= wait["ts"] and end(wait) <= end(step) + 1
        assert abs(end(wait) - end(late)) < 100_000  # both leave the collective at one moment of one clock
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["pid"] == LAUNCHER}
    assert {"preparing", "running", "over"} < names


def test_worker_that_is_killed_leaves_what_it_did_before(msrun, tmp_path):
    (tmp_path / "train.py").write_text(STUCK)
    job = msrun.start("--worker_num=1", "--trace", "train.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready")
    running = trace("log_output", "-o", "running.json", cwd=tmp_path)  # of a job that runs, too
    assert "1 rank, " in running.stdout
    os.kill(job.pid_of("0"), signal.SIGKILL)
    assert job.finish().code == 137
    assert trace("log_output", cwd=tmp_path).returncode == 0
    found = spans(tmp_path / "log_output" / "trace.json")
    assert found[0, PROCESS][0]["name"] == "failed: signal SIGKILL"
    assert [step["name"] for step in found[0, STEPS]][:1] == ["step 1"]


def lines(*values):
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def test_clocks_of_hosts_and_attempts_are_brought_together_and_damage_is_skipped():
    log = [{"time": 1000.0, "event": "preparing"}, {"time": 1001.0, "event": "started", "global_rank": 0, "pid": 7}]
    text = "\n".join(map(json.dumps, log)).encode() + b'\n{"time": 10'
    first = {"host": "a", "pid": 7, "attempt": 0, "time": 1002.0}
    second = {"global_rank": 1, "host": "b", "pid": 8, "attempt": 1, "time": 1010.0, "clock": 1.0}
    nobody = lines(["step", "0", 1, 2])
    damaged = lines(["step", "2", "x", 53], ["nap", "3", 51, 52], [], 7) + b'\xff\n["wait", "all_re'
    parts = [
        nobody + lines({**first, "global_rank": 0, "clock": 50.0}, ["step", "1", 51.0, 52.5]) + damaged,
        lines({**first, "host": "b", "global_rank": 1, "clock": 9.0}, ["wait", "w", 10.0, 11.5])
        + lines(second, ["wait", "w", 2.0, 2.5], {**second, "time": "noon"}, ["wait", "w", 3.0, 3.5]),
    ]
    found = build_trace("job", {0: "a"}, [text], parts)
    told = [(e["pid"] - 1, e["name"], e["ts"], e["dur"], e["args"]["attempt"]) for e in found.events if e["ph"] == "X"]
    assert told == [
        (0, "running", 1_000_000, 0, 0),
        (0, "step 1", 3_000_000, 1_500_000, 0),
        (1, "w", 3_000_000, 1_500_000, 0),
        (1, "w", 11_000_000, 500_000, 1),
    ]
    assert found.found == {"ranks": 2, "steps": 1, "waits": 2}
    names = [event["args"]["name"] for event in found.events if event["name"] == "process_name"]
    assert names == ["msrun, job job", "rank 0 on a", "rank 1 on b"]


RESTARTING = """
import os, sys, time
from msrun.runtime import report_progress
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 1 and attempt == "0":
    sys.exit(4)
for step in range(1, 8):
    report_progress(step, 0.5)
    time.sleep(0.01)
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(5 if rank == 1 else 0)
"""


def read(path):
    """Return (metric, rank or state) -> value."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(path.read_text()) if path.exists() else []
    return {
        (sample.name, sample.labels.get("rank", sample.labels.get("state", ""))): sample.value
        for family in families
        for sample in family.samples
    }


def test_file_tells_of_every_rank_while_the_job_runs_and_of_its_end(msrun, tmp_path):
    (tmp_path / "train.py").write_text(RESTARTING)
    path = tmp_path / "job.prom"
    options = ["--worker_num=2", "--max_restarts=1", f"--metrics_file={path}"]
    job = msrun.start(*options, "train.py", cwd=tmp_path)
    wait_until(lambda: path.exists() and path.read_text().count("\nmsrun_worker_step{") == 2, "both ranks are told of")
    running = read(path)
    assert (running["msrun_workers", "running"], running["msrun_restarts_total", ""]) == (2, 1)
    assert (running["msrun_job_running", ""], ("msrun_job_exit_code", "") in running) == (1, False)
    for rank in "01":
        assert running["msrun_worker_step", rank] == 7
        assert running["msrun_worker_loss", rank] == 0.5
        assert running["msrun_worker_memory_bytes", rank] > 1 << 20
        assert 0 <= running["msrun_worker_last_progress_age_seconds", rank] < 60
        assert running["msrun_worker_steps_per_second", rank] > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # the exporter is another user
    (tmp_path / "go").touch()
    assert job.finish().code == 5
    ended = read(path)
    assert (ended["msrun_job_running", ""], ended["msrun_job_exit_code", ""]) == (0, 5)
    assert (ended["msrun_workers", "failed"], ended["msrun_workers", "running"]) == (1, 0)
    assert not [name for name, _ in ended if name.startswith("msrun_worker_")]
    assert [entry.name for entry in tmp_path.glob("*.prom*")] == ["job.prom"]
    assert not list(tmp_path.glob(".*"))


def test_odd_labels_and_numbers_come_through():
    parser = pytest.importorskip("prometheus_client.parser")
    odd = 'a "b" \\ \n c'
    samples = [({"log_dir": odd, "rank": str(rank)}, value) for rank, value in enumerate((1, 0.5, float("nan"), 1e300))]
    text = render_samples({"msrun_worker_loss": samples, "msrun_job_exit_code": []})
    [family] = parser.text_string_to_metric_families(text)
    assert [sample.labels["log_dir"] for sample in family.samples] == [odd] * 4
    assert [str(float(sample.value)) for sample in family.samples] == ["1.0", "0.5", "nan", "1e+300"]
