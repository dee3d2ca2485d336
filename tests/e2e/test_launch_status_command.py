"""`msrun --status LOG_DIR` tells of a job that runs, ended, failed or died, from the outside, and touches nothing."""

import os
import re
import sys
from contextlib import closing

import pytest
from job_runner import WORKERS, wait_until
from terminal import Terminal

STEPS = """
import os, time
from pathlib import Path
rank = int(os.environ["RANK"])
print(f"epoch: 1 step: {40 + rank}, loss is 0.{rank}5", flush=True)
Path(f"ready_{rank}").touch()
while not Path("go").exists():
    time.sleep(0.01)
"""


def status(msrun_here, cwd, log_dir="log_output"):
    """Run `msrun --status`."""
    finished = msrun_here("--status", log_dir, cwd=cwd)
    assert finished.code in (0, 1), finished.stderr
    assert finished.stderr == ""
    return finished


def rows(finished):
    """Return the cells of the table, without its headings."""
    lines = finished.stdout.decode().splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("rank "))
    return [re.split(r"  +", line) for line in lines[begin + 1 :]]


def test_running_job_is_shown_with_its_workers_steps_and_losses(msrun, msrun_here, tmp_path):
    (tmp_path / "train.py").write_text(STEPS)
    job = msrun.start("--worker_num=2", "train.py", cwd=tmp_path).wait_for_workers(2)
    wait_until(lambda: b": running\n" in status(msrun_here, tmp_path).stdout, "running")
    shown = status(msrun_here, tmp_path)
    assert shown.code == 0
    host = os.uname().nodename
    head = shown.stdout.decode().splitlines()
    assert re.fullmatch(r"job \d{8}-\d{6}-[0-9a-f]{8}: running", head[0])
    assert re.fullmatch(rf"launcher pid {job.pid} on {host}, up [\d.]+ s", head[1])
    assert head[2] == f"logs in {shown.log_dir}"
    for rank, (name, where, pid, state, age, step, loss) in enumerate(rows(shown)):
        assert (name, where, pid, state) == (str(rank), host, str(job.pid_of(str(rank))), "running")
        assert (step, loss) == (str(40 + rank), f"0.{rank}5")
        assert re.fullmatch(r"[\d.]+ s ago", age)
    (tmp_path / "go").touch()
    assert job.finish().code == 0
    ended = status(msrun_here, tmp_path)
    assert ended.code == 0
    assert re.match(rb"job \S+: finished successfully: all workers ended", ended.stdout)
    assert [row[3] for row in rows(ended)] == ["done", "done"]


@pytest.mark.slow
def test_status_costs_little(msrun, tmp_path):
    """Neither torch nor numpy nor the model of rank tables nor, without a terminal, rich."""
    msrun.run("--worker_num=1", WORKERS / "end.py", "all", "0", cwd=tmp_path)
    program = (
        "import sys\nfrom msrun.cli import main\ntry:\n    main()\nfinally:\n"
        "    print({'torch', 'numpy', 'rich', 'yaml', 'ranktable.model'} & set(sys.modules), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program]
    finished = msrun.start("--status", "log_output", cwd=tmp_path, command=command).finish()
    assert (finished.code, finished.stderr) == (0, "set()\n")


# -- `msrun logs` ------------------------------------------------------------------------------------------------------

TRAIN = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for step in range(3):
    print(f"attempt {attempt} step {step} of rank {rank}", flush=True)
open(f"ready_{rank}", "w").close()
while "wait" in sys.argv:
    time.sleep(0.05)
    if os.path.exists(f"go_{attempt}"):
        print(f"last words of rank {rank} in attempt {attempt}", flush=True)
        sys.exit(1 if attempt == "0" else 7)
"""


@pytest.fixture
def cwd(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.slow
def test_last_lines_of_the_asked_ranks_are_shown_with_their_rank(msrun, msrun_here, cwd):
    assert msrun.run("--worker_num=3", "train.py", cwd=cwd).code == 0
    shown = msrun_here("logs", "-n", "2", "--ranks", "0,2", cwd=cwd)
    assert shown.stdout.decode().splitlines() == [
        "[0] attempt 0 step 1 of rank 0",
        "[0] attempt 0 step 2 of rank 0",
        "[2] attempt 0 step 1 of rank 2",
        "[2] attempt 0 step 2 of rank 2",
    ]
    assert msrun_here("logs", "-n", "0", cwd=cwd).stdout == b""
    alone = msrun_here("logs", "log_output", cwd=cwd)
    assert alone.stdout.decode().splitlines() == [f"attempt 0 step {step} of rank 0" for step in range(3)]
    status = msrun_here("status", cwd=cwd)
    assert (status.code, "finished successfully" in status.stdout.decode()) == (0, True)


def test_logs_are_followed_until_the_job_has_ended_also_over_a_restart(msrun, cwd):
    job = msrun.start("--worker_num=2", "--max_restarts=1", "--restart_on=1", "train.py", "wait", cwd=cwd)
    job.wait_for_workers(2)
    follower = msrun.start("logs", "-f", "--ranks=all", cwd=cwd)
    for attempt in (0, 1):
        for rank in (0, 1):
            wait_until(lambda a=attempt, r=rank: f"[{r}] attempt {a} step 2" in follower.stdout, "the log is shown")
        (cwd / f"go_{attempt}").touch()
    finished = job.finish()
    assert (finished.code, follower.finish().code) == (7, 1)
    lines = follower.stdout.splitlines()
    written = {f"[{rank}] {line}" for rank in (0, 1) for line in finished.log(rank).decode().splitlines()}
    assert any("last words" in line for line in written) and written <= {*lines}
    assert len(lines) == len(set(lines))


# -- `--status LOG_DIR --watch` follows a job to its end: on a terminal, through a pipe, as JSON ----------------------

SCRIPT = """
import os, sys, time
from msrun.runtime import report_progress
rank = int(os.environ["RANK"])
step = 0
while not os.path.exists("go"):
    step += 1
    report_progress(step, 0.5, total=100000)
    print("training, step", step, flush=True)
    open(f"ready_{rank}", "w").close()
    time.sleep(0.02)
if rank == 1 and os.path.exists("fail"):
    sys.exit("no more data")
"""


@pytest.fixture
def job(msrun, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return msrun.start("--worker_num=2", "train.py", cwd=tmp_path).wait_for_workers(2)


def watch_on_terminal(msrun, cwd):
    return Terminal(msrun, cwd, "--status", "log_output", "--watch=0.2", env={"LINES": "30"})


@pytest.mark.slow
def test_terminal_shows_one_table_and_keeps_the_last_one(msrun, job, tmp_path):
    with closing(watch_on_terminal(msrun, tmp_path)) as terminal:
        terminal.read_until(b"steps/s", 3)
        terminal.read_until(b" MiB")
        (tmp_path / "fail").touch()
        (tmp_path / "go").touch()
        assert terminal.finish() == 1
    assert job.finish().code == 1
    plain = re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", terminal.text).decode()
    assert re.search(r"\n0 +\S+ +running +\d+/100000 +[\d.]+ +0\.5 +\d+% +\d+ MiB +training, step \d+", plain), plain
    last = plain[plain.rindex("\r\nlogs in") :]
    assert re.search(r"\n1 +\S+ +failed: exit code 1 .*no more data", last), last
    assert terminal.text.count(b"\x1b[1A") > 10  # drawn in place


@pytest.mark.slow
def test_ctrl_c_leaves_with_130_and_the_terminal_as_it_was(msrun, job, tmp_path):
    with closing(watch_on_terminal(msrun, tmp_path)) as terminal:
        terminal.read_until(b"steps/s", 2)
        terminal.type(b"\x03")
        assert terminal.finish() == 130
        assert not terminal.is_raw
    assert terminal.text.rindex(b"\x1b[?25h") > terminal.text.rindex(b"\x1b[?25l")  # the cursor is there
    assert b"Traceback" not in terminal.text
    (tmp_path / "go").touch()
    assert job.finish().code == 0


def test_pipe_gets_the_headings_once_and_rows_that_have_changed(msrun, job, tmp_path):
    watching = msrun.start("--status", "log_output", "--watch=0.2", cwd=tmp_path)
    wait_until(lambda: watching.stdout.count(" running ") >= 6, "rows are shown")
    (tmp_path / "go").touch()
    assert job.finish().code == 0
    finished = watching.finish()
    assert (finished.code, finished.stderr) == (0, "")
    lines = finished.stdout.decode().splitlines()
    assert "\x1b" not in finished.stdout.decode()
    assert sum(line.startswith("time ") for line in lines) == 1
    rows = [re.split(r"  +", line) for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    steps = [int(row[4].partition("/")[0]) for row in rows if row[1] == "0"]
    assert steps == sorted(steps)
    assert {row[3] for row in rows[-2:]} == {"done"}
    assert any(line.startswith("job ") and "finished successfully" in line for line in lines[-3:])


@pytest.mark.slow
def test_reader_that_has_enough_is_no_error(msrun, job, tmp_path):
    piped = ["bash", "-c", '"$@" | head -c 100 >/dev/null; exit ${PIPESTATUS[0]}', "bash"]
    ended = msrun.start("--status", "log_output", "--watch=0.1", "--json", cwd=tmp_path, prefix=piped).finish()
    assert (ended.code, ended.stderr) == (0, "")
    (tmp_path / "go").touch()
    assert job.finish().code == 0
