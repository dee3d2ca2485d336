"""Jobs that get stuck: found in time, the ones that hold the others up named, everybody's stacks written."""

import json
import re

import pytest
from asked_cases import one_fast
from job_runner import PRELOAD, WORKERS


def run_stuck(msrun, cwd, how, *options):
    words = ("--worker_num=2", *PRELOAD, *options, WORKERS / "runtime" / "stuck.py", how)
    return msrun.run(*words, cwd=cwd, env=msrun.warm())


@pytest.mark.parametrize(
    ("how", "words"), one_fast(("sleep", "step 2"), ("spin", "step 2"), ("stop", "step 2, stopped by a signal"))
)
def test_rank_that_holds_others_up_is_named_with_its_step(msrun, tmp_path, how, words):
    finished = run_stuck(msrun, tmp_path, how, "--hang_time_out=3")
    assert finished.code == 124, finished.stderr
    (line,) = finished.errors
    assert re.search(r"--hang_time_out 3: no progress for [3-9] s; behind: rank 1 \(" + words + r"\)", line), line
    assert re.search(r"; rank 0 \(step 3, waits in \w+ of 2 ranks", line), line
    lagging = finished.read_json("failure.json")["lagging"]
    assert [worker["global_rank"] for worker in lagging] == [1]
    assert "hold_the_others_up" in finished.log(1).decode()
    assert "hold_the_others_up" in finished.stderr, "its stack is part of the report"
    other = finished.log(0).decode()
    assert "stacks of all threads:" in other and "in wait" in other


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_silence_of_a_plain_script_is_found(msrun, tmp_path, method):
    (tmp_path / "w.py").write_text("import time\ndef asleep(): time.sleep(600)\nprint('begin', flush=True)\nasleep()\n")
    finished = msrun.run("--worker_num=2", f"--start_method={method}", "--hang_time_out=1", "w.py", cwd=tmp_path)
    assert finished.code == 124
    assert re.search("no progress for [1-9] s; running: ranks 0-1", finished.errors[0])
    expected = "in asleep" if method == "fork" else "cannot write its stacks; the kernel's view: sleeping"
    assert expected in finished.log(0).decode()
    assert expected in finished.log(1).decode()


@pytest.mark.parametrize("where", one_fast("--worker_num=3", "--rehearse=3x1"))
def test_torchs_flight_recorder_names_the_collective_that_one_rank_has_not_begun(msrun, tmp_path, where):
    script = WORKERS / "plain_stuck.py"
    warm = msrun.warm() if where == "--worker_num=3" else {}
    finished = msrun.run(where, *PRELOAD, "--hang_time_out=2", script, cwd=tmp_path, env=warm)
    assert finished.code == 124, finished.stderr
    if where == "--worker_num=3":
        held = 1 + script.read_text().splitlines().index("    time.sleep(600)")
        assert f"; behind: rank 1 (at plain_stuck.py:{held} in hold_the_others_up)" in finished.errors[0]
        assert re.search(r"; ranks 0, 2 \(waits in all_reduce at plain_stuck\.py:\d+ in step\)", finished.errors[0])
    dumps = [json.loads((finished.log_dir / f"flight_recorder_{rank}.json").read_text()) for rank in range(3)]
    newest = [dump["entries"][-1] for dump in dumps]
    assert [entry["retired"] for entry in newest] == [False, True, False]
    begun = newest[1]["collective_seq_id"]
    assert [entry["collective_seq_id"] for entry in newest] == [begun + 1, begun, begun + 1]


@pytest.mark.slow
def test_rank_that_never_joins_is_named_with_its_last_words(msrun, tmp_path):
    finished = run_stuck(msrun, tmp_path, "absent", "--cluster_time_out=15")
    assert finished.code == 124, finished.stderr
    (line,) = finished.errors
    assert line.startswith("msrun: error: --cluster_time_out 15: 1 of 2 workers have not joined the world")
    assert line.endswith("rank 1; came: rank 0")
    assert "loading the data" in finished.stderr
    assert re.search(r"rank 0 stopped by msrun \(.*waits (in|for) .* for \d+\.\d s\)", finished.stderr)


EARLY = r"rank 1 (exited early \(code 0\)|left the job early)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("leave", 1, rf"{EARLY}; rank 0 on \S+ then failed: exit code 1"),
        ("release", 1, r"rank 1 left the job early; rank 0 on \S+ then failed: exit code 1"),
    ],
)
def test_rank_that_leaves_while_others_need_it_is_named_and_not_called_a_hang(msrun, tmp_path, how, code, words):
    finished = run_stuck(msrun, tmp_path, how)
    assert finished.code == code, finished.stderr
    assert re.search(words, finished.errors[0])
