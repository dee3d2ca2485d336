"""`--nnodes MIN:MAX` where msrun is typed on each host: hosts that come late, are lost, leave and come again."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from job_runner import JobRunner, Running, wait_until

FRONT_END = (sys.executable, "-m", "msrun.torchrun")
PROGRAM = """\
import os, time
from pathlib import Path
names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')
attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']
Path(f'new_{attempt}_{rank}').write_text(' '.join([*(os.environ[name] for name in names), str(os.getpid())]))
os.rename(f'new_{attempt}_{rank}', f'ran_{attempt}_{rank}')
while not Path(f'go_{attempt}').exists():
    time.sleep(0.01)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Hosts:
    """Hosts of one job, each an msrun of its own that is typed with the same words."""

    def __init__(self, msrun: JobRunner, cwd: Path) -> None:
        self.msrun, self.cwd, self.port = msrun, cwd, free_port()
        (cwd / "train.py").write_text(PROGRAM)

    def start(self, nnodes: str, *words: str, window: str = "30", workers: int = 1) -> Running:
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.port}"]
        given = [f"--nnodes={nnodes}", f"--nproc-per-node={workers}", *rendezvous]
        conf = f"--rdzv-conf=last_call_timeout={window}"
        return self.msrun.start(*given, conf, *words, "train.py", cwd=self.cwd, command=FRONT_END)

    def ran(self, job: Running, attempt: int, count: int) -> list[str]:
        """Return what the workers of an attempt see, once all of them run."""
        paths = [self.cwd / f"ran_{attempt}_{rank}" for rank in range(count)]
        job.wait_for(*paths)
        return [path.read_text().rpartition(" ")[0] for path in paths]

    def pid(self, attempt: int, rank: int) -> int:
        return int((self.cwd / f"ran_{attempt}_{rank}").read_text().split()[-1])

    def go(self, attempt: int) -> None:
        (self.cwd / f"go_{attempt}").touch()


@pytest.fixture
def hosts(msrun: JobRunner, tmp_path: Path) -> Hosts:
    return Hosts(msrun, tmp_path)


def test_those_that_have_come_run_the_job_and_a_later_one_waits_until_it_is_needed(hosts: Hosts) -> None:
    first = hosts.start("1:3", window="0.5", workers=2)
    assert hosts.ran(first, 0, 2) == ["0 0 2 0 1", "1 1 2 0 1"]
    late = hosts.start("1:3", workers=2)
    wait_until(lambda: "this host is used from its next start on" in late.stderr, "it waits")
    hosts.go(0)
    ended, unused = first.finish(), late.finish()
    assert ended.code == 0, ended.stderr
    assert ended.read_json("plan.json")["world_size"] == 2
    assert unused.code == 0 and "the job has ended without this host" in unused.stderr


@pytest.mark.slow
def test_the_most_begin_at_once_also_on_one_machine(hosts: Hosts) -> None:
    hosts.go(0)
    jobs = [hosts.start("1:2", window="600", workers=2) for _ in range(2)]
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    assert hosts.ran(jobs[0], 0, 4) == ["0 0 4 0 2", "1 1 4 0 2", "2 0 4 1 2", "3 1 4 1 2"]


def test_fewer_than_are_enough_wait(hosts: Hosts) -> None:
    job = hosts.start("2:3", window="0")
    wait_until(lambda: "1 of 3 registered, missing" in job.stderr, "it has waited for a while")
    job.send(signal.SIGTERM)
    assert job.finish().code == 143


def test_job_goes_on_with_fewer_hosts_and_with_one_that_comes_again(hosts: Hosts) -> None:
    """Loss, TERM and a late host, each of which starts the job again on those that are there."""
    first = hosts.start("1:3", "--max-restarts=3")
    wait_until(lambda: "registered with 1 worker" in first.stderr, "the scheduler is there")
    others = [hosts.start("1:3", "--max-restarts=3") for _ in range(2)]
    hosts.ran(first, 0, 3)
    others[1].send(signal.SIGKILL)
    others[1].finish()
    assert hosts.ran(first, 1, 2) == ["0 0 2 0 2", "1 0 2 1 2"]
    again = hosts.start("1:3", "--max-restarts=3")
    wait_until(lambda: "this host is used from its next start on" in again.stderr, "it waits")
    os.kill(hosts.pid(1, 0), signal.SIGKILL)
    assert hosts.ran(first, 2, 3) == ["0 0 3 0 3", "1 0 3 1 3", "2 0 3 2 3"]
    again.send(signal.SIGTERM)
    assert hosts.ran(first, 3, 2) == ["0 0 2 0 2", "1 0 2 1 2"]
    left = again.finish()
    assert left.code == 143 and "stopped by SIGTERM" in left.stderr
    hosts.go(3)
    ended = [job.finish() for job in (first, others[0])]
    assert [job.code for job in ended] == [0, 0], ended
    assert "left by a signal: host 3" in ended[0].stderr
    assert ended[0].read_json("plan.json")["world_size"] == 2
    hosts.msrun.prove_nothing_left()


def test_host_that_comes_is_used_at_once_where_that_is_wanted(hosts: Hosts) -> None:
    first = hosts.start("1:2", "--max-restarts=1", "--rescale=now", window="0")
    assert hosts.ran(first, 0, 1) == ["0 0 1 0 1"]
    late = hosts.start("1:2", "--max-restarts=1", "--rescale=now")
    assert hosts.ran(first, 1, 2) == ["0 0 2 0 2", "1 0 2 1 2"]
    hosts.go(1)
    ended = [job.finish() for job in (first, late)]
    assert [job.code for job in ended] == [0, 0], ended
    hosts.msrun.prove_nothing_left()
