"""The launcher's loop over all agents: signals, ticks, deadlines, and a host that talks nonsense."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_agents import FakeClock, FakeLink, FakeSignals

from msrun.cluster.messages import Message
from msrun.errors import Interrupted
from msrun.launch.fleet import agents as module
from msrun.launch.fleet.agent_link import AgentLink
from msrun.launch.fleet.agents import Agents

SILENCE_S = 60.0


class TwoAgents:
    """The launcher and two agents."""

    def __init__(self) -> None:
        self.clock, self.signals = FakeClock(), FakeSignals()
        made: Any = Agents(self.signals, (signal.SIGUSR1,), SILENCE_S, clock=self.clock)  # type: ignore[arg-type]
        self.agents: Agents = made
        self.inbox = self.agents.inbox
        self.links = [FakeLink(0), FakeLink(1)]
        made.links = self.links
        made._next_beat = self.clock.now
        self.heard: list[Message] = []

    def hear(self, times: int = 1, **settings: Any) -> bool:
        """Take messages until so many have come."""
        self.heard.clear()
        handlers = {"event": lambda node, message: self.heard.append(message)}
        return self.agents.hear(lambda: len(self.heard) >= times, handlers, **settings)

    def post(self, kind: str = "event", node: int = 0) -> None:
        self.inbox.post({"type": kind, "node": node})

    def told(self, node: int) -> list[Any]:
        return [done for done in self.links[node].done if isinstance(done, dict)]


@pytest.fixture
def two() -> Iterator[TwoAgents]:
    made = TwoAgents()
    yield made
    made.agents.loop.close(0.0)
    made.inbox.close()
    made.signals.close()


def test_fake_link_has_the_interface_of_a_link() -> None:
    for name, value in vars(FakeLink).items():
        if inspect.isfunction(value) and name != "__init__":
            assert inspect.signature(value) == inspect.signature(getattr(AgentLink, name)), name


def test_agents_that_run_are_told_and_those_that_are_over_are_not(two: TwoAgents) -> None:
    two.links[1].is_over = True
    two.agents.tell_all("start", attempt=1)
    assert two.told(0) == [{"type": "start", "attempt": 1}]
    assert two.told(1) == []


def test_messages_go_to_their_handlers_and_others_are_left(two: TwoAgents) -> None:
    for kind in ("event", "say", "event"):
        two.post(kind, node=1)
    assert two.hear(2)
    assert two.heard == [{"type": "event", "node": 1}] * 2


def test_wait_ends_at_its_deadline(two: TwoAgents) -> None:
    assert not two.hear(deadline=two.clock.now)
    two.post()
    assert two.hear(deadline=two.clock.now + 1), "before the deadline"


@pytest.mark.parametrize("error", [KeyError("slip"), TypeError("slip"), ValueError("slip"), OSError("slip")])
def test_handler_that_fails_over_what_was_well_said_is_no_fault_of_the_host(two: TwoAgents, error: Exception) -> None:
    def slip(node: int, message: Message) -> None:
        two.heard.append(message)
        raise error

    faults: list[Exception] = []
    for _ in range(2):
        two.inbox.post({"type": "event", "node": 0, "moment": "note", "fields": {"text": "hello"}})
    assert two.agents.hear(lambda: len(two.heard) == 2, {"event": slip}, on_fault=faults.append)
    assert faults == [error] * 2, "those after the first are delivered too"
    assert not any("understood" in str(done) for done in two.links[0].done)
    two.inbox.post({"type": "event", "node": 0, "moment": "note", "fields": {"text": "hello"}})
    with pytest.raises(type(error)):
        two.agents.hear(lambda: False, {"event": slip})


def test_signs_of_life_are_given_at_intervals(two: TwoAgents) -> None:
    def look() -> None:
        two.post()
        assert two.hear()

    look()
    assert two.links[0].done.count("beat") == 1
    look()
    assert two.links[0].done.count("beat") == 1, "not with every message"
    two.clock.advance(module.MAX_BEAT_S)
    look()
    assert [link.done.count("beat") for link in two.links] == [2, 2]


def test_something_is_done_at_intervals(two: TwoAgents) -> None:
    begin, ticks = two.clock.now, list[float]()

    def pass_time(node: int, message: Message) -> None:
        two.clock.advance(1.0)
        two.heard.append(message)
        two.post()

    two.post()
    every = 5.0, lambda: ticks.append(two.clock.now - begin)
    two.agents.hear(lambda: len(two.heard) > 12, {"event": pass_time}, every=every)
    assert ticks == [5.0, 10.0]


def test_time_in_which_the_launcher_was_stopped_is_nobody_s_silence(two: TwoAgents) -> None:
    for passed_s in (module.MAX_BEAT_S, 1000.0):
        two.post()
        assert two.hear()
        two.clock.advance(passed_s)
    two.post()
    assert two.hear()
    assert [link.listened_s for link in two.links] == [3 * module.MAX_BEAT_S] * 2


def test_signal_before_the_job_begins_ends_the_wait(two: TwoAgents) -> None:
    two.signals.put(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"):
        two.hear()
    assert two.told(0) == []


def test_signal_in_the_job_is_told_to_all_and_the_first_one_counts(two: TwoAgents) -> None:
    two.agents.has_begun = True
    two.signals.put(signal.SIGTERM)
    two.post()
    assert two.hear()
    two.signals.put(signal.SIGINT)
    two.post()
    assert two.hear()
    assert [two.told(node) for node in range(2)] == [
        [{"type": "signal", "signum": signal.SIGTERM}, {"type": "signal", "signum": signal.SIGINT}]
    ] * 2
    assert two.agents.interrupt is not None and two.agents.interrupt.signum == signal.SIGTERM
    assert not two.agents.is_abandoned


def test_signal_that_workers_get_ends_nothing(two: TwoAgents) -> None:
    for _ in range(4):
        two.signals.put(signal.SIGUSR1)
    two.post()
    assert two.hear()
    assert two.told(1) == [{"type": "signal", "signum": signal.SIGUSR1}] * 4
    assert two.agents.interrupt is None and not two.agents.is_abandoned


def test_third_interrupt_waits_for_no_host(two: TwoAgents) -> None:
    two.agents.has_begun = True
    for _ in range(2):
        two.signals.put(signal.SIGINT)
    two.post()
    two.hear()
    assert not two.agents.is_abandoned
    two.signals.put(signal.SIGINT)
    assert two.hear(), "no message has to come any more"
    assert two.agents.is_abandoned


def test_launcher_that_is_told_three_times_to_terminate_still_waits(two: TwoAgents) -> None:
    two.agents.has_begun = True
    for _ in range(4):
        two.signals.put(signal.SIGTERM)
    two.post()
    two.hear()
    assert not two.agents.is_abandoned


def test_launcher_stops_itself_once_its_agents_know_why(two: TwoAgents) -> None:
    stopped: list[bool] = []
    two.agents.stop_self = lambda: stopped.append(two.links[1].has_unseen)
    two.links[1].has_unseen = True
    threading.Timer(0.05, lambda: setattr(two.links[1], "has_unseen", False)).start()
    two.signals.put(signal.SIGTSTP)
    two.post()
    assert two.hear()
    assert stopped == [False], "not before all have heard of it"
    assert [message["type"] for message in two.told(0)] == ["pause", "resume"]
    done = [done if isinstance(done, str) else done["type"] for done in two.links[0].done]
    assert done[:4] == ["pause", "beat", "resume", "beat"]
    assert two.links[0].listened_s <= module.MAX_BEAT_S
    assert two.agents.interrupt is None


def test_launcher_is_stopped_all_the_same_where_an_agent_does_not_answer(
    two: TwoAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(module, "PAUSE_WAIT_S", 0.05)
    two.agents.stop_self = lambda: stopped.append(True)
    two.links[0].has_unseen = True
    two.signals.put(signal.SIGTSTP)
    two.post()
    assert two.hear()
    assert stopped == [True]


def test_all_agents_are_let_go_and_waited_for_at_the_end(two: TwoAgents) -> None:
    two.links[0].is_open = True

    def leave() -> None:
        two.links[0].is_open = False
        two.post("lost")

    threading.Timer(0.05, leave).start()
    two.agents.close()
    for link in two.links:
        assert link.done == ["dismiss", "close"]
    assert not two.links[0].is_open, "it has had its time"


def test_agent_that_stays_is_not_waited_for_long(two: TwoAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    two.links[0].is_open = True
    two.agents.close()
    assert two.links[0].done[-1] == "close"


def test_what_a_lost_agent_has_left_is_waited_for(two: TwoAgents) -> None:
    link = two.links[1]
    link.is_salvaging = True
    threading.Timer(0.05, lambda: setattr(link, "is_salvaging", False)).start()
    two.agents.close()
    assert not link.is_salvaging and link.done[-1] == "close"
