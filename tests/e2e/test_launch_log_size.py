"""--log_max_bytes: logs that take no more than so much disk, whose newest bytes are all there."""

import json
import os
import signal

import pytest
from asked_cases import one_fast
from job_runner import latest_job, wait_until

FLOOD = """
import os, pathlib, sys, time
for number in range(int(sys.argv[1])):
    print("line", number)
pathlib.Path(f"ready_{os.environ['RANK']}").touch()
while not os.path.exists("go"):
    time.sleep(0.01)
print("last words")
"""
LINES = 20_000
MAX_BYTES = 16 * 1024
WHOLE = b"".join(b"line %d\n" % number for number in range(LINES)) + b"last words\n"


def taken(log):
    return 512 * log.stat().st_blocks


@pytest.mark.parametrize("options", one_fast(["--log_split"], ["--start_method=exec"], ["--interactive"]))
def test_newest_bytes_of_each_log_stay_and_the_rest_is_freed_while_it_runs(msrun, tmp_path, options):
    (tmp_path / "flood.py").write_text(FLOOD)
    limits = (f"--log_max_bytes={MAX_BYTES}", "--log_keep=2", *options)
    job = msrun.start("--worker_num=2", *limits, "flood.py", str(LINES), cwd=tmp_path).wait_for_workers(2)
    logs = [latest_job(job.log_dir) / f"worker_{rank}.log" for rank in range(2)]
    wait_until(lambda: all(taken(log) <= 3 * MAX_BYTES for log in logs), "what is old is freed")
    (tmp_path / "go").touch()
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    for log in logs:
        assert log.read_bytes().lstrip(b"\0") == WHOLE[-len(log.read_bytes().lstrip(b"\0")) :]
        assert 2 * MAX_BYTES <= len(log.read_bytes().lstrip(b"\0")) <= 3 * MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("victims", one_fast(["launcher", "fork server"], ["launcher"], ["fork server"]))
def test_kill_of_launcher_or_server_leaves_whole_logs(msrun, tmp_path, victims):
    (tmp_path / "flood.py").write_text(FLOOD)
    job = msrun.start("--worker_num=2", "--log_max_bytes=1M", "flood.py", "1000", cwd=tmp_path).wait_for_workers(2)
    pids = {"launcher": job.pid, "fork server": job.pid_of_fork_server()}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    job.finish()
    msrun.prove_nothing_left()
    for rank in (0, 1):
        assert (latest_job(job.log_dir) / f"worker_{rank}.log").read_bytes() == WHOLE[: WHOLE.index(b"line 1000\n")]


def test_plan_says_how_much_of_the_logs_stays(msrun_here, tmp_path):
    (tmp_path / "train.py").touch()
    options = ["--log_max_bytes=100M", "--log_keep=3", "train.py"]
    text = msrun_here("--dry_run", *options, cwd=tmp_path).stdout
    assert b"of each worker's the newest 300 MiB stay" in text
    plan = json.loads(msrun_here("--dry_run=json", *options, cwd=tmp_path).stdout)
    assert (plan["log_max_bytes"], plan["log_keep"]) == (100 * 2**20, 3)
