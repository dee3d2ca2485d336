"""The fork server: what it imports, when it may fork, what it is told, and that it runs before its job is known."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_agents import FakeClock
from job_runner import run_python

from msrun import contract
from msrun.agent.processes import child, fork_server
from msrun.agent.processes.process_control import start_time
from msrun.agent.processes.process_spec import FIRST_SERVER_ID, ProcessSpec
from msrun.agent.processes.server_handle import ForkServerHandle
from msrun.cluster.messages import Channel

SINGLE_THREAD = """
import sys, types
from msrun.agent.processes import child, fork_server
print(fork_server.fork_safety())
sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: {initialised})
print(fork_server.fork_safety())
"""


@pytest.mark.parametrize("initialised", [True, False])
def test_process_with_a_live_accelerator_must_not_fork(initialised: bool) -> None:
    first, second = run_python(SINGLE_THREAD.format(initialised=initialised)).splitlines()
    assert first == "('fork', '')"
    assert second.startswith("('exec', 'torch.cuda was initialised" if initialised else "('fork', '')")


FINALIZERS = """
import weakref
from msrun.agent.processes.fork_server import forget_finalizers
class Thing: pass
early, late = Thing(), Thing()
weakref.finalize(early, print, "of the server")
forget_finalizers()
weakref.finalize(late, print, "of the worker")
"""


def test_finalizers_of_imports_are_forgotten_and_later_ones_run() -> None:
    """Also fails when the interpreter no longer keeps them where they are looked for."""
    assert hasattr(weakref.finalize, "_registry")
    assert run_python(FINALIZERS) == "of the worker\n"


Pair = tuple[fork_server.ForkServer, Channel]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(clock: FakeClock) -> Iterator[Pair]:
    """A fork server in this process, and the agent's end of its channel."""
    (ours, theirs), (passing, taking) = socket.socketpair(), socket.socketpair()
    with passing, taking, closing(Channel(ours)) as agent, closing(Channel(theirs)) as channel:
        made = fork_server.ForkServer(channel, os.getpid(), taking, clock)
        yield made, agent
        made._reaper._deaths.close()


def test_process_that_cannot_be_forked_is_named_and_nobody_is_started_after_it(
    server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, agent = server

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    made._start([ProcessSpec(rank, "/l") for rank in range(3)])
    assert made._start_next() is None and made._start_next() is None
    (message,) = agent.receive()
    assert message["type"] == "cannot_start"
    begin, _, end = message["reason"].partition(" (")
    assert begin == "cannot start worker 0: Resource temporarily unavailable"
    assert end == "the user or the container has as many processes as it may); raise ulimit -u or pids.max"
    made._stop(signal.SIGTERM, 0.0, 0)
    (told,) = agent.receive()
    assert (told["type"], told["not_started"]) == ("told", [0, 1, 2])
    made._start([ProcessSpec(5, "/l")])
    made._start_next()
    assert "cannot start worker 5" in agent.receive()[0]["reason"], "the next attempt tries again"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """Processes and the signal that they were sent."""
    found: list[tuple[list[int], int]] = []
    monkeypatch.setattr(fork_server.process_control, "signal_processes", lambda pids, n: found.append((list(pids), n)))
    monkeypatch.setattr(fork_server.process_control, "session_members", lambda leaders: [*leaders, 999])
    monkeypatch.setattr(fork_server.process_control, "descendants", lambda _: [])
    return found


def test_end_of_a_grace_does_not_hit_the_next_attempt(
    server: Pair, clock: FakeClock, sent: list[tuple[list[int], int]]
) -> None:
    made, agent = server
    made._stop(signal.SIGTERM, 10.0, 0)
    made._handle({"type": "sweep"})
    assert [message["type"] for message in agent.receive()] == ["told", "swept"]
    made._running = {102: 0}
    clock.advance(10.0)
    made._signal_late()
    assert signal.SIGKILL not in [signum for _, signum in sent] and made._time_left() is None


@pytest.mark.usefixtures("sent")
def test_end_of_a_parameter_server_is_news_of_the_attempt_that_it_served(
    server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread may have ended before others: it is a zombie then, that cannot be collected yet."""
    made, agent = server
    made._running = {103: FIRST_SERVER_ID}
    ends = iter([[], [(103, 0, 0.0)]])
    monkeypatch.setattr(made._reaper, "reap", lambda: next(ends))
    made._handle({"type": "sweep"})
    assert [message["type"] for message in agent.receive()] == ["exited", "swept"]


def test_agent_that_stays_stopped_is_ended_and_one_that_goes_on_is_not(
    server: Pair, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = server
    ended: list[Any] = []
    is_stopped = True
    monkeypatch.setattr(fork_server.process_control, "is_stopped", lambda _: is_stopped)
    monkeypatch.setattr(fork_server.process_control, "signal_processes", lambda pids, _: ended.extend(pids))

    def look(after_s: float) -> list[Any]:
        clock.advance(after_s)
        made._look_at_agent()
        return ended

    assert look(100.0) == [] and made._time_left() is None, "without a limit nobody looks"
    made._stopped_limit_s = 8.0
    assert made._time_left() == 2.0
    for _ in range(2):
        is_stopped = False
        look(0.0)
        is_stopped = True
        assert look(8.0) == [], "it has moved since"
    (agent,) = look(0.1)
    assert agent == os.getpid() and agent.started_at == start_time(os.getpid()), "nobody who gets its number later"


def test_agent_that_is_gone_before_it_has_passed_its_files_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[float] = []
    monkeypatch.setattr(fork_server.process_control, "kill_descendants", lambda limit_s, *_: killed.append(limit_s))
    (ours, theirs), (passing, taking) = socket.socketpair(), socket.socketpair()
    with ours, theirs, taking:
        made = fork_server.ForkServer(Channel(theirs), os.getpid(), taking, FakeClock())
        passing.close()
        made._begin({})
    assert made._finished and killed


def test_worker_gives_torch_its_own_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(set_num_threads=given.append))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    child._set_torch_threads()
    assert given == [3]


IMPORT = """
import gc
from msrun.agent.processes.fork_server import collection_paused
gc.set_threshold(50, 5, 5)
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
with collection_paused():
    for _ in range(2):  # from Python 3.12 on a collection that was due before comes at the next jump
        rounds.clear()
    kept = [[number] for number in range(10_000)]
    {module}
print(len(rounds), gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 10_000)
more = [[number] for number in range(10_000)]
print(len(rounds) > 0)
"""


@pytest.mark.parametrize(
    ("module", "thresholds"),
    [("pass", (50, 5, 5)), ("gc.set_threshold(900, 9, 9)", (900, 9, 9)), ("gc.disable()", (50, 5, 5))],
)
def test_imports_are_not_searched_for_garbage_and_what_modules_set_stays(
    module: str, thresholds: tuple[int, ...]
) -> None:
    inside, afterwards = run_python(IMPORT.format(module=module)).splitlines()
    goes_on = module != "gc.disable()"
    assert (inside, afterwards) == (f"0 {thresholds} {goes_on} True", str(goes_on))


@pytest.mark.parametrize(
    ("changes", "folder", "can_serve"),
    [
        ({}, "", True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a", "GLOO_SOCKET_IFNAME": "eth0"}, "", True),
        ({"OMP_NUM_THREADS": "2"}, "", False),
        ({"LD_LIBRARY_PATH": "/lib"}, "", False),
        ({"MSRUN_JOB_ID": "other"}, "", False),
        ({}, "other", False),
    ],
    ids=["nothing else", "the job's", "threads", "libraries", "another job", "another directory"],
)
def test_a_server_serves_what_differs_in_nothing_that_imports_read(
    tmp_path: Path, changes: dict[str, str], folder: str, can_serve: bool
) -> None:
    before = {contract.MSRUN_JOB_ID: "f00d", "PATH": os.environ["PATH"], "WORLD_SIZE": "old", "GROUP_WORLD_SIZE": "2"}
    ours, passing = socket.socketpair()
    with ours, passing:
        process: Any = mock.Mock()
        handle = ForkServerHandle(process, Channel(ours), passing, before, str(tmp_path))
        assert handle.can_serve({**before, **changes}, str(tmp_path / folder)) is can_serve
