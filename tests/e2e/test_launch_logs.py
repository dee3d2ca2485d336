"""The log directory and the console: all that workers write, the record of the job, how it is shown, how much stays."""

import json
import os
import re
import signal
import stat

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, latest_job, wait_until

from ranktable import read_table, validate_table

LINES = 3000


def expected_log(rank):
    """Return what flood.py writes to its one file, stdout and stderr in the order of their writing."""
    lines = "".join(f"rank {rank} line {number} {'x' * (number % 97)}\n" for number in range(LINES)).encode()
    return lines + bytes(range(256)) + "ünïcode ☃ on stderr\n".encode() + b"no end of line"


@pytest.fixture(scope="module", params=one_fast("fork", "exec"))
def flooded(msrun_of_module, tmp_path_factory, request):
    cwd = tmp_path_factory.mktemp("flood")
    options = ["--worker_num=3", "--start_method", request.param, "--tail_worker_log=2", "--raw"]
    finished = msrun_of_module.run(*options, WORKERS / "flood.py", str(LINES), cwd=cwd, env={"PYTHONUTF8": "1"})
    assert finished.code == 0, finished.stderr
    return finished


def test_every_byte_of_a_worker_is_in_its_log_and_of_the_chosen_rank_on_the_console(flooded):
    for rank in range(3):
        assert flooded.log(rank) == expected_log(rank)
    assert flooded.stdout == expected_log(2)
    assert "rank 2 line" not in flooded.stderr


def test_directory_holds_the_files_of_the_contract_and_is_private(flooded):
    names = {"events.jsonl", "job.lock", "plan.json", "rank_table.json", "scheduler.log"}
    names |= {f"worker_{rank}.log" for rank in range(3)}
    assert set(os.listdir(flooded.log_dir)) == names
    assert stat.S_IMODE(flooded.log_dir.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in flooded.log_dir.iterdir()} == {0o600}
    table = read_table(flooded.log_dir / "rank_table.json")
    assert table.world_size == 3
    assert [p for p in validate_table(table, device_target="cpu") if p.severity == "error"] == []


def test_events_and_the_schedulers_log_tell_the_whole_job_in_order(flooded):
    events = [event["event"] for event in flooded.events]
    assert events[:2] == ["preparing", "ready"]
    assert sorted(events[2:]) == sorted(["scheduler", *["started"] * 3, "running", *["exited"] * 3, "over"])
    assert events.index("running") < events.index("exited")
    assert events[-1] == "over"
    times = [event["job_s"] for event in flooded.events]
    assert times == sorted(times)
    assert {event["state"] for event in flooded.events if event["event"] == "exited"} == {"done"}
    text = (flooded.log_dir / "scheduler.log").read_text()
    assert f"job {flooded.read_json('plan.json')['job_id']}: 3 workers on" in text
    for rank in range(3):
        assert f"rank {rank} registered: pid " in text and f"rank {rank} ended: exit code 0" in text
    assert "3 of 3" in text
    assert text.splitlines()[-2].endswith("job over: all workers ended with exit code 0")


@pytest.mark.slow
def test_quiet_says_nothing_but_errors(msrun, tmp_path):
    job = msrun.run("--quiet", "--worker_num=1", "--tail_worker_log=none", WORKERS / "end.py", "all", "3", cwd=tmp_path)
    assert (job.stdout, job.log(0)) == (b"", b"rank 0 begins\n")
    assert job.stderr.startswith("msrun: error: rank 0 on ")


@pytest.mark.slow
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
@pytest.mark.parametrize(("options", "is_lost"), one_fast(((), False), (("--env=PYTHONUNBUFFERED=",), True)))
def test_last_line_of_a_worker_that_ends_hard_is_there_unless_blocks_were_asked_for(
    msrun, tmp_path, method, options, is_lost
):
    (tmp_path / "w.py").write_text("import os\nprint('the last line')\nos._exit(0)\n")
    finished = msrun.run("--worker_num=1", f"--start_method={method}", *options, "w.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert finished.log(0) == (b"" if is_lost else b"the last line\n")


# -- --log_split and --log_time ----------------------------------------------------------------------------------------

TRAIN = """
import os, sys
print("epoch 1")
print("rank", os.environ["RANK"])
print("to stderr", file=sys.stderr)
if sys.argv[1:] == ["fails"] and os.environ["RANK"] == "1":
    raise ValueError("no such data set")
"""


@pytest.fixture
def cwd(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize("where", one_fast("--worker_num=2", "--rehearse=2x1"))
def test_stderr_has_a_log_of_its_own_and_is_stderr_here_and_the_time_stands_before_each_line(msrun, cwd, where):
    job = msrun.run(where, "--log_split", "--log_time", "train.py", cwd=cwd)
    assert job.code == 0, job.stderr
    for rank in (0, 1):
        assert job.log(rank) == f"epoch 1\nrank {rank}\n".encode()
        assert (job.log_dir / f"worker_{rank}.stderr.log").read_bytes() == b"to stderr\n"
        assert (cwd / "log_output" / f"worker_{rank}.stderr.log").read_bytes() == b"to stderr\n"
    assert re.sub(rb"^\d\d:\d\d:\d\d\.\d{3} ", b"+ ", job.stdout, flags=re.MULTILINE) == b"+ epoch 1\n+ rank 0\n"
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} to stderr$", job.stderr, re.MULTILINE)


@pytest.mark.slow
def test_a_failure_is_reported_from_the_log_that_has_the_traceback(msrun, cwd):
    for _ in range(2):
        words = ("--log_split", "--log_keep_jobs=1", "--start_method=exec", "train.py", "fails")
        job = msrun.run("--worker_num=2", *words, cwd=cwd)
        assert job.code == 1
        assert f"{job.log_dir}/worker_1.stderr.log" in job.stderr
        assert "ValueError: no such data set" in job.stderr
    folders = [path for path in (cwd / "log_output").iterdir() if path.is_dir() and not path.is_symlink()]
    assert folders == [job.log_dir], "all that an earlier job wrote is removed with its folder"


# -- what workers write reaches a terminal as text, not as orders to it ------------------------------------------------

CLIPBOARD, DEVICE, CLEAR, C1, BIDI = "\x1b]52;c;SEVMTE8=\x07", "\x1bP+q544e\x1b\\", "\x1b[2J\x1b[H", "\x9b2J", "\u202e"
HOSTILE = CLIPBOARD + DEVICE + CLEAR + C1 + BIDI
ORDERS = (b"\x1b", b"\x07", "\x9b".encode(), BIDI.encode())


@pytest.mark.parametrize("options", one_fast((), (("--raw",),)), ids=["text", "raw"])
def test_orders_to_a_terminal_are_shown_as_text(msrun, msrun_here, tmp_path, options):
    head = 'import sys\nsys.stdout.reconfigure(encoding="utf-8")\n'
    (tmp_path / "hostile.py").write_text(
        f'{head}print("tail", {HOSTILE!r}, "end of tail")\nraise ValueError({HOSTILE!r})\n'
    )
    failed = msrun.run("--worker_num=1", "--env=PYTHONUTF8=1", *options, "hostile.py", cwd=tmp_path)
    assert HOSTILE.encode() in failed.log(0)
    if options:
        assert HOSTILE.encode() in failed.stdout
        return
    path = failed.log_dir / "failure.json"
    path.write_text(json.dumps({**failed.read_json("failure.json"), "reason": HOSTILE}))
    status = msrun_here(f"--status={failed.log_dir}", cwd=tmp_path).stdout
    assert b"end of tail" in failed.stdout and "ValueError" in failed.stderr and b"failed" in status
    for shown in (failed.stdout, failed.stderr.encode(), status):
        assert [order for order in ORDERS if order in shown] == []


# -- --log_max_bytes: logs that take no more than so much disk, whose newest bytes are all there ----------------------

FLOOD = """
import os, pathlib, sys, time
for number in range(int(sys.argv[1])):
    print("line", number)
pathlib.Path(f"ready_{os.environ['RANK']}").touch()
while not os.path.exists("go"):
    time.sleep(0.01)
print("last words")
"""
NUMBERED = 20_000
MAX_BYTES = 16 * 1024
WHOLE = b"".join(b"line %d\n" % number for number in range(NUMBERED)) + b"last words\n"


def taken(log):
    return 512 * log.stat().st_blocks


@pytest.mark.parametrize("options", one_fast(["--log_split"], ["--start_method=exec"], ["--interactive"]))
def test_newest_bytes_of_each_log_stay_and_the_rest_is_freed_while_it_runs(msrun, tmp_path, options):
    (tmp_path / "flood.py").write_text(FLOOD)
    limits = (f"--log_max_bytes={MAX_BYTES}", "--log_keep=2", *options)
    job = msrun.start("--worker_num=2", *limits, "flood.py", str(NUMBERED), cwd=tmp_path).wait_for_workers(2)
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
