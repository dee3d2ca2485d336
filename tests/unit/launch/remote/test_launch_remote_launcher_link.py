"""An agent's end of its connection to the launcher: nothing is lost or doubled; a launcher that is gone is noticed."""

import signal
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_agents import FakeClock
from job_runner import wait_until

from msrun.cluster.messages import MAX_MESSAGE_BYTES, FrameBuffer, Message, encode_message
from msrun.launch.remote import agent as module
from msrun.launch.remote.agent import LauncherLink
from msrun.launch.transport.pipe import MARKER, SocketPipe

SILENCE_S = 60.0
LOST = {"type": "lost", "reason": "the launcher has gone"}


class Launcher:
    """The launcher's side of one connection."""

    def __init__(self, stream):
        self.stream = stream
        stream.settimeout(0.0)
        self._buffer = None

    def say(self, kind, **fields):
        self.stream.sendall(encode_message({"type": kind, **fields}))

    is_left = False
    """The agent has closed the connection."""

    def hear(self):
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
            self._buffer, data = FrameBuffer(), data[len(MARKER) :]
        return list(self._buffer.messages(data))


class Agent:
    """A link whose thread the test plays: `look` is a few turns of it."""

    def __init__(self):
        self.clock = FakeClock()
        ours, theirs = socket.socketpair()
        self.link = LauncherLink(SocketPipe(ours=theirs), self.clock)
        self.launcher = Launcher(ours)
        self.launchers = [self.launcher]
        self.told = []
        self.signals = SimpleNamespace(tell=self.told.append)
        self.folder = tempfile.TemporaryDirectory(prefix="link-")
        self.path = str(Path(self.folder.name, "s"))
        self.listener = None

    def look(self):
        """Return what the launcher hears of that."""
        self.turn()
        return self.launcher.hear()

    def turn(self):
        for _ in range(6):
            self.link.loop.turn(0.0)

    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.turn()

    def allow_resuming(self):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(0.0)
        self.link.resume_at(self.listener, SILENCE_S)
        self.look()

    def come_again(self):
        """A launcher makes another connection."""
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(self.path)
        self.launcher = Launcher(stream)
        self.launchers.append(self.launcher)

    def close(self):
        for launcher in self.launchers:
            launcher.stream.close()
        if not self.is_closed:
            self.link.start()
            self.link.close()
        self.folder.cleanup()

    is_closed = False

    def end(self):
        """Close the link, whose thread runs."""
        self.link.close()
        self.is_closed = True
        assert self.link.loop.has_ended


@pytest.fixture
def agent():
    made = Agent()
    yield made
    made.close()


def kinds(messages):
    return [message["type"] for message in messages]


def test_connection_with_a_gap_is_left_for_another_one(agent):
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
    assert [agent.link.wait(0.0)["type"] for _ in range(2)] == ["job", "run"]


def test_end_of_the_connection_before_the_job_has_begun_is_the_end(agent):
    agent.link.obey(agent.signals)
    agent.launcher.stream.close()
    agent.turn()
    assert agent.link.is_orphan
    assert agent.link.orders.take() == [LOST] and agent.told == []
    assert agent.link.wait(0.0) is None, "whoever waits for a wish is told that none will come"
    assert agent.link.take() is None


def test_agent_of_a_closed_connection_waits_a_while_for_another_launcher(agent):
    agent.allow_resuming()
    agent.link.obey(agent.signals)
    agent.launcher.stream.close()
    agent.turn()
    agent.pass_time(module.ORPHAN_S)
    assert not agent.link.is_orphan
    agent.pass_time(2 * module.LOG_TICK_S)
    agent.turn()
    assert agent.link.is_orphan
    assert agent.link.orders.take() == [LOST], "told once"


def test_late_connection_of_a_launcher_that_has_gone_is_no_sign_of_life(agent):
    agent.allow_resuming()
    agent.launcher.stream.close()
    agent.turn()
    agent.clock.advance(0.9 * module.ORPHAN_S)
    agent.come_again()
    agent.turn()
    agent.launcher.stream.close()
    agent.turn()
    agent.pass_time(0.2 * module.ORPHAN_S)
    assert agent.link.is_orphan


def test_launcher_without_a_sign_of_life_is_left(agent, capsys):
    agent.allow_resuming()
    agent.pass_time(SILENCE_S)
    assert not agent.link.is_orphan
    agent.launcher.say("beat", seen=0)
    agent.look()
    agent.pass_time(SILENCE_S)
    assert not agent.link.is_orphan, "it has said something meanwhile"
    agent.pass_time(2 * module.LOG_TICK_S)
    assert agent.link.is_orphan and not agent.launcher.hear() and agent.launcher.is_left
    assert "gave no sign of life for 60 s" in capsys.readouterr().err


@pytest.mark.parametrize("is_resumed", [True, False])
def test_launcher_that_said_that_it_is_stopped_may_be_silent_for_a_while(agent, is_resumed):
    agent.allow_resuming()
    agent.link.obey(agent.signals)
    agent.launcher.say("pause", seq=1)
    agent.look()
    agent.pass_time(module.PAUSE_S)
    assert not agent.link.is_orphan
    if is_resumed:
        agent.launcher.say("resume", seq=2)
        agent.look()
    agent.pass_time(SILENCE_S + 1 if is_resumed else 1.0)
    assert agent.link.is_orphan and agent.link.goes_on.is_set()
    assert agent.told == [signal.SIGTSTP, signal.SIGCONT][: 1 + is_resumed]


def test_signals_that_come_before_the_job_can_hear_them_are_kept(agent):
    agent.launcher.say("signal", seq=1, signum=int(signal.SIGTERM))
    agent.look()
    agent.link.obey(agent.signals)
    assert agent.told == [signal.SIGTERM]
    agent.launcher.say("signal", seq=2, signum=int(signal.SIGUSR1))
    agent.look()
    assert agent.told == [signal.SIGTERM, signal.SIGUSR1]
    assert agent.link.wait(0.0) is None, "a signal is no wish"


@pytest.mark.parametrize(
    "said", [{"seq": 1}, {"type": "signal", "seq": 1}, {"type": "signal", "seq": 1, "signum": "x"}]
)
def test_launcher_that_talks_nonsense_is_left(agent, said, capsys):
    agent.launcher.stream.sendall(encode_message(said))
    agent.turn()
    assert agent.link.is_orphan and not agent.launcher.hear() and not agent.launcher.hear() and agent.launcher.is_left
    assert "msrun agent: left the launcher, which says" in capsys.readouterr().err


def logs_of(*sizes):
    left = [{"type": "log", "name": f"worker_{number}.log", "data": "x" * size} for number, size in enumerate(sizes)]
    return lambda: left.pop(0) if left else None


def test_logs_wait_for_the_launcher_to_say_that_it_has_them(agent, monkeypatch):
    monkeypatch.setattr(module, "WINDOW_BYTES", 100)
    agent.link.send_logs(logs_of(60, 40, 10, 90))
    agent.link.finish_logs()
    heard = agent.look()
    assert [m["name"] for m in heard] == ["worker_0.log", "worker_1.log"]
    agent.launcher.say("beat", seen=0)
    assert kinds(agent.look()) == ["beat"]
    agent.launcher.say("beat", seen=1)
    names = [m.get("name", m["type"]) for m in [*agent.look(), *agent.look()]]
    assert names == ["beat", "worker_2.log", "worker_3.log"]
    assert agent.link.unsent_logs == {"worker_1.log", "worker_2.log", "worker_3.log"}
    agent.launcher.say("beat", seen=4)
    assert kinds([*agent.look(), *agent.look()]) == ["beat", "logs_end"]


def test_log_that_was_not_asked_for_yet_is_one_that_the_launcher_lacks(agent):
    agent.link.send_logs(logs_of(10))
    agent.link.send("event")
    agent.turn()
    assert agent.link.unsent_logs == {"worker_0.log"}, "an event is none"


def test_thread_sends_what_is_waiting_before_it_ends_and_that_is_no_loss_of_the_launcher(agent):
    agent.link.obey(agent.signals)
    agent.link.start()
    agent.link.send("result", failure=None)
    agent.end()
    assert kinds(wait_until(agent.launcher.hear, "the result has come")) == ["result"]
    assert agent.launcher.stream.recv(10) == b"", "the connection is closed"
    assert not agent.link.is_orphan and agent.told == []


def test_fault_of_the_thread_is_told_and_the_launcher_is_still_served(agent, capsys):
    said = []

    def hear(kind):
        def find():
            said.extend(agent.launcher.hear())
            return next((message for message in said if message["type"] == kind), None)

        return dict(wait_until(find, f"{kind} has come"))

    def fail():
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


def test_message_that_cannot_be_sent_is_a_fault_and_leaves_no_gap(agent, capsys):
    agent.link.send("planned", notes=["x" * MAX_MESSAGE_BYTES])
    agent.link.send("result")
    agent.link.start()
    said = list[Message]()
    wait_until(lambda: said.extend(agent.launcher.hear()) or len(said) == 2, "both have come")
    assert [(message["type"], message["seq"]) for message in said] == [("fault", 1), ("result", 2)]
    assert "at most" in said[0]["text"]
    agent.end()
