"""The agent's event loop, driven by a fork server, a scheduler, a coordinator and a clock that the test plays."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from dataclasses import replace
from functools import partial

import psutil
from plans import plan_of, spec_of

from msrun.agent.observer import Observer, Observers, OwnFaults
from msrun.agent.processes.progress_board import ProgressBoard
from msrun.agent.processes.server_handle import SCHEDULER_ID, ForkServerHandle, ServerProcess
from msrun.agent.supervisor import Supervisor
from msrun.cluster.coordinator import Coordinator, OwnLink
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import Channel, Inbox
from msrun.errors import ClusterError
from msrun.launch.failure import report_failure
from msrun.planning.hosts import HostAssignment
from msrun.planning.placement.host import HostFacts

TURNS = 4
"""More than what one event leads to, one turn of the loop after the other."""


class Moments(Observer):
    """An observer that notes what it is told."""

    def __init__(self):
        self.seen = []

    def note(self, kind, fields):
        self.seen.append({"kind": kind, **fields})

    def of(self, kind):
        return [moment for moment in self.seen if moment["kind"] == kind]


class Signals:
    """In the place of a SignalPipe."""

    time_limit_s = 0.0

    def __init__(self):
        self._reader, self._writer = os.pipe()

    def fileno(self):
        return self._reader

    def come(self, signum):
        os.write(self._writer, bytes([signum]))

    def read(self):
        return list(os.read(self._reader, 64))

    def close(self):
        os.close(self._reader)
        os.close(self._writer)


class Job:
    """Two workers on one host, one restart. `do` has something happen, in words; `asked` is what became of it.

    Of several hosts it is node 1, and `order` is what the coordinator says; alone, it has a coordinator.
    """

    def __init__(self, folder, *, node_rank=None, **options):
        folder.mkdir(exist_ok=True)
        self.now = 0.0
        self.terminal, self.stop_self = options.pop("terminal", None), options.pop("stop_self", None)
        self.told = []
        """What the coordinator was told."""
        self.moments, self.signals = Moments(), Signals()
        self._folder, self._node_rank = folder, node_rank or 0
        self.plan = self._plan(node_rank, options)
        ranks = tuple(worker.global_rank for worker in self.plan.hosts[0].workers)
        self.ranks = ranks
        self.board = ProgressBoard(folder / "run" / "progress", 1 + max(ranks))
        self._process = subprocess.Popen(["sleep", "60"])
        self._process.kill()
        self._stack = contextlib.ExitStack()
        self.orders = self._stack.enter_context(contextlib.closing(Inbox()))
        send = lambda _: None  # noqa: E731
        if node_rank is None:
            link = OwnLink(Coordinator("JOB", {0: ranks}, RestartPolicy.of(self.plan)), 0)
            self.orders, send = self._stack.enter_context(contextlib.closing(link)).orders, link.pass_on

        def tell(message):
            self.told.append(message)
            send(message)

        observers = Observers([self.moments], OwnFaults(folder, print, found_in=str(folder)))
        self.loop = Supervisor(
            self.plan,
            self.plan.hosts[0],
            self._start_own,
            self.board,
            observers,
            orders=self.orders,
            send=tell,
            describe=partial(report_failure, self.plan),
            caller={},
            strangers={child.pid for child in psutil.Process().children()} - {self._process.pid},
            home=str(folder),
            stopped_limit_s=1e9,
            stop_self=self.stop_self,
            terminal=self.terminal,
            check_again=self.check_again,
            clock=lambda: self.now,
        )
        self.selector = self._stack.enter_context(selectors.DefaultSelector())
        self.loop.begin(self.signals, self.selector)
        self.settle()

    def _plan(self, node_rank, options):
        spec = spec_of(self._folder, log_dir=self._folder, **{"max_restarts": 1, "restart_on": (7,), **options})
        facts = HostFacts("node-a", "127.0.0.1", (0,))
        plan = plan_of(spec, facts, run_dir=str(self._folder / "run"))
        if node_rank is None:
            return plan
        fleet = tuple(HostAssignment(n, f"h{n}", f"10.0.0.{n}", (2 * n, 2 * n + 1), (0, 1)) for n in range(2))
        workers = (replace(one, global_rank=2 * node_rank + one.local_rank) for one in plan.workers)
        return replace(plan, fleet=fleet, hosts=(replace(plan.hosts[0], node_rank=node_rank, workers=tuple(workers)),))

    def _start_own(self):
        pairs = [socket.socketpair() for _ in range(3)]
        for one in (end for pair in pairs for end in pair):
            self._stack.callback(one.close)
        (ours, theirs), (scheduler, at_scheduler), (passing, _) = pairs
        theirs.settimeout(0.0)
        self.server, self.scheduler = Channel(theirs), Channel(at_scheduler)
        return ForkServerHandle(ServerProcess(self._process), Channel(ours), passing, {}, ""), Channel(scheduler)

    def check_again(self, survivors):
        """Look at the host before a restart."""
        if survivors:
            raise ClusterError(f"{list(survivors)} run still")

    # -- what happens -------------------------------------------------------------------------------------------------

    def settle(self):
        for _ in range(TURNS):
            if not self.loop.is_over:
                self.loop.turn(0.0)

    def say(self, kind, **fields):
        """The fork server reports."""
        self.server.send({"type": kind, **fields})
        self.settle()

    def order(self, kind, **fields):
        """The coordinator orders."""
        self.orders.post({"type": kind, **fields})
        self.settle()

    def do(self, *steps):
        """Have these happen, by their first words, with ranks as on this host: `exit 0 7`."""
        for step in steps:
            kind, *words = step.split()
            numbers = [int(getattr(signal, word, 0) or word) for word in words]
            getattr(self, f"_{kind}")(*numbers)

    def _ready(self):
        self.say("ready", start_method="fork", reason="", prepare_s=0.0)

    def _scheduler(self):
        self.say("started", process_id=SCHEDULER_ID, pid=100, at=0.0)

    def _start(self, local_rank):
        self.say("started", process_id=self.ranks[local_rank], pid=1 << 23, at=0.0)  # of no process

    def _run(self):
        self.do("ready", "scheduler", "start 0", "start 1")

    def _exit(self, local_rank, code=0):
        status = code << 8
        self.say("exited", process_id=self.ranks[local_rank], status=status, peak_bytes=7.0, at=1.0)

    def _killed(self, local_rank, signum):
        self.say("exited", process_id=self.ranks[local_rank], status=signum, peak_bytes=7.0, at=1.0)

    def _lose(self, process_id, code=0):
        """A process of msrun's own ends: with a code, or killed."""
        self.say("exited", process_id=process_id, status=code << 8 or signal.SIGKILL, peak_bytes=0.0, at=1.0)

    def _told(self, *not_started):
        ranks = [self.ranks[rank] for rank in not_started]
        self.say("told", attempt=self.attempt.number, not_started=ranks)

    def _fail(self):
        """The first worker fails, and the other is gone before it can be told."""
        self.do("exit 0 7", "exit 1 7")

    def _swept(self, *survivors):
        self.say("swept", survivors=list(survivors))

    def _store(self):
        """The scheduler has a fresh store."""
        self.scheduler.send({"type": "store_ready", "attempt": self.attempt.number})
        self.settle()

    def _again(self):
        """Everything is there for the next start."""
        self.do("swept", "store")

    def _signal(self, signum):
        self.signals.come(signum)
        self.settle()

    def _wait(self, seconds):
        self.now += seconds
        self.settle()

    def _hangup(self):
        """The fork server has gone."""
        self.server.close()
        self.settle()

    # -- what became of it --------------------------------------------------------------------------------------------

    def heard(self):
        """Return what the fork server was asked for since the last call."""
        found = []
        while not self.server.is_closed and (more := self.server.receive()):
            found += more
        return found

    @property
    def attempt(self):
        return self.loop.result.last

    def told_of(self, kind):
        return [message for message in self.told if message["type"] == kind]

    def close(self):
        with contextlib.suppress(ChildProcessError):
            self._process.wait()
        self._stack.close()
        self.signals.close()
        self.board.close()


def kinds(messages):
    return [message["type"] for message in messages]
