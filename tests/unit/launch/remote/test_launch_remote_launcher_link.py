"""An agent's end of its connection to the launcher: nothing is lost or doubled; a launcher that is gone is noticed."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_agents import FakeClock
from job_runner import wait_until

from msrun.cluster.messages import MAX_MESSAGE_BYTES, Message, MessageBuffer, encode_message
from msrun.launch.remote import launcher_link as module
from msrun.launch.remote.launcher_link import LauncherLink
from msrun.launch.transport.pipe import MARKER, SocketPipe

SILENCE_S = 60.0
LOST = {"type": "lost", "reason": "the launcher has gone"}


class Launcher:
    """The launcher's side of one connection."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        stream.settimeout(0.0)
        self._buffer: MessageBuffer | None = None

    def say(self, kind: str, **fields: Any) -> None:
        self.stream.sendall(encode_message({"type": kind, **fields}))

    is_left = False
    """The agent has closed the connection."""

    def hear(self) -> list[Message]:
        """Return what has come since the last call, without the marker of a new connection."""
        try:
            data = self.stream.recv(1 << 20)
        except BlockingIOError:
            return []
        if not data:
            self.is_left = True
            return []
        if self._buffer is None:
            assert data.startswith(MARKER)
            self._buffer, data = MessageBuffer(), data[len(MARKER) :]
        return list(self._buffer.feed(data))


class HeardSignals:
    """A `SignalPipe` that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def tell(self, signum: int) -> None:
        self.told.append(signum)


class Agent:
    """A link whose thread the test plays: `look` is a few turns of it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        ours, theirs = socket.socketpair()
        self.link = LauncherLink(SocketPipe(ours=theirs), self.clock)
        self.launcher = Launcher(ours)
        self.launchers = [self.launcher]
        self.signals = HeardSignals()
        self.folder = tempfile.TemporaryDirectory(prefix="link-")
        self.path = str(Path(self.folder.name, "s"))
        self.listener: socket.socket | None = None

    def look(self) -> list[Message]:
        """Return what the launcher hears of that."""
        self.turn()
        return self.launcher.hear()

    def turn(self) -> None:
        for _ in range(6):
            self.link.loop.turn(0.0)

    def allow_resuming(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(0.0)
        self.link.resume_at(self.listener, SILENCE_S)
        self.look()

    def come_again(self) -> None:
        """A launcher makes another connection."""
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(self.path)
        self.launcher = Launcher(stream)
        self.launchers.append(self.launcher)

    def close(self) -> None:
        for launcher in self.launchers:
            launcher.stream.close()
        if not self.is_closed:
            self.link.start()
            self.link.close()
        self.folder.cleanup()

    is_closed = False

    def end(self) -> None:
        """Close the link, whose thread runs."""
        self.link.close()
        self.is_closed = True
        assert self.link.loop.has_ended


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def kinds(messages: list[Message]) -> list[str]:
    return [message["type"] for message in messages]


def test_what_the_agent_says_is_numbered_and_wishes_are_waited_for(agent: Agent) -> None:
    agent.link.send("checked", report={})
    agent.link.send("listening", port=1)
    assert [(m["type"], m["seq"]) for m in agent.look()] == [("checked", 1), ("listening", 2)]
    for number, kind in enumerate(("job", "listen", "run"), 1):
        agent.launcher.say(kind, seq=number)
    agent.look()
    assert [agent.link.wait(0.0)["type"] for _ in range(3)] == ["job", "listen", "run"]  # type: ignore[index]
    assert agent.link.wait(0.0) is None


def test_sign_of_life_is_answered_with_what_has_come(agent: Agent) -> None:
    agent.launcher.say("job", seq=1)
    agent.launcher.say("beat", seen=0)
    assert agent.look() == [{"type": "beat", "seen": 1}]


def test_message_that_comes_twice_is_heeded_once(agent: Agent) -> None:
    for _ in range(2):
        agent.launcher.say("job", seq=1)
    agent.look()
    assert agent.link.wait(0.0) is not None
    assert agent.link.wait(0.0) is None


def test_connection_with_a_gap_is_left_for_another_one(agent: Agent) -> None:
    agent.allow_resuming()
    agent.launcher.say("run", seq=2)
    agent.look()
    assert agent.launcher.is_left and not agent.link.is_orphan
    assert agent.link.wait(0.0) is None
    agent.come_again()
    agent.launcher.say("attach", seen=0)
    agent.launcher.say("job", seq=1)
    agent.launcher.say("run", seq=2)
    assert kinds([*agent.look(), *agent.look()]) == ["attached"]
    assert [agent.link.wait(0.0)["type"] for _ in range(2)] == ["job", "run"]  # type: ignore[index]


def test_new_connection_takes_the_place_of_the_old_one(agent: Agent) -> None:
    agent.allow_resuming()
    old = agent.launcher
    agent.come_again()
    agent.look()
    old.stream.settimeout(30)
    assert old.stream.recv(100) == b"", "the old one is closed"
    agent.link.send("first")
    assert kinds(agent.look()) == [], "not before the launcher has said what it has seen"


def test_launcher_that_attaches_hears_first_how_far_the_agent_is_and_then_the_rest(agent: Agent) -> None:
    agent.allow_resuming()
    for kind in ("first", "second"):
        agent.link.send(kind)
    agent.launcher.say("job", seq=1)
    agent.look()
    agent.come_again()
    agent.look()
    agent.link.send("third")
    agent.launcher.say("attach", seen=1)
    heard = [*agent.look(), *agent.look()]
    assert [(m["type"], m.get("seq", m.get("seen"))) for m in heard] == [("attached", 1), ("second", 2), ("third", 3)]


def test_orders_of_the_coordinator_go_to_the_job_and_its_reports_to_the_launcher(agent: Agent) -> None:
    agent.launcher.say("stop", attempt=0, report={})
    agent.launcher.say("run", master_port=1)
    agent.link.pass_on({"type": "failed", "attempt": 0})
    heard = agent.look()
    assert [order["type"] for order in agent.link.orders.take()] == ["stop"]
    wish = agent.link.wait(0.0)
    assert wish is not None and wish["type"] == "run"
    assert [message["type"] for message in heard] == ["failed"]


def test_end_of_the_connection_before_the_job_has_begun_is_the_end(agent: Agent) -> None:
    agent.link.obey(agent.signals)  # type: ignore[arg-type]
    agent.launcher.stream.close()
    agent.turn()
    assert agent.link.is_orphan
    assert agent.link.orders.take() == [LOST] and agent.signals.told == []
    assert agent.link.wait(0.0) is None, "whoever waits for a wish is told that none will come"
    assert agent.link.take() is None


def test_agent_of_a_closed_connection_waits_a_while_for_another_launcher(agent: Agent) -> None:
    agent.allow_resuming()
    agent.link.obey(agent.signals)  # type: ignore[arg-type]
    agent.launcher.stream.close()
    agent.turn()
    agent.clock.advance(module.ORPHAN_S)
    agent.turn()
    assert not agent.link.is_orphan
    agent.clock.advance(2 * module.LOG_TICK_S)
    agent.turn()
    agent.turn()
    assert agent.link.is_orphan
    assert agent.link.orders.take() == [LOST], "told once"


def test_late_connection_of_a_launcher_that_has_gone_is_no_sign_of_life(agent: Agent) -> None:
    agent.allow_resuming()
    agent.launcher.stream.close()
    agent.turn()
    agent.clock.advance(0.9 * module.ORPHAN_S)
    agent.come_again()
    agent.turn()
    agent.launcher.stream.close()
    agent.turn()
    agent.clock.advance(0.2 * module.ORPHAN_S)
    agent.turn()
    assert agent.link.is_orphan


def test_launcher_without_a_sign_of_life_is_left(agent: Agent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.allow_resuming()
    agent.clock.advance(SILENCE_S)
    agent.look()
    assert not agent.link.is_orphan
    agent.launcher.say("beat", seen=0)
    agent.look()
    agent.clock.advance(SILENCE_S)
    agent.look()
    assert not agent.link.is_orphan, "it has said something meanwhile"
    agent.clock.advance(2 * module.LOG_TICK_S)
    agent.turn()
    assert agent.link.is_orphan and not agent.launcher.hear() and agent.launcher.is_left
    assert "gave no sign of life for 60 s" in capsys.readouterr().err


def test_launcher_that_said_that_it_is_stopped_may_be_silent(agent: Agent) -> None:
    agent.allow_resuming()
    agent.launcher.say("pause", seq=1)
    agent.look()
    agent.clock.advance(module.PAUSE_S)
    agent.look()
    assert not agent.link.is_orphan
    agent.launcher.say("resume", seq=2)
    agent.look()
    agent.clock.advance(SILENCE_S + 1)
    agent.turn()
    assert agent.link.is_orphan


def test_launcher_that_stays_stopped_is_left_too(agent: Agent) -> None:
    agent.allow_resuming()
    agent.launcher.say("pause", seq=1)
    agent.look()
    agent.clock.advance(module.PAUSE_S + 1)
    agent.turn()
    assert agent.link.is_orphan


def test_signals_that_come_before_the_job_can_hear_them_are_kept(agent: Agent) -> None:
    agent.launcher.say("signal", seq=1, signum=int(signal.SIGTERM))
    agent.look()
    agent.link.obey(agent.signals)  # type: ignore[arg-type]
    assert agent.signals.told == [signal.SIGTERM]
    agent.launcher.say("signal", seq=2, signum=int(signal.SIGUSR1))
    agent.look()
    assert agent.signals.told == [signal.SIGTERM, signal.SIGUSR1]
    assert agent.link.wait(0.0) is None, "a signal is no wish"


@pytest.mark.parametrize(
    "said", [{"seq": 1}, {"type": "signal", "seq": 1}, {"type": "signal", "seq": 1, "signum": "x"}]
)
def test_launcher_that_talks_nonsense_is_left(
    agent: Agent, said: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    agent.launcher.stream.sendall(encode_message(said))
    agent.turn()
    assert agent.link.is_orphan and not agent.launcher.hear() and not agent.launcher.hear() and agent.launcher.is_left
    assert "msrun agent: left the launcher, which says" in capsys.readouterr().err


def logs_of(*sizes: int) -> Any:
    left = [{"type": "log", "name": f"worker_{number}.log", "data": "x" * size} for number, size in enumerate(sizes)]
    return lambda: left.pop(0) if left else None


def test_logs_wait_for_the_launcher_to_say_that_it_has_them(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_BYTES", 100)
    agent.link.send_logs(logs_of(60, 40, 10, 90))
    heard = agent.look()
    assert [m["name"] for m in heard] == ["worker_0.log", "worker_1.log"]
    agent.launcher.say("beat", seen=0)
    assert kinds(agent.look()) == ["beat"]
    agent.launcher.say("beat", seen=1)
    assert [m.get("name", m["type"]) for m in [*agent.look(), *agent.look()]] == [
        "beat",
        "worker_2.log",
        "worker_3.log",
    ]
    assert agent.link.unsent_logs == {"worker_1.log", "worker_2.log", "worker_3.log"}


def test_log_that_was_not_asked_for_yet_is_one_that_the_launcher_lacks(agent: Agent) -> None:
    agent.link.send_logs(logs_of(10))
    agent.link.send("event")
    agent.turn()
    assert agent.link.unsent_logs == {"worker_0.log"}, "an event is none"


def test_end_of_the_logs_is_said_once_all_have_been_sent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_BYTES", 10)
    agent.link.send_logs(logs_of(20, 20))
    agent.link.finish_logs()
    assert kinds(agent.look()) == ["log"], "one is still to come"
    agent.launcher.say("beat", seen=1)
    agent.launcher.say("beat", seen=2)
    assert kinds([*agent.look(), *agent.look()]) == ["beat", "beat", "log"]
    agent.launcher.say("beat", seen=2)
    heard = [*agent.look(), *agent.look(), *agent.look()]
    assert kinds(heard).count("logs_end") == 1
    assert "logs_end" not in kinds(agent.look()), "said once"


def test_logs_wait_while_the_launcher_has_not_said_what_it_has_seen(agent: Agent) -> None:
    agent.allow_resuming()
    agent.come_again()
    agent.look()
    agent.link.send_logs(logs_of(5))
    assert agent.look() == []
    agent.launcher.say("attach", seen=0)
    assert kinds([*agent.look(), *agent.look()]) == ["attached", "log"]


def test_thread_sends_what_is_waiting_before_it_ends(agent: Agent) -> None:
    agent.link.start()
    agent.link.send("result", failure=None)
    agent.end()
    assert kinds(wait_until(agent.launcher.hear, "the result has come")) == ["result"]
    assert agent.launcher.stream.recv(10) == b"", "the connection is closed"


def test_fault_of_the_thread_is_told_and_the_launcher_is_still_served(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[Message] = []

    def hear(kind: str) -> Message:
        def find() -> Message | None:
            said.extend(agent.launcher.hear())
            return next((message for message in said if message["type"] == kind), None)

        return dict(wait_until(find, f"{kind} has come"))

    def fail() -> Message:
        raise OSError(5, "Input/output error")

    agent.link.send_logs(fail)
    agent.link.start()
    fault = hear("fault")
    assert fault["text"].startswith("msrun itself failed: OSError: [Errno 5] Input/output error; ")
    assert "in fail" in fault["traceback"] and fault["traceback"] in capsys.readouterr().err
    agent.launcher.say("beat", seen=fault["seq"])
    hear("beat")
    agent.link.send_logs(lambda: None)
    agent.link.send("result")
    assert hear("result")["seq"] == fault["seq"] + 1
    agent.end()


def test_message_that_cannot_be_sent_is_a_fault_and_leaves_no_gap(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.link.send("planned", notes=["x" * MAX_MESSAGE_BYTES])
    agent.link.send("result")
    agent.link.start()
    said = list[Message]()
    wait_until(lambda: said.extend(agent.launcher.hear()) or len(said) == 2, "both have come")
    assert [(message["type"], message["seq"]) for message in said] == [("fault", 1), ("result", 2)]
    assert "at most" in said[0]["text"]
    agent.end()


def test_end_is_no_loss_of_the_launcher(agent: Agent) -> None:
    agent.link.obey(agent.signals)  # type: ignore[arg-type]
    agent.link.start()
    agent.end()
    assert not agent.link.is_orphan and agent.signals.told == []
