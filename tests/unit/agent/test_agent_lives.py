"""Random lives of agents whose fork servers work in their own time; with and without a coordinator."""

import random
import signal
import tempfile
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from supervised_job import Job

from msrun.agent.processes.server_handle import SCHEDULER_ID
from msrun.cluster.coordinator import Coordinator
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import Message

FAILED = 7 << 8


class ForkServer:
    """What a fork server does of what its agent asks for; the agent hears of it later, in the order of `said`."""

    def __init__(self, job):
        self.job = job
        self.waiting = deque()
        self.running = {}
        """Worker -> the attempt in which it was started."""
        self.said = deque([{"kind": "ready", "start_method": "fork", "reason": "", "prepare_s": 0.0}])
        self.is_stopping = False
        self._stores = 0

    def heed(self):
        """Take what the agent has asked for."""
        for message in self.job.heard():
            if message["type"] == "start":
                assert not self.running and not self.waiting, "workers beside those of another attempt"
                ranks = [process["process_id"] for process in message["processes"]]
                self.waiting.extend(rank for rank in ranks if rank >= 0)
                if SCHEDULER_ID in ranks:
                    self._start(SCHEDULER_ID)
            elif message["type"] == "stop":
                if not self.is_stopping:
                    self.said.append({"kind": "told", "attempt": message["attempt"], "not_started": [*self.waiting]})
                    self.waiting.clear()
                self.is_stopping = True
            elif message["type"] == "sweep":
                assert not self.running, "the attempt is not over"
                self.is_stopping = False
                self.said.append({"kind": "swept", "survivors": []})

    def _start(self, process_id):
        self.said.append({"kind": "started", "process_id": process_id, "pid": 100 + process_id, "at": 0.0})

    def start_next(self):
        rank = self.waiting.popleft()
        self.running[rank] = self.job.attempt.number
        self._start(rank)

    def end(self, rng):
        """A worker ends: by itself or, once it was told to, as msrun wants it."""
        rank = rng.choice([*self.running])
        del self.running[rank]
        status = int(signal.SIGTERM) if self.is_stopping else rng.choice((0, 0, 0, FAILED))
        self.said.append({"kind": "exited", "process_id": rank, "status": status, "peak_bytes": 0.0, "at": 1.0})

    def tell(self):
        self.job.say(**self.said.popleft())
        self.heed()

    def give_store(self):
        """The scheduler answers to a restart."""
        self._stores += 1
        self.job.do("store")
        self.heed()

    def interrupt(self):
        self.job.do("signal SIGTERM")
        self.heed()

    def steps(self, rng):
        """Return what may happen next here."""
        job = self.job
        if job.loop.is_over:
            return []
        found = [self.tell] * (2 if self.said else 0)
        found += [self.start_next] * bool(self.waiting) + [lambda: self.end(rng)] * bool(self.running)
        return found + [self.give_store] * (self._stores < len(job.moments.of("restarting")))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_life_of_one_host_ends_with_its_first_failure_and_nothing_running(seed):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="life-", dir="/tmp") as folder:
        job = Job(Path(folder))
        server = ForkServer(job)
        was_interrupted = False
        while steps := server.steps(rng):
            if rng.random() < 0.02:
                was_interrupted = True
                server.interrupt()
            else:
                rng.choice(steps)()
        job.close()
    assert job.loop.is_over and not server.running and not server.waiting
    attempts = job.loop.result.attempts
    assert [attempt.number for attempt in attempts] == [*range(len(attempts))] and len(attempts) <= 2
    assert all(attempt.has_failed for attempt in attempts[:-1]), "only a failure starts a job again"
    if len(attempts) == 1 and job.attempt.membership.first_failure is not None:
        assert was_interrupted, "it had a restart left"
    ends = [moment["state"] for moment in job.moments.of("exited")[-2:]]
    if not job.attempt.has_failed:
        assert ends == ["done", "done"]
    assert len(job.moments.of("stopping")) <= len(attempts)


class Host(Job):
    """One of two hosts whose coordinator hears and says what the test carries."""

    def __init__(self, folder, node_rank):
        self.node_rank = node_rank
        super().__init__(folder, node_rank=node_rank)
        self.unheard = deque[Message]()
        """What the coordinator has not heard yet."""
        self.waiting = deque()
        """What this host has not heard yet."""
        self.fork_server = ForkServer(self)
        self.is_lost = False

    def collect(self):
        self.unheard.extend(self.told)
        self.told.clear()

    def take_order(self):
        self.order(**{"kind" if name == "type" else name: value for name, value in self.waiting.popleft().items()})
        self.fork_server.heed()


def running(hosts):
    return {attempt for host in hosts for attempt in host.fork_server.running.values()}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 1))
def test_any_life_of_two_hosts_ends_on_both_for_the_same_reason(seed, restarts):
    rng = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="life-", dir="/tmp")))
        hosts = [Host(folder / str(node), node) for node in range(2)]
        for host in hosts:
            stack.callback(host.close)
        coordinator = Coordinator("JOB", {host.node_rank: host.ranks for host in hosts}, RestartPolicy(restarts))

        def give(orders):
            for host in hosts:
                host.waiting.extend(orders)

        def carry(host):
            give(coordinator.hear(host.node_rank, host.unheard.popleft()))

        def lose(host):
            host.is_lost = True
            give(coordinator.lost(host.node_rank, f"lost {host.node_rank}"))

        while True:
            for host in hosts:
                host.collect()
            for host in hosts:  # who was told twice to end waits for nobody
                if host.loop.is_over and not (host.unheard or host.is_lost or coordinator.is_over):
                    lose(host)
            living = [host for host in hosts if not host.is_lost]
            assert len(running(living)) < 2, "workers of two attempts at a time"
            steps = [step for host in living for step in host.fork_server.steps(rng)]
            steps += [lambda host=host: carry(host) for host in living if host.unheard]
            steps += [host.take_order for host in living if host.waiting and not host.loop.is_over]
            if not steps:
                break
            chance, host = rng.random(), rng.choice(living)
            if chance < 0.01 and not host.loop.is_over:
                host.fork_server.interrupt()
            elif chance < 0.013:
                lose(host)
            else:
                rng.choice(steps)()
        living = [host for host in hosts if not host.is_lost]
        assert coordinator.is_over and all(host.loop.is_over for host in living)
        assert running(living) == set() and coordinator.attempt <= restarts
        heard_all = [host for host in living if not host.waiting]  # who was told twice to end has left before
        assert {host.attempt.number for host in heard_all} <= {coordinator.attempt}
        assert all(host.loop.result.report == coordinator.report for host in heard_all)
        assert {host.attempt.has_failed for host in heard_all} <= {coordinator.report is not None}
