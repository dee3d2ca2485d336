"""The warm server's answers to jobs, with forks and ends of processes that the test plays."""

from __future__ import annotations

import os
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


def test_job_gets_a_fork_server_and_hears_of_its_end(warm: Server) -> None:
    job = warm.ask()
    assert told(job) == [{"type": "started", "pid": 101}]
    warm.ended.append((101, 0))
    warm.server._reap()
    assert told(job) == [{"type": "ended"}]
    assert told(job) == [] and job.is_closed


def test_what_a_killed_fork_server_leaves_is_ended_before_the_job_hears_of_it(warm: Server) -> None:
    first, second = warm.ask(), warm.ask()
    assert [told(job)[0]["pid"] for job in (first, second)] == [101, 102]
    warm.ended.append((101, 9))
    warm.server._reap()
    assert warm.server._sweepers.keys() == {103}
    warm.ended.append((103, 0))
    warm.server._reap()
    assert told(first) == [{"type": "ended"}]
    assert warm.server._jobs.keys() == {102}, "the other job goes on"


def test_job_holds_the_server_which_then_waits_as_long_as_asked_for_another(warm: Server) -> None:
    warm.ask()
    warm.now += 2 * IDLE_S
    assert not warm.end_when_idle()
    warm.ended.append((101, 0))
    warm.server._reap()
    warm.now += IDLE_S - 1
    assert not warm.end_when_idle()
    warm.now += 1
    assert warm.end_when_idle() and not warm.path.exists()


def test_idle_server_stays_while_somebody_is_about_to_ask(warm: Server) -> None:
    warm.now += IDLE_S
    with locked(warm.path, waits=True):
        assert not warm.end_when_idle()
    assert warm.end_when_idle()


def test_server_whose_files_have_changed_says_so_and_takes_no_more_jobs(warm: Server) -> None:
    running = warm.ask()
    warm.changed = "/x/torch/__init__.py"
    late = warm.ask()
    assert told(late) == [{"type": "stale", "path": "/x/torch/__init__.py"}]
    assert warm.server._is_ending and not warm.path.exists()
    assert told(running) == [{"type": "started", "pid": 101}], "its job goes on"


def test_server_that_is_stopped_answers_and_is_not_found_any_more(warm: Server) -> None:
    assert told(warm.ask("stop")) == [{"type": "stopping"}]
    assert warm.server._is_ending and not warm.path.exists()


def test_what_a_job_had_to_import_is_there_for_the_next_one_once(warm: Server) -> None:
    warm.ask(imports=["torch", "numpy"])
    warm.ask(imports=["numpy"])
    assert warm.imported == [["numpy"]]


def test_one_who_is_no_msrun_costs_nobody_anything(warm: Server, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(warm.path))
        stranger.sendall(b"fGET / HTTP/1.1\r\n\r\n")
        stranger.shutdown(socket.SHUT_WR)
        assert warm.server._accept() is None
    assert "a request was not understood" in capfd.readouterr().err
    assert told(warm.ask()) == [{"type": "started", "pid": 101}]


@pytest.mark.parametrize(
    "said",
    [{}, {"type": "start"}, {"type": "start", "job_id": "f00d", "agent_pid": 1, "environment": {}, "imports": []}],
)
def test_request_that_is_not_whole_forks_nobody(warm: Server, said: Message) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(warm.path))
    connection.sendall(b"f")  # without descriptors
    channel = Channel(connection)
    channel.send(said)
    assert warm.server._accept() is None
    assert warm.server._jobs == {} and channel.receive() == []
    channel.close()
    assert told(warm.ask()) == [{"type": "started", "pid": 101}]


def test_another_user_is_not_served(warm: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(module.os, "geteuid", lambda: uid + 1)
    assert told(warm.ask()) == []
    assert not warm.server._jobs


def test_lock_of_a_server_is_the_users_alone_and_free_again_afterwards(tmp_path: Path) -> None:
    with locked(tmp_path / "a.sock", waits=False) as is_held, locked(tmp_path / "a.sock", waits=False) as is_held_twice:
        assert (is_held, is_held_twice) == (True, False)
        assert (tmp_path / "a.lock").stat().st_mode & 0o777 == 0o600
    with locked(tmp_path / "a.sock", waits=False) as is_held:
        assert is_held
