"""The agent's event loop against a fork server that says what the test wants."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msrun.agent.processes.process_spec import SCHEDULER_ID
from msrun.agent.processes.server_handle import ForkServerHandle
from msrun.agent.supervisor import Supervisor
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.cluster.membership import WorkerState
from msrun.cluster.messages import Channel, Message
from msrun.errors import ClusterError, Interrupted
from msrun.planning.build import build_plan
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

FAILED = 7 << 8


class Job:
    """Two workers, one restart. `say` is what the fork server reports; `heard` what it was asked for since."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        spec = LaunchSpec(
            program=Program("script", "/train.py"),
            worker_num=2,
            local_worker_num=2,
            working_directory=folder,
            log_dir=folder,
            max_restarts=1,
        )
        facts = HostFacts("node-a", "127.0.0.1", (0,))
        plan = build_plan(spec, facts, caller={}, job_id="JOB", run_dir=str(folder / "run"), master_port=1)
        ours, theirs = socket.socketpair()
        passing, taking = socket.socketpair()
        passing.close()
        taking.close()
        self.server = Channel(theirs)
        handle = ForkServerHandle(process, Channel(ours), passing, {}, "")
        self.board = ProgressBoard(folder / "run" / "progress", 2)
        more: dict[str, Any] = {"caller": {}, "strangers": (), "home": plan.log_dir, "stopped_limit_s": 15.0}
        self.loop = Supervisor(plan, plan.hosts[0], handle, self.board, [], **more)
        self._handle = handle

    def say(self, kind: str, **fields: Any) -> None:
        self.server.send({"type": kind, **fields})
        self.loop._on_server()

    def heard(self) -> list[Message]:
        self.server._socket.settimeout(0.0)
        messages = self.server.receive()
        self.server._socket.settimeout(None)
        return messages

    def begin(self) -> None:
        """Come so far that the fork server has been asked for everything."""
        self.say("ready", start_method="fork", reason="", prepare_s=0.0)
        self.say("started", process_id=SCHEDULER_ID, pid=100, at=0.0)

    def start(self) -> None:
        for rank in range(2):
            self.say("started", process_id=rank, pid=101 + rank, at=0.0)

    def fail(self) -> None:
        """Rank 0 fails and rank 1 is gone before it can be told."""
        self.say("exited", process_id=0, status=FAILED, peak_bytes=0.0, at=1.0)
        self.say("exited", process_id=1, status=FAILED, peak_bytes=0.0, at=1.1)

    def close(self) -> None:
        self.server.close()
        self._handle.channel.close()
        self.board.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        made = Job(tmp_path, process)
        yield made
        made.close()


def kinds(messages: list[Message]) -> list[str]:
    return [message["type"] for message in messages]


def test_words_about_an_attempt_that_is_over_do_not_end_the_next_one(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    assert kinds(job.heard()) == ["start", "start", "stop", "sweep"]
    job.start()
    job.say("told", attempt=0, not_started=[])
    membership = job.loop._attempt.membership
    assert not membership.are_told
    job.say("exited", process_id=1, status=FAILED, peak_bytes=0.0, at=2.0)
    assert membership.members[1].state is WorkerState.FAILED, "by itself, not stopped by msrun"
    job.say("told", attempt=1, not_started=[])
    assert membership.are_told


def test_job_does_not_start_again_beside_processes_that_could_not_be_ended(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.heard()
    job.say("swept", survivors=[4711])
    fault = job.loop._attempt.fault
    assert isinstance(fault, ClusterError)
    assert str(fault) == "cannot start again: processes [4711] could not be ended"
    assert job.loop._over
    assert "start" not in kinds(job.heard())


def test_restart_waits_for_a_store_without_what_the_last_attempt_left(job: Job) -> None:
    ours, theirs = socket.socketpair()
    scheduler, agent = Channel(ours), Channel(theirs)
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    job.heard()
    job.loop._restart()
    assert job.heard() == [], "there is no fresh store yet"
    scheduler.send({"type": "store_ready", "attempt": 1})
    job.loop._on_scheduler(agent)
    job.loop._restart()
    assert kinds(job.heard()) == ["start"]
    scheduler.close()
    agent.close()


def test_restart_without_an_answer_of_the_scheduler_is_given_up(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    _, give_up = job.loop._timers._due["store"]
    give_up()
    assert "cannot start again: the scheduler has not answered" in str(job.loop._attempt.fault)
    assert job.loop._over


def test_workers_that_have_not_said_that_they_started_are_told_to_end_all_the_same(job: Job) -> None:
    job.begin()
    job.heard()
    job.loop._on_signal(signal.SIGTERM)
    assert kinds(job.heard()) == ["stop"]
    assert not job.loop._over, "the fork server may have started them"
    job.say("started", process_id=0, pid=101, at=0.0)
    job.say("told", attempt=0, not_started=[1])
    job.say("exited", process_id=0, status=signal.SIGTERM, peak_bytes=0.0, at=1.0)
    states = [member.state for member in job.loop._attempt.membership.members.values()]
    assert states == [WorkerState.STOPPED, WorkerState.STOPPED]
    assert job.loop._over
    assert isinstance(job.loop._attempt.fault, Interrupted)


def test_end_before_anything_was_asked_for_is_at_once(job: Job) -> None:
    job.loop._on_signal(signal.SIGTERM)
    assert job.loop._over
    assert job.heard() == []


def test_process_that_cannot_be_started_ends_the_job_with_the_servers_words(job: Job) -> None:
    job.begin()
    job.say("started", process_id=0, pid=101, at=0.0)
    job.heard()
    job.say("cannot_start", reason="cannot start worker 1: no room")
    assert str(job.loop._attempt.fault) == "cannot start worker 1: no room, on node-a"
    assert kinds(job.heard()) == ["stop"]
