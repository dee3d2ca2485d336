"""`msrun --status LOG_DIR --watch` follows a job to its end: on a terminal, through a pipe, as JSON."""

import re
from contextlib import closing

import pytest
from job_runner import wait_until
from terminal import Terminal

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
