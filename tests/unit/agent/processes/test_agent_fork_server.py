"""What the fork server imports, when it may fork, and what it is told."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_agents import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from msrun.agent.processes import child, fork_server
from msrun.agent.processes.process_control import Pid, start_time
from msrun.agent.processes.process_spec import FIRST_SERVER_ID, SCHEDULER_ID, ProcessSpec
from msrun.cluster.messages import Channel
from msrun.planning.program import Program
from msrun.planning.record_json import decode_record, encode_record

REPOSITORY = Path(__file__).resolve().parents[4]


def test_process_spec_survives_json() -> None:
    spec = ProcessSpec(
        3, "/l/worker_3.log", Program("script", "/a.py", ("\udcff",)), use_exec=True, env={"A": "b", "C": None}
    )
    assert decode_record(ProcessSpec, encode_record(spec)) == spec
    scheduler = ProcessSpec(SCHEDULER_ID, "/l/scheduler.log")
    assert decode_record(ProcessSpec, encode_record(scheduler)) == scheduler


@given(st.dictionaries(st.text(), st.none() | st.text()))
def test_environment_of_a_process_spec_survives_json(env: dict[str, str | None]) -> None:
    spec = ProcessSpec(0, "/l", env=env)
    assert decode_record(ProcessSpec, encode_record(spec)).env == env


def test_process_with_threads_must_not_fork() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    method, reason = fork_server.fork_safety()
    release.set()
    thread.join()
    assert method == "exec"
    assert "threads were started by imports" in reason


SINGLE_THREAD = """
import sys, types
from msrun.agent.processes import child, fork_server
print(fork_server.fork_safety())
sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: {initialised})
print(fork_server.fork_safety())
"""


@pytest.mark.parametrize("initialised", [True, False])
def test_process_with_a_live_accelerator_must_not_fork(initialised: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SINGLE_THREAD.format(initialised=initialised)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == "('fork', '')"
    assert second.startswith("('exec', 'torch.cuda was initialised" if initialised else "('fork', '')")


def test_preload_imports_modules_and_lazy_names_and_reports_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lazy_pkg").mkdir()
    (tmp_path / "lazy_pkg" / "__init__.py").touch()
    (tmp_path / "lazy_pkg" / "inner.py").touch()
    (tmp_path / "broken_mod.py").write_text("raise RuntimeError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    fork_server.preload(["lazy_pkg:inner", "broken_mod", "no_such_mod", "lazy_pkg:missing"])
    assert {"lazy_pkg", "lazy_pkg.inner"} <= set(sys.modules)
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in errors] == [
        "preload broken_mod",
        "preload no_such_mod",
        "preload lazy_pkg",
    ]


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
    done = subprocess.run(
        [sys.executable, "-c", FINALIZERS],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "of the worker\n"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(clock: FakeClock) -> Iterator[tuple[fork_server.ForkServer, Channel]]:
    """A fork server in this process, and the agent's end of its channel."""
    ours, theirs = socket.socketpair()
    passing, taking = socket.socketpair()
    with passing, taking:
        agent, channel = Channel(ours), Channel(theirs)
        made = fork_server.ForkServer(channel, os.getpid(), taking, clock)
        yield made, agent
        made._reaper._deaths.close()
        agent.close()
        channel.close()


def test_process_that_cannot_be_forked_is_named_and_nobody_is_started_after_it(
    server: tuple[fork_server.ForkServer, Channel], monkeypatch: pytest.MonkeyPatch
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


def test_workers_and_their_children_are_killed_when_the_grace_is_over(
    server: tuple[fork_server.ForkServer, Channel], clock: FakeClock, sent: list[tuple[list[int], int]]
) -> None:
    made, agent = server
    made._running = {100: SCHEDULER_ID, 101: 0}
    made._stop(signal.SIGTERM, 10.0, 0)
    assert sent == [([101, 999], signal.SIGTERM), ([101, 999], signal.SIGCONT)]
    clock.advance(9.0)
    made._signal_late()
    assert len(sent) == 2 and made._time_left() == 1.0
    clock.advance(1.0)
    made._signal_late()
    made._signal_late()
    assert sent[2:] == [([101, 999], signal.SIGKILL)]
    assert made._time_left() is None
    assert agent.receive()[-1] == {"type": "killed", "process_ids": [0], "grace_s": 10.0}


def test_signal_that_ends_the_job_comes_first_and_term_follows_before_kill(
    server: tuple[fork_server.ForkServer, Channel],
    clock: FakeClock,
    sent: list[tuple[list[int], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = server
    groups: list[tuple[list[int], int]] = []
    monkeypatch.setattr(fork_server.process_control, "signal_groups", lambda pids, n: groups.append((list(pids), n)))
    made._running = {100: SCHEDULER_ID, 101: 0}
    made._stop(signal.SIGINT, 10.0, 0)
    assert groups == [([101], signal.SIGINT)] and sent == []
    clock.advance(8.0)
    made._signal_late()
    assert [signum for _, signum in sent] == [signal.SIGTERM, signal.SIGCONT]
    clock.advance(2.0)
    made._signal_late()
    assert sent[2:] == [([101, 999], signal.SIGKILL)]


def test_stop_without_grace_kills_at_once(
    server: tuple[fork_server.ForkServer, Channel], sent: list[tuple[list[int], int]]
) -> None:
    made, _ = server
    made._running = {101: 0}
    made._stop(signal.SIGTERM, 0.0, 0)
    assert [signum for _, signum in sent] == [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL]


def test_end_of_a_grace_does_not_hit_the_next_attempt(
    server: tuple[fork_server.ForkServer, Channel], clock: FakeClock, sent: list[tuple[list[int], int]]
) -> None:
    made, agent = server
    made._stop(signal.SIGTERM, 10.0, 0)
    made._handle({"type": "sweep"})
    assert [message["type"] for message in agent.receive()] == ["told", "swept"]
    made._running = {102: 0}
    clock.advance(10.0)
    made._signal_late()
    assert signal.SIGKILL not in [signum for _, signum in sent]
    assert made._time_left() is None


def test_end_of_a_parameter_server_is_news_of_the_attempt_that_it_served(
    server: tuple[fork_server.ForkServer, Channel],
    sent: list[tuple[list[int], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its main thread may have ended before others: it is a zombie then, that cannot be collected yet."""
    made, agent = server
    made._running = {103: FIRST_SERVER_ID}
    ends = iter([[], [(103, 0, 0.0)]])
    monkeypatch.setattr(made._reaper, "reap", lambda: next(ends))
    made._handle({"type": "sweep"})
    assert [message["type"] for message in agent.receive()] == ["exited", "swept"]


def test_second_stop_tells_nobody_again_and_shortens_the_grace(
    server: tuple[fork_server.ForkServer, Channel], clock: FakeClock
) -> None:
    made, agent = server
    made._stop(signal.SIGTERM, 60.0, 0)
    made._stop(signal.SIGTERM, 5.0, 0)
    assert [message["type"] for message in agent.receive()] == ["told"]
    assert made._time_left() == 5.0


def test_agent_that_stays_stopped_is_ended_and_one_that_goes_on_is_not(
    server: tuple[fork_server.ForkServer, Channel], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = server
    ended: list[Any] = []
    is_stopped = True
    monkeypatch.setattr(fork_server.process_control, "is_stopped", lambda _: is_stopped)
    monkeypatch.setattr(fork_server.process_control, "signal_processes", lambda pids, _: ended.extend(pids))
    clock.advance(100.0)
    made._look_at_agent()
    assert ended == [] and made._time_left() is None, "without a limit nobody looks"
    made._stopped_limit_s = 8.0
    assert made._time_left() == 2.0
    is_stopped = False
    made._look_at_agent()
    is_stopped = True
    clock.advance(8.0)
    made._look_at_agent()
    assert ended == []
    is_stopped = False
    made._look_at_agent()
    is_stopped = True
    clock.advance(8.0)
    made._look_at_agent()
    assert ended == [], "it has moved since"
    clock.advance(0.1)
    made._look_at_agent()
    assert ended == [os.getpid()]
    (agent,) = ended
    assert isinstance(agent, Pid) and agent.started_at == start_time(os.getpid()), "nobody who gets its number later"


def test_nobody_waits_while_workers_are_to_be_started(server: tuple[fork_server.ForkServer, Channel]) -> None:
    made, _ = server
    made._waiting.append(ProcessSpec(0, "/l"))
    assert made._time_left() == 0.0
    made._cannot_start = True
    assert made._time_left() is None


def test_signal_goes_to_the_processes_that_are_named(
    server: tuple[fork_server.ForkServer, Channel], sent: list[tuple[list[int], int]]
) -> None:
    made, _ = server
    made._running = {100: SCHEDULER_ID, 101: 0, 102: 1}
    made._handle({"type": "signal", "process_ids": [1], "signum": signal.SIGUSR1})
    assert sent == [([102], signal.SIGUSR1)]


def test_agent_that_is_gone_before_it_has_passed_its_files_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[float] = []
    monkeypatch.setattr(fork_server.process_control, "kill_descendants", lambda limit_s, *_: killed.append(limit_s))
    ours, theirs = socket.socketpair()
    passing, taking = socket.socketpair()
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
