"""Many hosts over SSH, and what breaks: connections, servers, agents, the launcher, cables."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import FleetRunner
from job_runner import MARK, JobRunner, Running, wait_until
from ssh_net import SshNet

from msrun.launch.remote.log_sender import pack_piece
from msrun.launch.transport.pipe import MARKER

LIMIT = "--heartbeat_time_out=12"  # of a busy machine, too, nobody is to be given up by mistake


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is another one on every host."""
    return tmp_path_factory.mktemp("own_disk")


@pytest.fixture(scope="module")
def net(own_disk: Path) -> Iterator[SshNet]:
    """Two hosts and one to start from."""
    with SshNet(2, private=[own_disk]) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun: JobRunner, net: SshNet, tmp_path: Path) -> FleetRunner:
    return FleetRunner(msrun, net, tmp_path)


@pytest.fixture
def job(fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path) -> Running:
    """A job of two workers on two hosts that waits to be ended, with logs that have to be sent."""
    job = fleet.start([1, 1], LIMIT, workers / "wait.py", log_dir=own_disk / tmp_path.name)
    fleet.wait_for_workers(job, 2)
    return job


def events(job: Running) -> list[str]:
    return [json.loads(line)["event"] for line in (job.log_dir / "events.jsonl").read_text().splitlines()]


def events_text(job: Running) -> str:
    path = job.log_dir / "events.jsonl"
    return path.read_text() if path.exists() else ""


def state_of(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def silent_s(job: Running) -> float:
    """How long the launcher has written nothing into its event log."""
    return time.time() - (job.log_dir / "events.jsonl").stat().st_mtime


def end(fleet: FleetRunner, job: Running) -> None:
    """End a job that is to be well still."""
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_killed_launcher_takes_every_host_with_it(fleet: FleetRunner, job: Running) -> None:
    job.send(signal.SIGKILL)
    assert job.finish().code == -signal.SIGKILL
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_killed_launcher_takes_every_host_with_it_where_hangups_are_ignored(
    fleet: FleetRunner, workers: Path, tmp_path: Path
) -> None:
    """As under nohup: agents inherit that SIGHUP is ignored, and end all the same."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntrap '' HUP\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    job = fleet.start([1, 1], LIMIT, f"--python={python}", workers / "wait.py")
    fleet.wait_for_workers(job, 2)
    job.send(signal.SIGKILL)
    assert job.finish().code == -signal.SIGKILL
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_output_that_nobody_reads_holds_up_no_sign_of_life(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    """A paused terminal or `| less`, for longer than --heartbeat_time_out."""
    unread = 'mkfifo unread; exec 3<>unread; exec "$0" -m msrun "$@" >unread'
    job = fleet.runner.start(
        f"--hosts={fleet.hosts(1, 1)}",
        f"--forward_env={MARK}",
        "--heartbeat_time_out=2",
        workers / "go.py",
        "5000",
        cwd=tmp_path,
        prefix=fleet.net.prefix(fleet.net.control),
        command=("sh", "-c", unread, sys.executable),
        env={"HOME": str(fleet.net.home)},
    )
    fleet.wait_for_workers(job, 2)
    ready = time.monotonic()
    wait_until(lambda: time.monotonic() - ready > 6, "three times the limit has passed")
    (tmp_path / "go").touch()
    ended = job.finish()
    assert ended.code == 0, ended.stderr
    assert "stdout is not read: the rest of what workers wrote is in " in ended.stderr


@pytest.mark.slow
def test_stopped_launcher_says_so_and_the_job_goes_on_with_it(
    fleet: FleetRunner, workers: Path, tmp_path: Path
) -> None:
    """Ctrl-Z for longer than --heartbeat_time_out, then fg."""
    job = fleet.start(f"{fleet.net.name(0)}:1,localhost:1", "--heartbeat_time_out=2", workers / "go.py")
    fleet.wait_for_workers(job, 2)
    job.send(signal.SIGTSTP)
    wait_until(lambda: state_of(job.pid) == "T", "the launcher is stopped")
    wait_until(lambda: silent_s(job) > 6, "three times the limit has passed")
    (tmp_path / "go").touch()
    assert not any((tmp_path / f"done_{rank}").exists() for rank in range(2)), "workers are stopped, too"
    job.send(signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 0, ended.stderr


@pytest.mark.slow
def test_launcher_that_is_frozen_for_long_is_given_up_and_told_why(fleet: FleetRunner, workers: Path) -> None:
    """SIGSTOP cannot be announced; when the launcher goes on it does not blame the hosts."""
    job = fleet.start([1, 1], "--heartbeat_time_out=2", workers / "wait.py")
    fleet.wait_for_workers(job, 2)
    job.send(signal.SIGSTOP)
    wait_until(lambda: not fleet.agents(), "agents have given up", 30.0)
    job.send(signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 3
    assert "the launcher gave no sign of life for 2 s" in ended.errors[0]
    fleet.prove_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_killed_agent_ends_the_job_and_its_host_is_named(fleet: FleetRunner, job: Running, host: int) -> None:
    (agent,) = fleet.agents(host)
    os.kill(agent, signal.SIGKILL)
    ended = job.finish()
    assert ended.code == 3
    assert f"host{host}: the agent was ended by SIGKILL" in ended.errors[0]
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_job_goes_on_when_the_server_of_its_connection_is_killed(fleet: FleetRunner, job: Running) -> None:
    for session in fleet.net.sessions(1):
        os.kill(session, signal.SIGKILL)
    wait_until(lambda: "resumed" in events(job), "another connection is made")
    end(fleet, job)


@pytest.mark.slow
def test_job_goes_on_when_the_server_of_its_connection_stands_still(fleet: FleetRunner, job: Running) -> None:
    stopped = fleet.net.sessions(1)
    for session in stopped:
        os.kill(session, signal.SIGSTOP)
    wait_until(lambda: "resumed" in events(job), "another connection is made")
    end(fleet, job)
    for session in stopped:
        os.kill(session, signal.SIGKILL)


@pytest.mark.slow
def test_connection_that_breaks_before_the_job_begins_is_named(
    fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path
) -> None:
    job = fleet.start([1, 1], LIMIT, workers / "wait.py", log_dir=own_disk / tmp_path.name)
    (held,) = wait_until(lambda: fleet.agents(0), "the agent of host0")
    os.kill(held, signal.SIGSTOP)  # so that the job does not begin
    try:
        wait_until(lambda: fleet.agents(1), "the agent of host1")
        for session in fleet.net.sessions(1):
            os.kill(session, signal.SIGKILL)
        wait_until(lambda: not fleet.agents(1), "the agent has gone with its connection")
    finally:
        os.kill(held, signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 3
    assert "host1: the connection to it broke before the job began" in ended.errors[0]
    fleet.prove_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_words_of_a_killed_scheduler_are_where_the_error_says(fleet: FleetRunner, job: Running, host: int) -> None:
    (scheduler,) = [
        pid
        for pid in fleet.net.processes(host)
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"msrun: scheduler")
    ]
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


def stop(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("moment", ["before the job begins", "while it runs"])
def test_stopped_agent_is_named_and_nothing_of_its_host_stays(
    fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path, host: int, moment: str
) -> None:
    job = fleet.start([1, 1], "--heartbeat_time_out=5", workers / "wait.py", log_dir=own_disk / tmp_path.name)
    if moment == "while it runs":
        fleet.wait_for_workers(job, 2)
        stop(*fleet.agents(host))
    else:
        (held,) = wait_until(lambda: fleet.agents(1 - host), "the agent of the other host")
        stop(held)
        wait_until(lambda: f'"agent_up", "node_rank": {host}' in events_text(job), "the agent was asked")
        stop(*fleet.agents(host))
        os.kill(held, signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 3
    assert f"host{host}: no sign of life for " in ended.errors[0]
    assert "or its agent is stopped" in ended.errors[0]
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_agent_that_is_stopped_before_it_has_said_anything_is_named_and_goes_when_it_continues(
    fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path
) -> None:
    job = fleet.start([1, 1], "--cluster_time_out=3", workers / "wait.py", log_dir=own_disk / tmp_path.name)
    (agent,) = wait_until(lambda: fleet.agents(1), "the agent of host1")
    stop(agent)
    ended = job.finish()
    assert ended.code == 124
    assert "host1: --cluster_time_out 3: no answer in time; connected, but its agent says nothing" in ended.errors[0]
    os.kill(agent, signal.SIGCONT)
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_stopped_agent_whose_launcher_is_killed_goes_with_its_workers(
    fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path
) -> None:
    job = fleet.start([1, 1], "--heartbeat_time_out=5", workers / "wait.py", log_dir=own_disk / tmp_path.name)
    fleet.wait_for_workers(job, 2)
    stop(*fleet.agents(1))
    job.send(signal.SIGKILL)
    assert job.finish().code == -signal.SIGKILL
    wait_until(lambda: not fleet.agents() and not fleet.runner.processes(), "everything has ended")


@pytest.mark.slow
def test_cut_cable_ends_the_job_on_both_sides(
    fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path
) -> None:
    job = fleet.start([1, 1], "--heartbeat_time_out=5", workers / "wait.py", log_dir=own_disk / tmp_path.name)
    fleet.wait_for_workers(job, 2)
    fleet.net.cut(1)
    try:
        ended = job.finish()
        assert ended.code == 3
        assert "host1" in ended.errors[0]
        fleet.prove_nothing_left()
    finally:
        fleet.net.mend(1)


@pytest.mark.slow
def test_short_cut_is_survived(fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path) -> None:
    job = fleet.start([1, 1], "--heartbeat_time_out=60", workers / "count.py", log_dir=own_disk / tmp_path.name)
    log = job.log_dir / "worker_1.log"
    wait_until(lambda: log.exists() and log.stat().st_size > 200, "its log comes home")
    for session in fleet.net.sessions(1):
        os.kill(session, signal.SIGKILL)
    wait_until(lambda: "resumed" in events(job), "another connection is made")
    (fleet.cwd / "go_on").touch()
    ended = job.finish()
    assert ended.code == 0, ended.stderr
    for rank in range(2):
        assert ended.log(rank).decode().splitlines() == [f"line {number}" for number in range(400)]
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_slow_link_holds_up_no_worker(fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path) -> None:
    log_dir = own_disk / tmp_path.name
    fleet.net.limit(1, "2mbit")
    try:
        job = fleet.start([1, 1], "--tail_worker_log=none", workers / "noise.py", log_dir=log_dir)
        job.wait_for(fleet.cwd / "written_0", fleet.cwd / "written_1")  # 1 MB that does not shrink: 5 s of the link
        assert (job.log_dir / "worker_1.log").stat().st_size < 1_000_000
        ended = job.finish()
    finally:
        fleet.net.limit(1, "10gbit")
    assert ended.code == 0, ended.stderr
    assert len(ended.log(1)) == 1_000_000
    fleet.prove_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_msrun_that_ends_while_it_connects_leaves_nothing(fleet: FleetRunner, workers: Path, signum: int) -> None:
    os.kill(fleet.net.server(1), signal.SIGSTOP)
    try:
        job = fleet.start([1, 1], workers / "wait.py")
        wait_until(lambda: fleet.agents(0), "an agent runs on the other host")
        job.send(signum)
        assert job.finish().code in (130, -signal.SIGKILL)
        wait_until(lambda: not fleet.agents(), "no agent is left")
    finally:
        os.kill(fleet.net.server(1), signal.SIGCONT)
    fleet.prove_nothing_left()
    assert not list(fleet.cwd.glob("ready_*"))


@pytest.fixture
def slow_python(tmp_path: Path) -> Path:
    """A Python that takes its time before it begins."""
    path = tmp_path / "slow_python"
    path.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_interrupt_while_hosts_are_looked_at_starts_nothing_later(
    fleet: FleetRunner, workers: Path, slow_python: Path
) -> None:
    job = fleet.start([1, 1], f"--python={slow_python}", workers / "wait.py")
    wait_until(lambda: slow_pythons(fleet, slow_python), "a Python runs on a host")
    job.send(signal.SIGINT)
    ended = job.finish()
    assert ended.code == 130
    assert ended.errors == ["msrun: error: stopped by SIGINT"]
    fleet.prove_nothing_left()
    wait_until(lambda: not slow_pythons(fleet, slow_python), "the slow Python has come to its end, too", 20.0)
    assert not list(fleet.cwd.glob("ready_*")) and not fleet.agents()


def slow_pythons(fleet: FleetRunner, path: Path) -> list[int]:
    """Return the processes of the slow Python that run on the hosts."""
    found = []
    for pid in fleet.net.processes(0, 1):
        try:
            found += [pid] if str(path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
def test_hosts_that_do_not_answer_in_time_are_named(fleet: FleetRunner, workers: Path, slow_python: Path) -> None:
    slow_python.write_text(slow_python.read_text().replace("sleep 3", "sleep 600"))
    job = fleet.run([1, 1], f"--python={slow_python}", "--cluster_time_out=2", workers / "wait.py")
    assert job.code == 124
    said = "no answer in time; connected, but its agent says nothing: it is slow to start, or stopped"
    assert job.errors == [f"msrun: error: all 2 hosts: --cluster_time_out 2: {said}"]
    for pid in slow_pythons(fleet, slow_python):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_full_disk_here_loses_logs_says_so_and_ends_no_job(
    fleet: FleetRunner, workers: Path, own_disk: Path, tmp_path: Path
) -> None:
    log_dir = own_disk / tmp_path.name
    at_control = fleet.net.prefix(fleet.net.control)
    subprocess.run([*at_control, "mkdir", str(log_dir)], check=True)
    subprocess.run([*at_control, "mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(log_dir)], check=True)
    ended = fleet.run([1, 1], "--tail_worker_log=none", workers / "noise.py", log_dir=log_dir)
    assert ended.code == 0, ended.stderr
    assert re.search(r"msrun: logs are not complete: .*worker_[01]\.log: No space left on device", ended.stderr)


@pytest.mark.slow
def test_worker_that_ignores_term_is_killed_on_every_host(fleet: FleetRunner, workers: Path) -> None:
    job = fleet.start([1, 1], "--grace=1", workers / "wait.py", "ignore-term")
    fleet.wait_for_workers(job, 2)
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_second_interrupt_kills_at_once_on_every_host(fleet: FleetRunner, workers: Path) -> None:
    job = fleet.start([1, 1], "--grace=300", workers / "wait.py", "ignore-term")
    fleet.wait_for_workers(job, 2)
    job.send(signal.SIGINT)
    wait_until(lambda: "stopping" in events(job), "the job is being stopped")
    job.send(signal.SIGINT)
    assert job.finish().code == 130
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_killed_scheduler_ends_the_job_on_every_host(fleet: FleetRunner, job: Running) -> None:
    pids = [json.loads(line) for line in (job.log_dir / "events.jsonl").read_text().splitlines()]
    scheduler = next(event["pid"] for event in pids if event["event"] == "host_scheduler" and event["node_rank"] == 0)
    os.kill(scheduler, signal.SIGKILL)
    ended = job.finish()
    assert ended.code == 3
    assert "scheduler" in ended.errors[0] and "host0" in ended.errors[0]
    fleet.prove_nothing_left()


HOSTILE = """\
#!{python}
# Stands between an agent and the launcher: what the agent says goes through, and once a worker runs, more.
import json, struct, subprocess, sys
agent = subprocess.Popen([{python!r}, *sys.argv[1:]], stdout=subprocess.PIPE)
out, said = sys.stdout.buffer, {said!r}
begun = b""
while not begun.endswith({marker!r}):
    begun += agent.stdout.read(1)
out.write(begun)
while header := agent.stdout.read(4):
    body = agent.stdout.read(struct.unpack("!I", header)[0])
    out.write(header + body)
    if json.loads(body).get("moment") == "started":
        out.write(struct.pack("!I", len(said)) + said)
    out.flush()
sys.exit(agent.wait())
"""


def hostile_fleet(fleet: FleetRunner, said: bytes, tmp_path: Path) -> Path:
    """Return a hostfile whose second host has such an agent."""
    program = tmp_path / "hostile_python"
    program.write_text(HOSTILE.format(python=sys.executable, said=said, marker=MARKER))
    program.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"host0 slots=1 python={sys.executable}\nhost1 slots=1 python={program}\n")
    return hostfile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", "message is nested too deeply"),
        pytest.param(b'{"type":["event"]}', "Expected `str`, got `list`", marks=pytest.mark.slow),
    ],
)
def test_host_whose_agent_says_what_cannot_be_understood_is_given_up(
    fleet: FleetRunner, said: bytes, reason: str, workers: Path, tmp_path: Path
) -> None:
    hostfile = hostile_fleet(fleet, said, tmp_path)
    job = fleet.start("", f"--hostfile={hostfile}", workers / "wait.py").finish()
    assert job.code == 3, job.stderr
    assert job.errors[0].startswith("msrun: error: host1: ") and reason in job.errors[0], job.errors
    assert "Traceback" not in job.stderr
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_host_that_writes_the_log_of_another_is_not_heeded(fleet: FleetRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    piece = json.dumps(pack_piece("worker_0.log", 0, b"forged")).encode()
    hostfile = hostile_fleet(fleet, piece, tmp_path)
    job = fleet.start("", f"--hostfile={hostfile}", "train.py").finish()
    assert job.code == 0, job.stderr
    assert [job.log(rank) for rank in range(2)] == [b"rank 0\n", b"rank 1\n"]
    fleet.prove_nothing_left()
