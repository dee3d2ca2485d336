"""Many hosts over SSH, and what breaks: connections, servers, agents, the launcher, cables."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos_places import command_line
from job_runner import MARK, WORKERS, state_of, wait_until

pytestmark = pytest.mark.slow


NOISE = """
import os, sys
sys.stdout.buffer.write(os.urandom(1_000_000))  # it cannot be made smaller
sys.stdout.buffer.flush()
open("written_" + os.environ["RANK"], "w").close()
"""


@pytest.fixture
def noise(tmp_path):
    (tmp_path / "noise.py").write_text(NOISE)
    return tmp_path / "noise.py"


def start(fleet, own_disk, *words):
    """Start a worker on each of two hosts, with logs that have to be sent."""
    return fleet.start([1, 1], *words, log_dir=own_disk / fleet.cwd.name)


def processes_with(fleet, sign, *hosts):
    """Return the processes of hosts that have this in their command lines."""
    return [pid for pid in fleet.net.processes(*hosts) if sign in command_line(pid)]


def silent_s(job):
    """How long the launcher has written nothing into its event log."""
    return time.time() - (job.log_dir / "events.jsonl").stat().st_mtime


def test_killed_launcher_takes_every_host_with_it_where_hangups_are_ignored(fleet, tmp_path):
    """As under nohup: agents inherit that SIGHUP is ignored, and end all the same."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntrap '' HUP\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    job = fleet.start([1, 1], f"--python={python}", WORKERS / "wait.py").wait_for_workers(2)
    job.send(signal.SIGKILL)
    assert job.finish().code == -signal.SIGKILL
    fleet.prove_nothing_left()


def test_output_that_nobody_reads_holds_up_no_sign_of_life(fleet, tmp_path):
    """A paused terminal or `| less`, for longer than --heartbeat_time_out."""
    unread = 'mkfifo unread; exec 3<>unread; exec "$0" -m msrun "$@" >unread'
    job = fleet.runner.start(
        f"--hosts={fleet.hosts(1, 1)}",
        f"--forward_env={MARK}",
        "--heartbeat_time_out=2",
        WORKERS / "go.py",
        "5000",
        cwd=tmp_path,
        prefix=fleet.net.prefix(fleet.net.control),
        command=("sh", "-c", unread, sys.executable),
        env={"HOME": str(fleet.net.home)},
    )
    job.wait_for_workers(2)
    ready = time.monotonic()
    wait_until(lambda: time.monotonic() - ready > 6, "three times the limit has passed")
    (tmp_path / "go").touch()
    ended = job.finish()
    assert ended.code == 0, ended.stderr
    assert "stdout is not read: the rest of what workers wrote is in " in ended.stderr


def test_stopped_launcher_says_so_and_the_job_goes_on_with_it(fleet, tmp_path):
    """Ctrl-Z for longer than --heartbeat_time_out, then fg."""
    job = fleet.start(f"{fleet.net.name(0)}:1,localhost:1", "--heartbeat_time_out=2", WORKERS / "go.py")
    job.wait_for_workers(2)
    job.send(signal.SIGTSTP)
    wait_until(lambda: state_of(job.pid) == "T", "the launcher is stopped")
    wait_until(lambda: silent_s(job) > 6, "three times the limit has passed")
    (tmp_path / "go").touch()
    assert not any((tmp_path / f"done_{rank}").exists() for rank in range(2)), "workers are stopped, too"
    job.send(signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 0, ended.stderr


def test_launcher_that_is_frozen_for_long_is_given_up_and_told_why(fleet):
    """SIGSTOP cannot be announced; when the launcher goes on it does not blame the hosts."""
    job = fleet.start([1, 1], "--heartbeat_time_out=2", WORKERS / "wait.py").wait_for_workers(2)
    job.send(signal.SIGSTOP)
    wait_until(lambda: not fleet.agents(), "agents have given up", 30.0)
    job.send(signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 3
    assert "the launcher gave no sign of life for 2 s" in ended.errors[0]
    fleet.prove_nothing_left()


@pytest.mark.parametrize("host", [0, 1])
def test_words_of_a_killed_scheduler_are_where_the_error_says(fleet, own_disk, host):
    job = start(fleet, own_disk, WORKERS / "wait.py").wait_for_workers(2)
    (scheduler,) = processes_with(fleet, b"msrun: scheduler", host)
    os.kill(scheduler, signal.SIGKILL)
    ended = job.finish()
    assert ended.code == 3
    words = ended.errors[0].partition("the scheduler ended (signal SIGKILL); ")[2]
    if host == 0:
        assert words.startswith("its log: ")
        assert fleet.net.path(fleet.net.control, Path(words.removeprefix("its log: "))).read_bytes()
    else:
        assert words.startswith("its last words: 20")
    fleet.prove_nothing_left()


def stop(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("host", [0, 1])
def test_agent_that_is_stopped_before_the_job_begins_is_named(fleet, own_disk, host):
    job = start(fleet, own_disk, "--heartbeat_time_out=5", WORKERS / "wait.py")
    (held,) = wait_until(lambda: fleet.agents(1 - host), "the agent of the other host")
    stop(held)
    events_file = job.log_dir / "events.jsonl"
    asked = f'"agent_up", "node_rank": {host}'
    wait_until(lambda: events_file.exists() and asked in events_file.read_text(), "the agent was asked")
    stop(*fleet.agents(host))
    os.kill(held, signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 3
    assert re.search(rf"host{host}: no sign of life for .*or its agent is stopped", ended.errors[0])
    fleet.prove_nothing_left()


def test_stopped_agent_whose_launcher_is_killed_goes_with_its_workers(fleet, own_disk):
    job = start(fleet, own_disk, "--heartbeat_time_out=5", WORKERS / "wait.py").wait_for_workers(2)
    stop(*fleet.agents(1))
    job.send(signal.SIGKILL)
    assert job.finish().code == -signal.SIGKILL
    wait_until(lambda: not fleet.agents() and not fleet.runner.processes(), "everything has ended")


def test_slow_link_holds_up_no_worker(fleet, own_disk, noise):
    fleet.net.limit(1, "2mbit")
    try:
        job = start(fleet, own_disk, "--tail_worker_log=none", noise)
        job.wait_for(fleet.cwd / "written_0", fleet.cwd / "written_1")  # 1 MB that does not shrink: 5 s of the link
        assert (job.log_dir / "worker_1.log").stat().st_size < 1_000_000
        ended = job.finish()
    finally:
        fleet.net.limit(1, "10gbit")
    assert ended.code == 0, ended.stderr
    assert len(ended.log(1)) == 1_000_000
    fleet.prove_nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_msrun_that_ends_while_it_connects_leaves_nothing(fleet, signum):
    os.kill(fleet.net.server(1), signal.SIGSTOP)
    try:
        job = fleet.start([1, 1], WORKERS / "wait.py")
        wait_until(lambda: fleet.agents(0), "an agent runs on the other host")
        job.send(signum)
        assert job.finish().code in (130, -signal.SIGKILL)
        wait_until(lambda: not fleet.agents(), "no agent is left")
    finally:
        os.kill(fleet.net.server(1), signal.SIGCONT)
    fleet.prove_nothing_left()
    assert not list(fleet.cwd.glob("ready_*"))


def test_full_disk_here_loses_logs_says_so_and_ends_no_job(fleet, own_disk, noise):
    log_dir = own_disk / fleet.cwd.name
    at_control = fleet.net.prefix(fleet.net.control)
    subprocess.run([*at_control, "mkdir", str(log_dir)], check=True)
    subprocess.run([*at_control, "mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(log_dir)], check=True)
    ended = fleet.run([1, 1], "--tail_worker_log=none", noise, log_dir=log_dir)
    assert ended.code == 0, ended.stderr
    assert re.search(r"msrun: logs are not complete: .*worker_[01]\.log: No space left on device", ended.stderr)
