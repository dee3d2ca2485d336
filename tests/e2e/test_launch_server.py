"""Parameter servers as processes of a job: started, watched, named when they fail, and gone with the job."""

import os
import signal
import socket

import pytest
from asked_cases import one_fast
from job_runner import PRELOAD, WORKERS, wait_until
from server_losses import expected_losses, losses

PROGRAM = WORKERS / "runtime" / "server_training.py"
FOR_EVER = "1000000"


def start(msrun, cwd, steps, pause, *options):
    words = ("--worker_num=2", "--server_num=2", *PRELOAD, *options, PROGRAM, steps, pause)
    return msrun.start(*words, cwd=cwd, env=msrun.warm())


def has_trained(job):
    log = job.log_dir / "worker_0.log"
    return log.exists() and b"step 3 " in log.read_bytes()


def prove_losses(finished, steps, *, attempts):
    for rank, expected in enumerate(expected_losses(steps)):
        earlier = [finished.log_dir / f"worker_{rank}.attempt_{number}.log" for number in range(attempts - 1)]
        found = losses(*earlier, finished.log_dir / f"worker_{rank}.log")
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("victim", one_fast("server_1", "1", "launcher"))
def test_servers_go_with_the_job(msrun, tmp_path, victim):
    job = start(msrun, tmp_path, FOR_EVER, "-1")
    wait_until(lambda: has_trained(job), "a step")
    os.kill(job.pid if victim == "launcher" else job.pid_of(victim), signal.SIGKILL)
    finished = job.finish()
    host = socket.gethostname()
    if victim != "launcher":
        who = "rank 1" if victim == "1" else "server 1"
        assert f"{who} on {host} failed first: signal SIGKILL" in finished.errors[0]
        assert finished.code == 128 + signal.SIGKILL
    msrun.prove_nothing_left()


@pytest.mark.slow
def test_job_that_lost_a_server_of_another_host_goes_on_from_its_checkpoint(rehearsals, tmp_path):
    words = ["--server_num=2", "--max_restarts=1", *PRELOAD, PROGRAM, "3", "1"]
    job = rehearsals.start("2x1", *words)
    job.wait_for(tmp_path / "at_0", tmp_path / "at_1")
    os.kill(job.pid_of("server_1"), signal.SIGKILL)
    finished = job.finish()
    rehearsals.runner.prove_nothing_left()
    assert finished.code == 0, finished.stderr
    assert "host1, 127.0.0.3): server 1 failed first: signal SIGKILL" in finished.stderr
    prove_losses(finished, 3, attempts=2)
    for index, address in enumerate(("127.0.0.2", "127.0.0.3")):
        assert f"listens on {address}:" in (finished.log_dir / f"server_{index}.log").read_text()


@pytest.mark.slow
def test_server_of_a_host_that_is_lost_starts_on_a_spare_one(rehearsals, tmp_path):
    words = ["--spares=1", "--server_num=2", "--max_restarts=1", *PRELOAD, PROGRAM, "3", "1"]
    job = rehearsals.start("3x1", *words)
    job.wait_for(tmp_path / "at_0", tmp_path / "at_1")
    os.kill(rehearsals.agent(1), signal.SIGKILL)
    finished = job.finish()
    rehearsals.runner.prove_nothing_left()
    assert finished.code == 0, finished.stderr
    assert "listens on 127.0.0.4:" in (finished.log_dir / "server_1.log").read_text()
    for rank, expected in enumerate(expected_losses(3)):
        found = losses(finished.log_dir / f"worker_{rank}.log")
        assert found == {step: pytest.approx(expected[step], rel=1e-12) for step in (2, 3)}


@pytest.mark.slow
def test_server_of_another_host_that_is_killed_is_named_with_it(fleet, own_disk):
    """The log directory is not on the other host's disk: its server's log is copied to it."""
    job = fleet.start([1, 1], "--server_num=2", *PRELOAD, PROGRAM, FOR_EVER, "-1", log_dir=own_disk / "logs")
    wait_until(lambda: has_trained(job), "a step")
    os.kill(job.pid_of("server_1"), signal.SIGKILL)
    finished = job.finish()
    fleet.prove_nothing_left()
    (error,) = finished.errors
    assert error.startswith("msrun: error: node 1 (host1, ")
    assert error.endswith("server 1 failed first: signal SIGKILL; its log: server_1.log")
    assert finished.code == 128 + signal.SIGKILL
    assert "listens on" in (finished.log_dir / "server_1.log").read_text()


@pytest.mark.slow
def test_hosts_that_are_started_by_hand_share_servers(fleet, tmp_path):
    token = tmp_path / "token"
    token.write_text("a secret of this job")
    token.chmod(0o600)
    words = [f"--master_addr={fleet.net.address(0)}", "--worker_num=2", "--local_worker_num=1", "--server_num=3"]
    jobs = []
    for host in range(2):
        options = [*words, f"--node_rank={host}", f"--token_file={token}", f"--log_dir=logs_{host}", *PRELOAD]
        place = {"cwd": tmp_path, "prefix": fleet.net.prefix(host), "log_dir": f"logs_{host}"}
        jobs.append(fleet.runner.start(*options, PROGRAM, "3", "0", **place))
    (tmp_path / "go").touch()
    for host, job in enumerate(jobs):
        finished = job.finish()
        assert finished.code == 0, finished.stderr
        found = sorted(path.name for path in finished.log_dir.rglob("server_*.log"))
        assert found == [["server_0.log", "server_2.log"], ["server_1.log"]][host]
        assert losses(*finished.log_dir.rglob("worker_*.log")) == pytest.approx(expected_losses(3)[host], rel=1e-12)
