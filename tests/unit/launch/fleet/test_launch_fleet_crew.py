"""The launcher's loop over all agents: signals, ticks, deadlines, and a host that talks nonsense."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_agents import FakeClock, FakeLink, FakeSignals

from msrun.cluster.inbox import Inbox
from msrun.cluster.messages import Message
from msrun.errors import Interrupted
from msrun.launch.fleet import crew as module
from msrun.launch.fleet.agent_link import AgentLink
from msrun.launch.fleet.crew import Crew

SILENCE_S = 60.0


class Crewed:
    """Two agents and their crew."""

    def __init__(self) -> None:
        self.clock, self.inbox, self.signals = FakeClock(), Inbox(), FakeSignals()
        made: Any = Crew(self.inbox, self.signals, (signal.SIGUSR1,), SILENCE_S, self.clock)  # type: ignore[arg-type]
        self.crew: Crew = made
        self.links = [FakeLink(0), FakeLink(1)]
        made.start(self.links)
        made._next_beat = self.clock.now
        self.heard: list[Message] = []

    def hear(self, times: int = 1, **settings: Any) -> bool:
        """Take messages until so many have come."""
        self.heard.clear()
        handlers = {"event": lambda node, message: self.heard.append(message)}
        return self.crew.hear(lambda: len(self.heard) >= times, handlers, **settings)

    def post(self, kind: str = "event", node: int = 0) -> None:
        self.inbox.post({"type": kind, "node": node})

    def told(self, node: int) -> list[Any]:
        return [done for done in self.links[node].done if isinstance(done, dict)]


@pytest.fixture
def crewed() -> Iterator[Crewed]:
    made = Crewed()
    yield made
    made.inbox.close()
    made.signals.close()


def test_fake_link_has_the_interface_of_a_link() -> None:
    for name, value in vars(FakeLink).items():
        if inspect.isfunction(value) and name != "__init__":
            assert inspect.signature(value) == inspect.signature(getattr(AgentLink, name)), name


def test_agents_that_run_are_told_and_those_that_are_over_are_not(crewed: Crewed) -> None:
    crewed.links[1].is_over = True
    crewed.crew.tell_all("start", attempt=1)
    assert crewed.told(0) == [{"type": "start", "attempt": 1}]
    assert crewed.told(1) == []


def test_messages_go_to_their_handlers_and_others_are_left(crewed: Crewed) -> None:
    for kind in ("event", "say", "event"):
        crewed.post(kind, node=1)
    assert crewed.hear(2)
    assert crewed.heard == [{"type": "event", "node": 1}] * 2


def test_wait_ends_at_its_deadline(crewed: Crewed) -> None:
    assert not crewed.hear(deadline=crewed.clock.now)
    crewed.post()
    assert crewed.hear(deadline=crewed.clock.now + 1), "before the deadline"


def test_message_that_cannot_be_understood_costs_its_host_alone(crewed: Crewed) -> None:
    def understand(node: int, message: Message) -> None:
        if node == 0:
            raise KeyError("result")
        crewed.heard.append(message)

    crewed.post(node=0)
    crewed.post(node=1)
    assert crewed.crew.hear(lambda: bool(crewed.heard), {"event": understand})
    given_up = [[done for done in link.done if "understood" in str(done)] for link in crewed.links]
    assert given_up == [
        ["host0: its agent says what cannot be understood (KeyError: 'result'); install the same msrun there"],
        [],
    ]


def test_signs_of_life_are_given_at_intervals(crewed: Crewed) -> None:
    def look() -> None:
        crewed.post()
        assert crewed.hear()

    look()
    assert crewed.links[0].done.count("beat") == 1
    look()
    assert crewed.links[0].done.count("beat") == 1, "not with every message"
    crewed.clock.advance(module.MAX_BEAT_S)
    look()
    assert [link.done.count("beat") for link in crewed.links] == [2, 2]


def test_short_silence_asks_for_signs_of_life_more_often() -> None:
    inbox, signals = Inbox(), FakeSignals()
    assert Crew(inbox, signals, (), 6.0)._beat_s == 1.0  # type: ignore[arg-type]
    assert Crew(inbox, signals, (), 600.0)._beat_s == module.MAX_BEAT_S  # type: ignore[arg-type]
    inbox.close()
    signals.close()


def test_something_is_done_at_intervals(crewed: Crewed) -> None:
    begin, ticks = crewed.clock.now, list[float]()

    def pass_time(node: int, message: Message) -> None:
        crewed.clock.advance(1.0)
        crewed.heard.append(message)
        crewed.post()

    crewed.post()
    every = 5.0, lambda: ticks.append(crewed.clock.now - begin)
    crewed.crew.hear(lambda: len(crewed.heard) > 12, {"event": pass_time}, every=every)
    assert ticks == [5.0, 10.0]


def test_time_in_which_the_launcher_was_stopped_is_nobody_s_silence(crewed: Crewed) -> None:
    for passed_s in (module.MAX_BEAT_S, 1000.0):
        crewed.post()
        assert crewed.hear()
        crewed.clock.advance(passed_s)
    crewed.post()
    assert crewed.hear()
    assert [link.listened_s for link in crewed.links] == [3 * module.MAX_BEAT_S] * 2


def test_signal_before_the_job_begins_ends_the_wait(crewed: Crewed) -> None:
    crewed.signals.put(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"):
        crewed.hear()
    assert crewed.told(0) == []


def test_signal_in_the_job_is_told_to_all_and_the_first_one_counts(crewed: Crewed) -> None:
    crewed.crew.has_begun = True
    crewed.signals.put(signal.SIGTERM)
    crewed.post()
    assert crewed.hear()
    crewed.signals.put(signal.SIGINT)
    crewed.post()
    assert crewed.hear()
    assert [crewed.told(node) for node in range(2)] == [
        [{"type": "signal", "signum": signal.SIGTERM}, {"type": "signal", "signum": signal.SIGINT}]
    ] * 2
    assert crewed.crew.interrupt is not None and crewed.crew.interrupt.signum == signal.SIGTERM
    assert not crewed.crew.is_abandoned


def test_signal_that_workers_get_ends_nothing(crewed: Crewed) -> None:
    for _ in range(4):
        crewed.signals.put(signal.SIGUSR1)
    crewed.post()
    assert crewed.hear()
    assert crewed.told(1) == [{"type": "signal", "signum": signal.SIGUSR1}] * 4
    assert crewed.crew.interrupt is None and not crewed.crew.is_abandoned


def test_third_interrupt_waits_for_no_host(crewed: Crewed) -> None:
    crewed.crew.has_begun = True
    for _ in range(2):
        crewed.signals.put(signal.SIGINT)
    crewed.post()
    crewed.hear()
    assert not crewed.crew.is_abandoned
    crewed.signals.put(signal.SIGINT)
    assert crewed.hear(), "no message has to come any more"
    assert crewed.crew.is_abandoned


def test_launcher_that_is_told_three_times_to_terminate_still_waits(crewed: Crewed) -> None:
    crewed.crew.has_begun = True
    for _ in range(4):
        crewed.signals.put(signal.SIGTERM)
    crewed.post()
    crewed.hear()
    assert not crewed.crew.is_abandoned


def test_launcher_stops_itself_once_its_agents_know_why(crewed: Crewed, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[tuple[int, bool]] = []
    monkeypatch.setattr(module.os, "kill", lambda pid, signum: stopped.append((signum, crewed.links[1].has_unseen)))
    crewed.links[1].has_unseen = True
    threading.Timer(0.05, lambda: setattr(crewed.links[1], "has_unseen", False)).start()
    crewed.signals.put(signal.SIGTSTP)
    crewed.post()
    assert crewed.hear()
    assert stopped == [(signal.SIGSTOP, False)], "not before all have heard of it"
    assert [message["type"] for message in crewed.told(0)] == ["pause", "resume"]
    done = [done if isinstance(done, str) else done["type"] for done in crewed.links[0].done]
    assert done[:5] == ["start", "pause", "beat", "resume", "beat"]
    assert crewed.links[0].listened_s <= module.MAX_BEAT_S
    assert crewed.crew.interrupt is None


def test_launcher_is_stopped_all_the_same_where_an_agent_does_not_answer(
    crewed: Crewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(module, "PAUSE_WAIT_S", 0.05)
    monkeypatch.setattr(module.os, "kill", lambda pid, signum: stopped.append(signum))
    crewed.links[0].has_unseen = True
    crewed.signals.put(signal.SIGTSTP)
    crewed.post()
    assert crewed.hear()
    assert stopped == [signal.SIGSTOP]


def test_all_agents_are_let_go_and_waited_for_at_the_end(crewed: Crewed) -> None:
    crewed.links[0].is_open = True

    def leave() -> None:
        crewed.links[0].is_open = False
        crewed.post("lost")

    threading.Timer(0.05, leave).start()
    crewed.crew.close()
    for link in crewed.links:
        assert link.done == ["start", "dismiss", "close", "join"]
    assert not crewed.links[0].is_open, "it has had its time"


def test_agent_that_stays_is_not_waited_for_long(crewed: Crewed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    crewed.links[0].is_open = True
    crewed.crew.close()
    assert crewed.links[0].done[-2:] == ["close", "join"]


def test_what_a_lost_agent_has_left_is_waited_for(crewed: Crewed) -> None:
    link = crewed.links[1]
    link.is_salvaging = True
    threading.Timer(0.05, lambda: setattr(link, "is_salvaging", False)).start()
    crewed.crew.close()
    assert not link.is_salvaging and link.done[-1] == "join"
