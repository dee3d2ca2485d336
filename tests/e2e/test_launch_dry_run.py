"""--dry_run touches nothing and prints exactly the plan of the run; --check says what a host lacks for it."""

import json
import os
import re
import socket
import sys

import pytest
from asked_cases import one_fast
from job_runner import WORKERS

OPTIONS = ["--worker_num=3", "--env", "API_KEY=hidden", "--env", "A=b c", "--tail_worker_log=0,2", "--grace=2.5"]
HOOKED = """
import sys
def hook(event, args):
    if event in ('socket.bind', 'socket.connect', 'subprocess.Popen', 'os.fork', 'os.exec', 'os.mkdir'):
        raise SystemExit(f'{event} in a dry run')
sys.addaudithook(hook)
from msrun.cli import main
main()
"""


def snapshot(*folders):
    """Return every entry below these folders with size and time of change."""
    found = []
    for folder in folders:
        for root, names, files in os.walk(folder):
            for name in [*names, *files]:
                status = os.lstat(os.path.join(root, name))
                found.append((os.path.join(root, name), status.st_size, status.st_mtime_ns))
    return sorted(found)


@pytest.mark.parametrize("form", one_fast("--dry-run", "--dry_run=json"))
def test_dry_run_touches_nothing_and_says_the_same_twice(msrun, odd_path, form):
    (odd_path / "train.py").write_bytes((WORKERS / "record.py").read_bytes())
    before = snapshot(odd_path)
    words = (*OPTIONS, form, "train.py", "--lr", "0.1")
    finished = msrun.run(*words, cwd=odd_path, command=[sys.executable, "-c", HOOKED])
    assert (finished.code, finished.stderr) == (0, "")
    assert finished.stdout and b"hidden" not in finished.stdout
    assert msrun.run(*words, cwd=odd_path).stdout == finished.stdout
    assert snapshot(odd_path) == before


def test_dry_run_is_the_plan_of_the_run(msrun, msrun_here, tmp_path):
    script = [WORKERS / "record.py", "--lr", "0.1"]
    dry = json.loads(msrun_here(*OPTIONS, "--dry_run=json", *script, cwd=tmp_path).stdout)
    finished = msrun.run(*OPTIONS, *script, cwd=tmp_path)
    real = finished.read_plan()

    def without_what_is_chosen_at_start(plan):
        env = plan["hosts"][0]["env"]
        job_id, run_dir, port = plan.pop("job_id"), plan.pop("run_dir"), plan["master"].pop("port")
        assert (env.pop("MSRUN_JOB_ID"), env.pop("TORCHELASTIC_RUN_ID")) == (job_id, job_id)
        assert env.pop("MSRUN_RENDEZVOUS") == f"file://{run_dir}/store"
        assert env.pop("MSRUN_PROGRESS") == f"{run_dir}/progress"
        assert (env.pop("MASTER_PORT"), env.pop("MS_SCHED_PORT")) == (str(port), str(port))
        return plan

    assert without_what_is_chosen_at_start(dry) == without_what_is_chosen_at_start(real)


@pytest.mark.slow
def test_bytes_that_are_no_text_can_be_printed(msrun, tmp_path):
    finished = msrun.run("--dry_run", WORKERS / "record.py", b"\xff", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert b"\xff" in finished.stdout
    finished = msrun.run("--dry_run=json", WORKERS / "record.py", b"\xff", cwd=tmp_path)
    assert json.loads(finished.stdout)["hosts"][0]["program"]["args"] == ["\udcff"]


# -- --check -----------------------------------------------------------------------------------------------------------

NAMES = ["program", "log_dir", "disk", "temporary", "shared_memory", "master_port", "tls", "devices", "rank_table"]
NAMES += ["memory", "open_files", "processes", "python", "torch"]


@pytest.fixture
def checked(tmp_path):
    """A directory with a script that would leave a trace."""
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    return tmp_path


def lines_of(text):
    """Return name -> (status, finding)."""
    found = {}
    for line in text.decode().splitlines():
        match = re.fullmatch(r"(ok|warn|fail) +(\w+) +(.+)", line)
        assert match, line
        found[match[2]] = (match[1], match[3])
    return found


def test_good_host_is_said_to_be_good_and_nothing_is_started(msrun, checked):
    finished = msrun.run("--worker_num=2", "--check", "train.py", cwd=checked)
    assert finished.code == 0, finished.stdout
    assert finished.stderr == ""
    found = lines_of(finished.stdout)
    assert list(found) == NAMES
    assert "fail" not in {status for status, _ in found.values()}
    assert found["program"] == ("ok", f"script {checked / 'train.py'}")
    assert os.listdir(checked) == ["train.py"]


def test_quiet_shows_only_what_needs_attention(msrun_here, checked):
    finished = msrun_here("--worker_num=2", "--quiet", "--check", "-m", "no_such_module", cwd=checked)
    assert finished.code == 2
    found = lines_of(finished.stdout)
    assert "ok" not in {status for status, _ in found.values()}
    assert found["program"][0] == "fail"


def test_everything_that_fails_is_shown_at_once(msrun_here, checked):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--device_target=gpu", "--log_dir=train.py", "--rank_table_file=no.json", f"--master_port={port}"]
        finished = msrun_here("--worker_num=2", *options, "--check", "train.py", cwd=checked)
    assert finished.code == 2
    found = lines_of(finished.stdout)
    failed = {name for name, (status, _) in found.items() if status == "fail"}
    assert failed == {"log_dir", "master_port", "devices", "rank_table"}
    assert f"taken by pid {os.getpid()} (" in found["master_port"][1]
    assert os.listdir(checked) == ["train.py"]


@pytest.mark.slow
def test_host_without_room_is_another_kind_of_failure_and_stops_a_run_too(msrun, checked):
    few = ["prlimit", "--nofile=33"]
    finished = msrun.run("--worker_num=2", "--check", "train.py", cwd=checked, prefix=few)
    assert finished.code == 3
    assert lines_of(finished.stdout)["open_files"][0] == "fail"
    finished = msrun.run("--worker_num=2", "train.py", cwd=checked, prefix=few)
    assert finished.code == 3
    assert "33 open files allowed for each process, 2 workers need 34" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert os.listdir(checked) == ["train.py"]
