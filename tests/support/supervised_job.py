"""The agent's event loop, driven by a fork server, a scheduler and a coordinator that say what the test wants."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from failure_reports import fault_of

from msrun.agent.attempt import Attempt
from msrun.agent.host_supervisor import HostSupervisor
from msrun.agent.observer import Observers, OwnFaults
from msrun.agent.processes.process_spec import SCHEDULER_ID
from msrun.agent.processes.server_handle import ChildProcess, ForkServerHandle
from msrun.agent.supervisor import Supervisor
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.cluster.messages import Channel, Message
from msrun.cluster.own_thread import Inbox
from msrun.errors import ClusterError
from msrun.planning.build import build_plan
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec

FAILED = 7 << 8
"""Wait status of exit code 7."""


class Moments:
    """An observer that notes what it is told."""

    tick_s = None

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def note(self, kind: str, fields: Any) -> None:
        self.seen.append({"kind": kind, **fields})

    def tick(self, membership: Any) -> None:
        """Not asked for."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [moment for moment in self.seen if moment["kind"] == kind]


class Job:
    """Two workers, one restart. `say` is what the fork server reports; `heard` what it was asked for since."""

    def __init__(self, folder: Path, **options: Any) -> None:
        spec = LaunchSpec(
            program=Program("script", "/train.py"),
            worker_num=2,
            local_worker_num=2,
            working_directory=folder,
            log_dir=folder,
            **{"max_restarts": 1, **options},
        )
        facts = HostFacts("node-a", "127.0.0.1", (0,))
        plan = build_plan(spec, facts, caller={}, job_id="JOB", run_dir=str(folder / "run"), master_port=1)
        workers = tuple(replace(one, global_rank=rank) for one, rank in zip(plan.workers, self.ranks, strict=True))
        own = replace(plan.hosts[0], node_rank=self.node_rank, workers=workers)
        self.plan = replace(plan, fleet=self.fleet, hosts=(own,))
        self._process = subprocess.Popen(["sleep", "60"])
        self._process.kill()
        self._ends: list[socket.socket] = []
        self.board = ProgressBoard(folder / "run" / "progress", 1 + max(self.ranks))
        self.moments = Moments()
        self.loop = self.make_loop()

    def make_loop(self) -> Supervisor:
        more: dict[str, Any] = {"caller": {}, "strangers": (), "home": self.plan.log_dir, "stopped_limit_s": 15.0}
        more["stop_self"] = None
        observers = Observers([self.moments], OwnFaults(self.plan.log_dir, print, found_in=self.plan.log_dir))
        more["check_again"] = lambda survivors: self.check_again(survivors)
        return self.loop_class(self.plan, self.plan.hosts[0], self.start_own, self.board, observers, **more)

    def start_own(self) -> tuple[ForkServerHandle, Channel]:
        ours, theirs = socket.socketpair()
        passing, taking = socket.socketpair()
        passing.close()
        taking.close()
        self.server = Channel(theirs)
        handle = ForkServerHandle(ChildProcess(self._process), Channel(ours), passing, {}, "")
        ours, theirs = socket.socketpair()
        self._ends += [self.server._socket, theirs]
        return handle, Channel(ours)

    def check_again(self, survivors: list[int]) -> None:
        """Look at the host before a restart."""
        if survivors:
            raise ClusterError(f"{survivors} run still")

    loop_class = Supervisor
    node_rank = 0
    ranks: tuple[int, ...] = (0, 1)
    fleet: tuple[HostAssignment, ...] = ()

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

    def end(self, rank: int, status: int = 0) -> None:
        self.say("exited", process_id=rank, status=status, peak_bytes=7.0, at=1.0)

    def fail(self) -> None:
        """Rank 0 fails and rank 1 is gone before it can be told."""
        self.end(0, FAILED)
        self.end(1, FAILED)

    def run_timer(self, name: str) -> None:
        """Do what is to be done at a moment of this name, now."""
        _, action = self.loop._timers._due.pop(name)
        action()

    def has_store(self, attempt: int) -> None:
        """The scheduler has a fresh store for an attempt."""
        ours, theirs = socket.socketpair()
        scheduler, agent = Channel(ours), Channel(theirs)
        scheduler.send({"type": "store_ready", "attempt": attempt})
        self.loop._on_scheduler(agent)
        scheduler.close()
        agent.close()

    @property
    def attempt(self) -> Attempt:
        return self.loop._attempt

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self.loop._scheduler.close()
        self.loop._server.channel.close()
        self.loop._selector.close()
        self.board.close()
        self._process.wait()


class HostJob(Job):
    """The same on node 1 of a job of several hosts; `hear` is what the coordinator says, `told` what it was told."""

    loop_class = HostSupervisor
    loop: HostSupervisor
    node_rank = 1
    fleet = tuple(
        HostAssignment(node, f"h{node}", f"10.0.0.{node}", (2 * node, 2 * node + 1), (0, 1)) for node in range(2)
    )

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.inbox = Inbox()
        self.told: list[Message] = []
        self.loop.join(self.inbox, self.told.append, lambda attempt: fault_of(1, attempt.end_reason(), 7))

    def hear(self, kind: str, **fields: Any) -> None:
        self.inbox.post({"type": kind, **fields})
        self.loop._on_inbox()

    def hear_stop(self, attempt: int = 0, node_rank: int = 0, *, is_hang: bool = False) -> None:
        """A host has failed."""
        report = fault_of(node_rank, "rank 5 failed", 9, is_hang=is_hang)
        self.hear("stop", attempt=attempt, report=encode_record(report))

    def told_of(self, kind: str) -> list[Message]:
        return [message for message in self.told if message["type"] == kind]

    def close(self) -> None:
        super().close()
        self.inbox.close()


def kinds(messages: list[Message]) -> list[str]:
    return [message["type"] for message in messages]
