"""The launcher's end of its connection to an agent, over pipes that the test holds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from job_runner import wait_until

from msrun.cluster.inbox import Inbox
from msrun.cluster.messages import Message, MessageBuffer, encode_message
from msrun.launch.fleet.agent_link import AgentCode, AgentLink
from msrun.launch.transport.pipe import MARKER
from msrun.planning.hosts.host_entry import HostEntry


class Pipe:
    """An agent's pipe: `say` is what the agent says, `heard` what it was told."""

    address = "10.0.0.1"
    exit_status = None

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said.put(MARKER)
        self._bytes = b""
        self.is_closed = False

    def say(self, kind: str, **fields: Any) -> None:
        self._said.put(encode_message({"type": kind, **fields}))

    def read(self) -> bytes:
        return self._said.get()

    def write(self, data: bytes) -> None:
        if self.is_closed:
            raise BrokenPipeError
        self._bytes += data

    def close(self) -> None:
        self.is_closed = True
        self._said.put(b"")

    def stderr_text(self) -> str:
        return ""

    @property
    def heard(self) -> list[Message]:
        """What has come after the code that is to be run."""
        head, _, rest = self._bytes.partition(b"\n")
        return MessageBuffer().feed(rest[int(head.split()[0]) :]) if rest else []


class HeldQueue:
    """An outbox whose reader is held up between taking a message and looking at it."""

    def __init__(self, inner: Any, kind: str) -> None:
        self._inner = inner
        self._kind = kind
        self.taken, self.release = threading.Event(), threading.Event()

    def get(self) -> Any:
        entry = self._inner.get()
        if entry is not None and self._kind in str(entry):
            self._kind = "no other"
            self.taken.set()
            assert self.release.wait(30)
        return entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def pipes() -> list[Pipe]:
    return [Pipe(), Pipe()]


@pytest.fixture
def link(pipes: list[Pipe]) -> Iterator[AgentLink]:
    left = list(pipes)
    inbox = Inbox()
    code = AgentCode(b"start", b"attach", lambda: b"salvage")
    job = {"type": "job"}
    made = AgentLink(0, HostEntry("host0", 1), lambda _: left.pop(0), code, job, inbox, lambda _: False, silence_s=60.0)
    yield made
    made.close()
    made.join(1e9)
    inbox.close()


def test_message_that_is_about_to_be_written_when_the_connection_breaks_comes_in_its_turn(
    link: AgentLink, pipes: list[Pipe]
) -> None:
    link._outbox = held = HeldQueue(link._outbox, "third")  # type: ignore[assignment]
    link.start()
    link.begin()
    first, second = pipes
    link.send("second")
    wait_until(lambda: len(first.heard) == 2, "what is said before the cut is written")
    link.send("third")
    assert held.taken.wait(30)
    first.close()  # the agent had read the job alone
    wait_until(lambda: second.heard, "another connection is made")
    second.say("attached", seen=1)
    wait_until(lambda: link._is_attached, "the agent has said what it has seen")
    held.release.set()
    wait_until(lambda: any(message["type"] == "third" for message in second.heard), "all is said again")
    numbered = [message["seq"] for message in second.heard if "seq" in message]
    assert numbered == [2, 3]
    assert [message["type"] for message in second.heard if "seq" in message] == ["second", "third"]
