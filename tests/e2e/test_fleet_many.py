"""Sixteen hosts over SSH, all of them and some that are dead, closed or strange."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import FleetRunner
from job_runner import JobRunner
from ssh_net import SshNet


@pytest.fixture(scope="module")
def net() -> Iterator[SshNet]:
    """Sixteen hosts and one to start from."""
    with SshNet(16) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun: JobRunner, net: SshNet, tmp_path: Path) -> FleetRunner:
    return FleetRunner(msrun, net, tmp_path)


@pytest.mark.slow
def test_sixteen_hosts_run_one_job_from_a_hostfile(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("host[0-7] slots=2\nhost[8-15] slots=1\n")
    job = fleet.runner.start(
        "--hostfile=hosts.txt",
        "--tail_worker_log=none",
        workers / "end.py",
        "all",
        "0",
        cwd=tmp_path,
        prefix=fleet.net.prefix(fleet.net.control),
        env={"HOME": str(fleet.net.home)},
    ).finish()
    assert job.code == 0, job.stderr
    assert "all 24 workers on 16 hosts finished successfully" in job.stderr
    assert [job.log(rank) for rank in range(24)] == [b"rank %d begins\n" % rank for rank in range(24)]
    hosts = job.read_json("plan.json")["fleet"]
    assert [host["name"] for host in hosts] == [f"host{host}" for host in range(16)]
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_nothing_starts_when_one_of_eight_hosts_is_dead(fleet: FleetRunner, workers: Path) -> None:
    fleet.net.cut(3)
    try:
        job = fleet.run("host[0-7]:1", "--ssh_connect_time_out=4", workers / "wait.py")
    finally:
        fleet.net.mend(3)
    assert job.code == 3
    assert job.errors[0].startswith("msrun: error: host3")
    assert not list(fleet.cwd.glob("ready_*"))
    assert "started" not in [event["event"] for event in job.events]


@pytest.mark.slow
def test_everything_that_is_wrong_with_any_host_is_said_at_once(fleet: FleetRunner, workers: Path) -> None:
    (fleet.net.client / "known_hosts").rename(fleet.net.client / "known_hosts.all")
    try:
        lines = (fleet.net.client / "known_hosts.all").read_text().splitlines()
        (fleet.net.client / "known_hosts").write_text("\n".join(lines[1:]) + "\n")
        hosts = "host0:1,host1:1,host2:1,nobody.invalid:1"
        checked = fleet.run(hosts, "--check", workers / "end.py", "all", "0")
        job = fleet.run(hosts, workers / "wait.py")
    finally:
        (fleet.net.client / "known_hosts.all").replace(fleet.net.client / "known_hosts")
    assert checked.code == job.code == 3
    failures = [line for line in checked.stdout.decode().splitlines() if line.startswith("fail")]
    assert len(failures) == 2
    assert "host0" in failures[0] and "SHA256:" in failures[0]
    assert "nobody.invalid" in failures[1]
    assert "1 more" in job.errors[0]
    assert not list(fleet.cwd.glob("ready_*"))


@pytest.mark.slow
def test_failure_on_the_last_host_ends_the_job_on_all(fleet: FleetRunner, workers: Path) -> None:
    job = fleet.start("host[0-15]:1", "--grace=5", workers / "fail_last.py")
    fleet.wait_for_workers(job, 16)
    (fleet.cwd / "fail").touch()
    ended = job.finish()
    assert ended.code == 9
    assert ended.errors[0].startswith("msrun: error: rank 15 on node 15 (host15")
    assert "ranks 0-14 stopped by msrun" in ended.stderr
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_interrupt_reaches_all_hosts(fleet: FleetRunner, workers: Path) -> None:
    job = fleet.start("host[0-15]:1", workers / "wait.py")
    fleet.wait_for_workers(job, 16)
    job.send(signal.SIGINT)
    assert job.finish().code == 130
    fleet.prove_nothing_left()
