"""What the fork server imports, when it may fork, and what it is told."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_runner import wait_until

from msrun.agent.processes import fork_server
from msrun.agent.processes.process_spec import SCHEDULER_ID, ProcessSpec
from msrun.cluster.messages import Channel
from msrun.planning.program import Program

REPOSITORY = Path(__file__).resolve().parents[4]


def test_process_spec_survives_json() -> None:
    spec = ProcessSpec(
        3, "/l/worker_3.log", Program("script", "/a.py", ("\udcff",)), use_exec=True, env={"A": "b", "C": None}
    )
    assert ProcessSpec.from_json(spec.to_json()) == spec
    scheduler = ProcessSpec(SCHEDULER_ID, "/l/scheduler.log")
    assert ProcessSpec.from_json(scheduler.to_json()) == scheduler


@given(st.dictionaries(st.text(), st.none() | st.text()))
def test_environment_of_a_process_spec_survives_json(env: dict[str, str | None]) -> None:
    spec = ProcessSpec(0, "/l", env=env)
    assert ProcessSpec.from_json(spec.to_json()).env == env


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
from msrun.agent.processes import fork_server
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
def server() -> Iterator[tuple[fork_server.ForkServer, Channel]]:
    """A fork server in this process, and the agent's end of its channel."""
    ours, theirs = socket.socketpair()
    passing, taking = socket.socketpair()
    with passing, taking:
        agent, channel = Channel(ours), Channel(theirs)
        yield fork_server.ForkServer(channel, os.getpid(), taking), agent
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
    made._stop(0.0, 0)
    (told,) = agent.receive()
    assert (told["type"], told["not_started"]) == ("told", [0, 1, 2])
    made._start([ProcessSpec(5, "/l")])
    made._start_next()
    assert "cannot start worker 5" in agent.receive()[0]["reason"], "the next attempt tries again"


def test_end_of_a_grace_does_not_hit_the_next_attempt(server: tuple[fork_server.ForkServer, Channel]) -> None:
    made, _ = server
    begin = time.monotonic()
    made._stop(0.01, 0)
    assert made._kill_at is not None
    made._handle({"type": "sweep"})
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            made._running[process.pid] = 0
            wait_until(lambda: time.monotonic() > begin + 0.02, "the grace is over")
            made._kill_late()
            assert process.poll() is None and made._time_left() is None
        finally:
            process.kill()
