"""The warm server's answers to jobs, with forks and ends of processes that the test plays."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msrun.agent.warm import warm_server as module
from msrun.agent.warm.warm_server import WarmServer
from msrun.agent.warm.warm_start import locked
from msrun.cluster.messages import Channel, Message

IDLE_S = 600.0


class Server:
    """A warm server whose `fork` gives out 101, 102, ...; `ended` holds what `waitpid` will tell."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = folder / "server"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.now = 1000.0
        self.changed = ""
        self.ended: deque[tuple[int, int]] = deque()
        self.imported: list[list[str]] = []
        self._forked = 100
        patch.setattr(module.os, "fork", self._fork)
        patch.setattr(module.os, "waitpid", lambda *_: self.ended.popleft() if self.ended else (0, 0))
        patch.setattr(module.time, "monotonic", lambda: self.now)
        patch.setattr(module, "changed_file", lambda _: self.changed)
        patch.setattr(module, "import_all", lambda names: self.imported.append([*names]) or True)
        self.server = WarmServer(self.listener, self.path, IDLE_S, ["torch"])
        self.channels: list[Channel] = []

    def _fork(self) -> int:
        self._forked += 1
        return self._forked

    def ask(self, kind: str = "start", **fields: Any) -> Channel:
        """Connect as a job does, and let the server answer."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        with Path("/dev/null").open("rb") as file:
            socket.send_fds(connection, [b"f"], [file.fileno()] * 3)
        channel = Channel(connection)
        self.channels.append(channel)
        channel.send({"type": kind, "job_id": "f00d", "agent_pid": 1, "environment": {}, "imports": [], **fields})
        assert self.server._accept() is None, "this is the server, not what it has forked"
        return channel

    def end_when_idle(self) -> bool:
        """Return whether the server takes no more jobs after a look at the time."""
        with selectors.DefaultSelector() as selector:
            self.server._end_when_idle(selector)
        return self.server._is_ending

    def close(self) -> None:
        self.listener.close()
        served = [channel for channel, _ in self.server._jobs.values()]
        for channel in (*self.channels, *served, *self.server._sweepers.values()):
            channel.close()


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        made = Server(tmp_path, patch)
        yield made
        made.close()


def told(channel: Channel) -> list[Message]:
    return channel.receive()


def test_idle_server_stays_while_somebody_is_about_to_ask(warm: Server) -> None:
    warm.now += IDLE_S
    with locked(warm.path, waits=True):
        assert not warm.end_when_idle()
    assert warm.end_when_idle()


def test_what_a_job_had_to_import_is_there_for_the_next_one_once(warm: Server) -> None:
    warm.ask(imports=["torch", "numpy"])
    warm.ask(imports=["numpy"])
    assert warm.imported == [["numpy"]]


def test_lock_of_a_server_is_the_users_alone_and_free_again_afterwards(tmp_path: Path) -> None:
    with locked(tmp_path / "a.sock", waits=False) as is_held, locked(tmp_path / "a.sock", waits=False) as is_held_twice:
        assert (is_held, is_held_twice) == (True, False)
        assert (tmp_path / "a.lock").stat().st_mode & 0o777 == 0o600
    with locked(tmp_path / "a.sock", waits=False) as is_held:
        assert is_held
