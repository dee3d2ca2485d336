"""The launcher's loop over all agents: signals, ticks, deadlines, and a host that talks nonsense."""

import signal
import threading
import time

import pytest
from fake_agents import FakeClock, FakeLink, FakeSignals

from msrun.agent.observer import Observer, Observers, OwnFaults
from msrun.cluster.membership import WorkerState
from msrun.errors import ClusterError
from msrun.launch.fleet import agents as module
from msrun.launch.fleet.agents import Agents
from msrun.launch.fleet.fleet_job import FleetRecord

SILENCE_S = 60.0


class TwoAgents:
    """The launcher and two agents."""

    def __init__(self):
        self.clock, self.signals = FakeClock(), FakeSignals()
        made = Agents(self.signals, (signal.SIGUSR1,), SILENCE_S, clock=self.clock)
        self.agents = made
        self.links = [FakeLink(0), FakeLink(1)]
        made.links = self.links
        self.heard = []

    def hear(self, times=1, **settings):
        """Take messages until so many have come."""
        self.heard.clear()
        handlers = {"event": lambda node, message: self.heard.append(message)}
        return self.agents.hear(lambda: len(self.heard) >= times, handlers, **settings)

    def post(self, kind="event", node=0):
        self.say(node, kind)

    def say(self, node, kind, **fields):
        self.agents.post(self.links[node], {"type": kind, **fields})

    def told(self, node):
        return [done for done in self.links[node].done if isinstance(done, dict)]


@pytest.fixture
def two():
    made = TwoAgents()
    yield made
    made.agents.loop.close(0.0)
    made.signals.close()


@pytest.mark.parametrize("error", [KeyError("slip"), TypeError("slip"), ValueError("slip"), OSError("slip")])
def test_handler_that_fails_over_what_was_well_said_is_no_fault_of_the_host(two, error):
    def slip(node, message):
        two.heard.append(message)
        raise error

    faults = []
    for _ in range(2):
        two.say(0, "event", moment="note", fields={"text": "hello"})
    assert two.agents.hear(lambda: len(two.heard) == 2, {"event": slip}, on_fault=faults.append)
    assert faults == [error] * 2, "those after the first are delivered too"
    assert not any("understood" in str(done) for done in two.links[0].done)
    two.say(0, "event", moment="note", fields={"text": "hello"})
    with pytest.raises(type(error)):
        two.agents.hear(lambda: False, {"event": slip})


def test_fault_of_the_launcher_itself_is_written_down_once_and_ends_what_it_waits_for(two, tmp_path):
    two.agents.folder = tmp_path
    for _ in range(2):
        two.agents.loop.call({}.popitem)
    with pytest.raises(ClusterError, match="KeyError"):
        two.hear()
    assert (tmp_path / "scheduler.log").read_text().count("Traceback") == 1


def test_signal_in_the_job_is_told_to_all_and_the_first_that_no_worker_gets_counts(two):
    two.agents.has_begun = True
    signals = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
    for signum in signals:
        assert two.agents.interrupt is None or signum == signal.SIGINT
        two.signals.put(signum)
        two.post()
        assert two.hear()
    told = [{"type": "signal", "signum": signum} for signum in signals]
    assert [two.told(node) for node in range(2)] == [told] * 2
    assert two.agents.interrupt is not None and two.agents.interrupt.signum == signal.SIGTERM
    assert not two.agents.is_abandoned


@pytest.mark.parametrize(("signum", "is_abandoned"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_third_interrupt_waits_for_no_host(two, signum, is_abandoned):
    two.agents.has_begun = True
    for _ in range(2):
        two.signals.put(signum)
    two.post()
    two.hear()
    assert not two.agents.is_abandoned
    two.signals.put(signum)
    if not is_abandoned:
        two.post()
    assert two.hear(), "no message has to come any more"
    assert two.agents.is_abandoned is is_abandoned


def test_launcher_stops_itself_once_its_agents_know_why(two):
    stopped = []
    two.agents.stop_self = lambda: stopped.append(two.links[1].has_unseen)
    two.links[1].has_unseen = True
    threading.Timer(0.05, lambda: setattr(two.links[1], "has_unseen", False)).start()
    for signum in (signal.SIGTSTP, signal.SIGCONT):
        two.signals.put(signum)
    two.post()
    assert two.hear()
    assert stopped == [False], "not before all have heard of it"
    assert [message["type"] for message in two.told(0)] == ["pause", "resume"]
    done = [done if isinstance(done, str) else done["type"] for done in two.links[0].done]
    assert done == ["pause", "beat", "resume"]
    assert two.agents.interrupt is None


def test_launcher_is_stopped_all_the_same_where_an_agent_does_not_answer(two, monkeypatch):
    stopped = []
    monkeypatch.setattr(module, "PAUSE_WAIT_S", 0.05)
    two.agents.stop_self = lambda: stopped.append(True)
    two.links[0].has_unseen = True
    two.signals.put(signal.SIGTSTP)
    two.post()
    assert two.hear()
    assert stopped == [True]


def test_logs_that_a_lost_host_has_left_are_waited_for_at_the_end(two):
    link, begin = two.links[0], time.monotonic()
    link.is_salvaging = True
    two.agents.loop.call_later(0.0, lambda: setattr(link, "is_salvaging", False))
    two.agents.close()
    assert not link.is_salvaging and link.done == ["dismiss", "close"]
    assert time.monotonic() - begin < module.SALVAGE_S


RESTART = {"attempt": 1, "delay_s": 1.0, "reason": "why", "global_ranks": []}


class Heard(Observer):
    def __init__(self):
        self.moments = []

    def note(self, kind, fields):
        self.moments.append((kind, dict(fields)))

    def kinds(self):
        return [kind for kind, _ in self.moments]


def raise_fault(text):
    pytest.fail(text)


def new_record():
    heard = Heard()
    return FleetRecord({0: (0, 1), 1: (2,)}, Observers([heard], OwnFaults("/nowhere", raise_fault, found_in=""))), heard


def started(rank):
    return {"global_rank": rank, "pid": 100 + rank}


def exited(rank, status=0, state="done"):
    return {"global_rank": rank, "status": status, "state": state, "how": "somehow"}


def test_job_runs_when_the_workers_of_all_hosts_run():
    record, heard = new_record()
    record.note(0, "started", started(0))
    record.note(0, "started", started(1))
    record.note(0, "running", {"world_size": 2})
    assert "running" not in heard.kinds()
    record.note(1, "started", started(2))
    assert heard.moments[-1] == ("running", {"world_size": 3})
    assert record.membership.count(WorkerState.RUNNING) == 3


def test_what_every_host_tells_is_told_once():
    record, heard = new_record()
    for node in (1, 0):
        record.note(node, "stopping", {"reason": f"told by {node}"})
    assert heard.moments == [("stopping", {"reason": "told by 1"})]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("note", {}),
        ("note", {"text": ["no text"]}),
        ("started", {"global_rank": [2], "pid": 1}),
        ("started", {"global_rank": True, "pid": 1}),
        ("exited", {"global_rank": 2, "how": "", "status": 0, "state": "no state"}),
        ("restarting", {"attempt": 1, "delay_s": float("inf"), "reason": "", "global_ranks": []}),
        ("restarting", {"attempt": 1, "delay_s": 1.0, "reason": ""}),
        ("signal", {"name": "USR1", "global_ranks": 7}),
    ],
)
def test_moment_that_is_not_what_it_should_be_is_refused(kind, value):
    record, heard = new_record()
    with pytest.raises(ValueError):
        record.note(1, kind, value)
    assert not heard.moments


def test_rank_of_another_host_is_not_believed():
    record, heard = new_record()
    record.note(1, "started", started(0))
    assert record.membership.count(WorkerState.RUNNING) == 0 and "started" not in heard.kinds()


def test_job_starts_again_when_the_coordinator_says_so_and_it_is_told_when_all_hosts_are_ready():
    record, heard = new_record()
    for node, rank in ((0, 0), (0, 1), (1, 2)):
        record.note(node, "started", started(rank))
    record.note(0, "stopping", {"reason": "rank 0 failed"})
    for rank in range(3):
        record.note(rank // 2, "exited", exited(rank, 256, "failed"))
    record.restart(1, 0.5, "rank 0 failed", [0])
    assert record.membership.count(WorkerState.PLANNED) == 3
    for node in range(2):
        record.note(node, "restarting", {**RESTART, "reason": f"as node {node} has it"})
    assert not any("restarting" in kind for kind in heard.kinds())
    record.start()
    told = {"attempt": 1, "delay_s": 0.5, "reason": "rank 0 failed", "global_ranks": [0]}
    assert heard.moments[-1] == ("restarting", told)
    record.note(0, "started", started(0))
    record.note(0, "stopping", {"reason": "again"})
    assert heard.kinds()[-2:] == ["started", "stopping"]
    assert record.membership.running() == {0: 100}
