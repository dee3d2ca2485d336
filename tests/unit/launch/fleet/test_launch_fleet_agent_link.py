"""The launcher's end of its connection to an agent, over pipes that the test holds."""

import contextlib
import time

import pytest
from fake_agents import FakeClock, FakePipe, InLoop
from job_runner import wait_until

from msrun.errors import ClusterError
from msrun.launch.fleet import agents as module
from msrun.launch.fleet.agents import AgentLink
from msrun.launch.transport.link import EventLoop
from msrun.launch.transport.opener import Way
from msrun.launch.transport.pipe import MARKER
from msrun.planning.hosts import HostEntry

SILENCE_S = 60.0


class Host:
    """A link, the pipes that it gets one after the other, and what it posts."""

    def __init__(self, attach=b"attach", noise=MARKER):
        self.clock = FakeClock()
        self.pipes = [FakePipe(noise), FakePipe(), FakePipe()]
        self.deadlines = []
        self._posts = []
        self.faults = []
        self._refusal = None
        self._left = list(self.pipes)
        self.loop = EventLoop(2, clock=self.clock)
        self.loop.start()
        link = AgentLink(
            3,
            HostEntry("host0", 1),
            Way(self._open, b"start", attach, lambda _: b"salvage"),
            {"type": "job"},
            lambda _link, message: self._posts.append(message),
            self._take_first,
            self.loop,
            silence_s=SILENCE_S,
            clock=self.clock,
        )
        self.link = InLoop(self.loop, link)

    def _open(self, deadline):
        self.deadlines.append(deadline)
        if self._refusal is not None:
            raise self._refusal
        return self._left.pop(0)

    def refuse(self, error):
        """Let no more connections be made."""
        self._refusal = error

    def _take_first(self, message):
        self.faults += [message["text"]] if message["type"] == "fault" else []
        if message["type"] == "slip":
            raise ZeroDivisionError("slip")
        return message["type"] == "log"

    def await_post(self, kind):
        def find():
            return next((message for message in self._posts if message["type"] == kind), None)

        return dict(wait_until(find, f"{kind} is posted"))

    def posts(self):
        return [message["type"] for message in self._posts]

    def begin(self):
        """Come so far that the job runs there, and the agent has spoken."""
        self.link.start()
        self.await_post("opened")
        wait_until(lambda: self.link.is_open, "it is open")
        self.link.begin()
        self.pipes[0].say("hello", seq=1)
        self.await_post("hello")
        return self.pipes[0]

    def attach(self, pipe, seen):
        """Let the agent take another connection."""
        wait_until(lambda: pipe.heard, "another connection is made")
        pipe.say("attached", seen=seen)
        self.await_post("resumed")

    def close(self):
        self.link.close()
        self.loop.close(time.monotonic() + 30)


@pytest.fixture
def host():
    made = Host()
    yield made
    made.close()


@pytest.fixture
def local_host():
    """One to which no other connection can be made."""
    made = Host(attach=b"")
    yield made
    made.close()


def test_message_that_waits_for_room_when_the_connection_breaks_comes_in_its_turn(host):
    link = host.link
    link.start()
    link.begin()
    first, second, _ = host.pipes
    link.send("second")
    wait_until(lambda: len(first.heard) == 2, "what is said before the cut is written")
    first.room = 3
    link.send("third")
    wait_until(lambda: first.room == 0, "a part of the message is on its way")
    first.end()  # the agent had read the job alone
    link.send("fourth")
    host.attach(second, seen=1)
    wait_until(lambda: any(message["type"] == "fourth" for message in second.heard), "all is said again")
    numbered = [(message["type"], message["seq"]) for message in second.heard if "seq" in message]
    assert numbered == [("second", 2), ("third", 3), ("fourth", 4)]


def test_quiet_connection_is_replaced_and_closed_only_when_the_new_one_stands(host):
    first = host.begin()
    host.link.beat(SILENCE_S / 3)
    assert not first.is_closed, "not quiet yet"
    host.link.beat(1.0)
    second = host.pipes[1]
    wait_until(lambda: first.is_closed, "the old one is closed")
    assert second.code == b"attach"
    host.attach(second, seen=1)
    assert host.deadlines == [None, 1000.0 + SILENCE_S * 2 / 3 - 1.0]


def test_new_connection_has_the_time_of_the_old_one_to_say_something(host):
    """An interpreter that starts on a busy host takes longer than from one beat to the next."""
    host.begin()
    host.pipes[1].read()  # it has not even begun to speak
    host.link.beat(SILENCE_S / 3 + 1)
    host.await_post("cut")
    host.link.beat(SILENCE_S / 3)
    wait_until(lambda: host.loop.opening.join(0.0), "nothing is opened")
    assert len(host.deadlines) == 2
    host.link.beat(1.0)
    wait_until(lambda: host.pipes[1].is_closed, "the third one takes the place of the second")
    host.attach(host.pipes[2], seen=1)


def test_silent_connection_is_broken_off(host):
    first = host.begin()
    host.refuse(ClusterError("host0: connection refused"))
    host.link.beat(SILENCE_S + 1)
    wait_until(lambda: first.is_closed, "it is broken off")
    assert "no sign of life for 61 s" in host.await_post("lost")["reason"]
    wait_until(lambda: len(host.deadlines) == 2, "what it has left is asked for")
    wait_until(lambda: not host.link.is_salvaging, "nobody is let in who would fetch that")


def test_signs_of_life_are_given_at_intervals_and_while_the_launcher_is_stopped_nobody_is_silent(host):
    pipe, beats = host.begin(), 0
    for passed_s in (0.0, module.MAX_BEAT_S, 1000.0):
        host.clock.advance(passed_s)
        host.link.send("wish")  # and with it the loop has a turn
        beats += bool(passed_s)
        wait_until(lambda: sum(m["type"] == "beat" for m in pipe.heard) == beats, "not with every message")  # noqa: B023
    assert host.link.silent_s == 2 * module.MAX_BEAT_S


def test_launcher_that_was_stopped_reaches_its_agents_again(host):
    pipe = host.begin()
    host.clock.advance(SILENCE_S * 100)
    pipe.end()
    host.attach(host.pipes[1], seen=1)
    assert host.deadlines[1] is not None
    assert 0 <= host.clock.now + SILENCE_S - host.deadlines[1] <= module.MAX_BEAT_S
    assert "lost" not in host.posts()


def test_agent_that_ends_with_a_status_is_lost_with_it(local_host):
    local_host.link.start()
    local_host.await_post("opened")
    local_host.pipes[0].end(127, "python3: not found")
    lost = local_host.await_post("lost")
    assert (lost["exit_status"], lost["stderr"]) == (127, "python3: not found")


@pytest.mark.parametrize(("noise", "said"), [(b"no shell", " (no shell)"), (b" \n", ""), (MARKER, "")])
def test_connection_that_breaks_before_the_job_is_told_with_what_came_in_place_of_an_agent(noise, said):
    with contextlib.closing(Host(b"", noise)) as host:
        host.link.start()
        host.await_post("opened")
        host.pipes[0].end()
        lost = f"host0: the connection to it broke before the job began{said}; {module.CUT_REMEDY}"
        assert host.await_post("lost")["reason"] == lost


@pytest.mark.parametrize("attach", [b"", b"attach"])
def test_agent_that_is_killed_in_the_job_leaves_what_is_fetched(attach):
    with contextlib.closing(Host(attach)) as host:
        host.begin().end(137)
        assert host.await_post("lost")["exit_status"] == 137, "the other hosts know before all has come"
        salvage = host.pipes[1]
        wait_until(lambda: salvage.code == b"salvage", "its logs are fetched")
        assert host.link.is_salvaging
        salvage.end(0)
        wait_until(lambda: not host.link.is_salvaging and salvage.is_closed, "that is all")


def test_logs_are_acknowledged_so_that_more_are_sent(host, monkeypatch):
    monkeypatch.setattr(module, "ACKNOWLEDGE_BYTES", 300)
    pipe = host.begin()
    pipe.say("log", seq=2, data="x" * 400)
    wait_until(lambda: {"type": "beat", "seen": 2} in pipe.heard, "it is acknowledged")
    pipe.say("log", seq=3, data="x")
    pipe.say("event", seq=4)
    host.await_post("event")
    assert sum(message["type"] == "beat" for message in pipe.heard) == 1, "not every one"


def test_host_that_is_not_reached_yet_is_given_up_when_all_are_dismissed(host):
    host.link.dismiss()
    host.link.start()
    wait_until(lambda: host.pipes[0].is_closed, "what comes then is closed")
    assert host.posts() == []


@pytest.mark.parametrize("moment", ["connecting", "reading"])
def test_fault_of_msrun_itself_loses_the_host_and_is_kept(host, moment):
    if moment == "connecting":
        host.refuse(KeyError("a"))
        host.link.start()
    else:
        host.begin().say("slip", seq=2)
    assert [host.await_post("lost")["reason"]] == [f"host0: {text}" for text in host.faults]


def test_agent_that_cannot_be_worked_with_is_lost_once(host):
    pipe = host.begin()
    host.link.give_up("it talks nonsense")
    host.link.give_up("it talks nonsense still")
    assert host.await_post("lost")["reason"] == "it talks nonsense"
    wait_until(lambda: pipe.is_closed, "it is closed")
    assert host.posts().count("lost") == 1
    assert not host.link.is_open
