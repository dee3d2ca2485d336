"""One job per directory; the kernel keeps the lock, so that it is never stale and always names its holder."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun import contract
from msrun.errors import UsageError
from msrun.launch.directory import log_directory as module
from msrun.launch.directory.log_directory import JobLock, LockRecord, parse_object, parse_record, read_lock

HOLDER = """
import sys
from pathlib import Path
from msrun.errors import UsageError
from msrun.launch.directory.log_directory import JobLock
with JobLock(Path(sys.argv[1]), sys.argv[2]) as lock:
    try:
        lock.take()
    except UsageError as error:
        print(error, flush=True)
        sys.exit(2)
    print("held", flush=True)
    sys.stdin.readline()
"""
ROOT = Path(__file__).resolve().parents[4]


def start_holder(log_dir, job_id="first"):
    """Start a process that takes the lock and keeps it until it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(log_dir), job_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def holder(tmp_path):
    with start_holder(tmp_path / "logs") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_directory_is_made_and_the_record_tells_of_the_job(tmp_path):
    with JobLock(tmp_path / "a" / "logs", "id") as lock:
        lock.take()
        path = tmp_path / "a" / "logs" / contract.LOCK_FILE
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    fields = json.loads(path.read_text())
    assert abs(fields.pop("started_at") - time.time()) < 60
    assert fields == {"job_id": "id", "pid": os.getpid(), "host": socket.gethostname()}


def test_record_of_a_job_that_has_just_taken_the_directory_is_waited_for(tmp_path, holder, monkeypatch):
    """The lock is taken first: for a moment the file holds what an earlier job wrote."""
    path = tmp_path / "logs" / contract.LOCK_FILE
    right = path.read_bytes()
    path.write_bytes(right.replace(b"first", b"older").replace(str(holder.pid).encode(), b"1"))
    monkeypatch.setattr(module.time, "sleep", lambda _: path.write_bytes(right))
    state = read_lock(tmp_path / "logs")
    assert state.is_held and state.record is not None and state.record.job_id == "first"
    assert replace(state, record=None).describe() == f"a job that is just starting (pid {holder.pid})"


def test_second_job_is_told_who_holds_the_directory_until_that_has_ended(tmp_path, holder):
    before = (tmp_path / "logs" / contract.LOCK_FILE).read_bytes()
    with pytest.raises(UsageError) as caught, JobLock(tmp_path / "logs", "second") as lock:
        lock.take()
    assert str(caught.value) == (
        f"--log_dir {tmp_path}/logs: in use by job first (pid {holder.pid} on host {socket.gethostname()}); "
        f"give another --log_dir, or end that job with msrun --stop {tmp_path}/logs"
    )
    assert (tmp_path / "logs" / contract.LOCK_FILE).read_bytes() == before
    for _ in range(2):  # looking does not take it away
        state = read_lock(tmp_path / "logs")
        assert (state.holder_pid, state.record and state.record.job_id) == (holder.pid, "first")
    holder.kill()
    holder.wait()
    state = read_lock(tmp_path / "logs")
    assert not state.is_held and state.record is not None and state.record.pid == holder.pid
    with JobLock(tmp_path / "logs", "second") as lock:
        lock.take()


def test_children_that_end_do_not_take_the_lock_along(tmp_path):
    with JobLock(tmp_path, "id") as lock:
        lock.take()
        pid = os.fork()
        if pid == 0:
            os.closerange(3, 256)
            os._exit(0)
        os.waitpid(pid, 0)
        subprocess.run([sys.executable, "-c", ""], check=True)
        with start_holder(tmp_path) as other:
            assert other.stdout is not None
            assert f"in use by job id (pid {os.getpid()} on" in other.stdout.read()
        assert other.returncode == 2


def test_shorter_record_leaves_nothing_of_a_longer_one(tmp_path):
    for job_id in ("long" * 50, "short"):
        with JobLock(tmp_path, job_id) as lock:
            lock.take()
    data = (tmp_path / contract.LOCK_FILE).read_bytes()
    assert json.loads(data)["job_id"] == "short"
    assert data.count(b"\n") == 1


def test_why_a_job_came_to_nothing_is_recorded(tmp_path):
    with pytest.raises(UsageError), JobLock(tmp_path, "id") as lock:
        lock.take()
        raise UsageError("no good")
    state = read_lock(tmp_path)
    assert state.record is not None
    assert (state.record.error, state.is_held) == ("no good", False)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_plain_file_is_refused_and_left_alone(tmp_path, kind):
    path = tmp_path / contract.LOCK_FILE
    if kind == "link":
        (tmp_path / "target").write_text("kept")
        path.symlink_to(tmp_path / "target")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    refused = pytest.raises(UsageError, match=r"^--log_dir .*job\.lock .*; give a directory that you may write")
    with refused, JobLock(tmp_path, "id") as lock:
        lock.take()
    with pytest.raises(OSError):
        read_lock(tmp_path)
    if kind == "link":
        assert (tmp_path / "target").read_text() == "kept"


def test_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    import errno
    import fcntl

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    refused = pytest.raises(UsageError, match=r"cannot lock .* \(No locks available\); .*file system with locks")
    with refused, JobLock(tmp_path, "id") as lock:
        lock.take()


GOOD = {"job_id": "a", "pid": 5, "host": "h", "started_at": 1.5}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (json.dumps(GOOD), LockRecord("a", 5, "h", 1.5)),
        (json.dumps(GOOD) + '\nrest of a longer "record"}', LockRecord("a", 5, "h", 1.5)),
        (json.dumps({**GOOD, "error": "e", "later": 1}), LockRecord("a", 5, "h", 1.5, "e")),
        (json.dumps({**GOOD, "job_id": ""}), None),
        (json.dumps({**GOOD, "pid": "5"}), None),
        (json.dumps({**GOOD, "pid": True}), None),
        (json.dumps({**GOOD, "started_at": float("nan")}), None),
        (json.dumps({**GOOD, "host": None}), None),
        (json.dumps(GOOD)[:-1], None),
        ("[" * 100_000, None),
        ("[1]", None),
        ("", None),
    ],
)
def test_record_is_read_or_is_none(data, expected):
    assert parse_record(data.encode()) == expected


@given(st.binary(max_size=200), st.integers(0, 80))
def test_no_bytes_are_an_error(noise, begin):
    good = json.dumps(GOOD).encode()
    parse_record(noise)
    parse_record(good[:begin] + noise + good[begin:])
    assert isinstance(parse_object(noise), dict)
