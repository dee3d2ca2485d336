"""--check says line by line whether this host can run the job, and starts nothing."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from job_runner import JobRunner

NAMES = [
    "program",
    "log_dir",
    "disk",
    "temporary",
    "shared_memory",
    "master_port",
    "tls",
    "devices",
    "rank_table",
    "memory",
    "open_files",
    "processes",
    "python",
    "torch",
]


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """A directory with a script that would leave a trace."""
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    return tmp_path


def lines_of(text: bytes) -> dict[str, tuple[str, str]]:
    """Return name -> (status, finding)."""
    found = {}
    for line in text.decode().splitlines():
        match = re.fullmatch(r"(ok|warn|fail) +(\w+) +(.+)", line)
        assert match, line
        found[match[2]] = (match[1], match[3])
    return found


@pytest.mark.parametrize("form", ["--check", "--check=True"])
def test_good_host_is_said_to_be_good_and_nothing_is_started(msrun: JobRunner, cwd: Path, form: str) -> None:
    finished = msrun.run("--worker_num=2", form, "train.py", cwd=cwd)
    assert finished.code == 0, finished.stdout
    assert finished.stderr == ""
    found = lines_of(finished.stdout)
    assert list(found) == NAMES
    assert "fail" not in {status for status, _ in found.values()}
    assert found["program"] == ("ok", f"script {cwd / 'train.py'}")
    assert os.listdir(cwd) == ["train.py"]


@pytest.mark.slow
def test_check_may_come_from_a_variable_and_be_taken_back(msrun: JobRunner, cwd: Path) -> None:
    finished = msrun.run("--worker_num=1", "train.py", cwd=cwd, env={"MSRUN_CHECK": "1"})
    assert list(lines_of(finished.stdout)) == NAMES
    finished = msrun.run("--worker_num=1", "--check=False", "train.py", cwd=cwd, env={"MSRUN_CHECK": "1"})
    assert finished.code == 0 and (cwd / "started").exists()


def test_quiet_shows_only_what_needs_attention(msrun: JobRunner, cwd: Path) -> None:
    finished = msrun.run("--worker_num=2", "--quiet", "--check", "-m", "no_such_module", cwd=cwd)
    assert finished.code == 2
    found = lines_of(finished.stdout)
    assert "ok" not in {status for status, _ in found.values()}
    assert found["program"][0] == "fail"


def test_everything_that_fails_is_shown_at_once(msrun: JobRunner, cwd: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--device_target=gpu", "--log_dir=train.py", "--rank_table_file=no.json", f"--master_port={port}"]
        finished = msrun.run("--worker_num=2", *options, "--check", "train.py", cwd=cwd)
    assert finished.code == 2
    found = lines_of(finished.stdout)
    assert {name for name, (status, _) in found.items() if status == "fail"} == {
        "log_dir",
        "master_port",
        "devices",
        "rank_table",
    }
    assert f"taken by pid {os.getpid()} (" in found["master_port"][1]
    assert os.listdir(cwd) == ["train.py"]


def test_host_without_room_is_another_kind_of_failure_and_stops_a_run_too(msrun: JobRunner, cwd: Path) -> None:
    few = ["prlimit", "--nofile=33"]
    finished = msrun.run("--worker_num=2", "--check", "train.py", cwd=cwd, prefix=few)
    assert finished.code == 3
    assert lines_of(finished.stdout)["open_files"][0] == "fail"
    finished = msrun.run("--worker_num=2", "train.py", cwd=cwd, prefix=few)
    assert finished.code == 3
    assert "33 open files allowed for each process, 2 workers need 34" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert os.listdir(cwd) == ["train.py"]


def test_words_that_are_wrong_are_refused_before_any_check(msrun: JobRunner, cwd: Path) -> None:
    finished = msrun.run("--worker_num=0", "--check", "train.py", cwd=cwd)
    assert (finished.code, finished.stdout) == (2, b"")
    assert "--worker_num 0: must be 1 or more" in finished.stderr


def test_port_in_use_stops_a_run_and_names_its_owner(msrun: JobRunner, cwd: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finished = msrun.run("--worker_num=1", f"--master_port={taken.getsockname()[1]}", "train.py", cwd=cwd)
    assert finished.code == 2
    assert f"(Address already in use), taken by pid {os.getpid()} (" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert os.listdir(cwd) == ["train.py"]
