"""Parameter servers on several hosts, over SSH, rehearsed, or started by hand: placed in turns, known by a token, named
with their host when they fail.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import FleetRunner
from job_runner import WORKER_IMPORTS, Finished, JobRunner, Running, wait_until
from rehearsal import Rehearsals
from server_losses import expected_losses, losses
from ssh_net import SshNet

FOR_EVER = "1000000"
PRELOAD = [f"--preload={name}" for name in WORKER_IMPORTS]


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is another one on every host."""
    return tmp_path_factory.mktemp("own_disk")


@pytest.fixture(scope="module")
def net(own_disk: Path) -> Iterator[SshNet]:
    with SshNet(2, private=[own_disk]) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun: JobRunner, net: SshNet, tmp_path: Path) -> FleetRunner:
    return FleetRunner(msrun, net, tmp_path)


def start(fleet: FleetRunner, workers: Path, steps: str, pause: str, *options: str, **more: Path) -> Running:
    program = workers / "runtime" / "server_training.py"
    return fleet.start([1, 1], "--server_num=2", *PRELOAD, *options, program, steps, pause, **more)


def prove_losses(finished: Finished, steps: int, *, attempts: int) -> None:
    for rank, expected in enumerate(expected_losses(steps)):
        earlier = [finished.log_dir / f"worker_{rank}.attempt_{number}.log" for number in range(attempts - 1)]
        found = losses(*earlier, finished.log_dir / f"worker_{rank}.log")
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_job_that_lost_a_server_of_another_host_goes_on_from_its_checkpoint(
    fleet: FleetRunner, workers: Path, tmp_path: Path
) -> None:
    job = start(fleet, workers, "4", "2", "--max_restarts=1")
    job.wait_for(tmp_path / "at_0", tmp_path / "at_1")
    pid = job.pid_of("server_1")
    assert [pid in fleet.net.processes(host) for host in range(2)] == [False, True]
    os.kill(pid, signal.SIGKILL)
    finished = job.finish()
    fleet.prove_nothing_left()
    assert finished.code == 0, finished.stderr
    assert "server 1 failed first: signal SIGKILL" in finished.stderr
    prove_losses(finished, 4, attempts=2)
    for index in range(2):
        for name in (f"server_{index}.attempt_0.log", f"server_{index}.log"):
            assert f"listens on {fleet.net.address(index)}:" in (finished.log_dir / name).read_text()


@pytest.mark.slow
def test_rehearsed_job_that_lost_a_server_of_another_host_goes_on_from_its_checkpoint(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    program = workers / "runtime" / "server_training.py"
    words = ["--server_num=2", "--max_restarts=1", *PRELOAD, program, "3", "1"]
    job = Rehearsals(msrun, tmp_path).start("2x1", *words)
    job.wait_for(tmp_path / "at_0", tmp_path / "at_1")
    os.kill(job.pid_of("server_1"), signal.SIGKILL)
    finished = job.finish()
    msrun.prove_nothing_left()
    assert finished.code == 0, finished.stderr
    assert "host1, 127.0.0.3): server 1 failed first: signal SIGKILL" in finished.stderr
    prove_losses(finished, 3, attempts=2)
    for index, address in enumerate(("127.0.0.2", "127.0.0.3")):
        assert f"listens on {address}:" in (finished.log_dir / f"server_{index}.log").read_text()


@pytest.mark.slow
def test_server_of_a_host_that_is_lost_starts_on_a_spare_one(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    program = workers / "runtime" / "server_training.py"
    hosts = Rehearsals(msrun, tmp_path)
    words = ["--spares=1", "--server_num=2", "--max_restarts=1", *PRELOAD, program, "3", "1"]
    job = hosts.start("3x1", *words)
    job.wait_for(tmp_path / "at_0", tmp_path / "at_1")
    os.kill(hosts.agent(1), signal.SIGKILL)
    finished = job.finish()
    msrun.prove_nothing_left()
    assert finished.code == 0, finished.stderr
    assert "listens on 127.0.0.4:" in (finished.log_dir / "server_1.log").read_text()
    for rank, expected in enumerate(expected_losses(3)):
        found = losses(finished.log_dir / f"worker_{rank}.log")
        assert found == {step: pytest.approx(expected[step], rel=1e-12) for step in (2, 3)}


@pytest.mark.slow
def test_server_that_is_killed_is_named_with_its_host(fleet: FleetRunner, workers: Path, own_disk: Path) -> None:
    """The log directory is not on the other host's disk: its server's log is copied to it."""
    job = start(fleet, workers, FOR_EVER, "-1", log_dir=own_disk / "logs")
    wait_until(lambda: b"step 3 " in read(job.log_dir / "worker_0.log"), "a step")
    os.kill(job.pid_of("server_1"), signal.SIGKILL)
    finished = job.finish()
    fleet.prove_nothing_left()
    (error,) = finished.errors
    assert error.startswith("msrun: error: node 1 (host1, ")
    assert error.endswith("server 1 failed first: signal SIGKILL; its log: server_1.log")
    assert finished.code == 128 + signal.SIGKILL
    assert "listens on" in (finished.log_dir / "server_1.log").read_text()


@pytest.mark.slow
def test_hosts_that_are_started_by_hand_share_servers(fleet: FleetRunner, workers: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of this job")
    token.chmod(0o600)
    words = [f"--master_addr={fleet.net.address(0)}", "--worker_num=2", "--local_worker_num=1", "--server_num=3"]
    program = [workers / "runtime" / "server_training.py", "3", "0"]
    jobs = []
    for host in range(2):
        options = [*words, f"--node_rank={host}", f"--token_file={token}", f"--log_dir=logs_{host}", *PRELOAD]
        prefix = fleet.net.prefix(host)
        jobs.append(fleet.runner.start(*options, *program, cwd=tmp_path, prefix=prefix, log_dir=f"logs_{host}"))
    (tmp_path / "go").touch()
    for host, job in enumerate(jobs):
        finished = job.finish()
        assert finished.code == 0, finished.stderr
        found = sorted(path.name for path in finished.log_dir.rglob("server_*.log"))
        assert found == [["server_0.log", "server_2.log"], ["server_1.log"]][host]
        assert losses(*finished.log_dir.rglob("worker_*.log")) == pytest.approx(expected_losses(3)[host], rel=1e-12)


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
