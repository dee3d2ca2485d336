"""A job that starts from a warm server: it asks one that is like it for a fork server, or starts one for next time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msrun import contract
from msrun.agent.processes.job_mark import NO_JOB
from msrun.agent.processes.server_handle import BOOT, ROOT, SEND_S, ForkServerHandle
from msrun.agent.warm.likeness import likeness, read_at_import
from msrun.agent.warm.warm_folder import address, importing, locked, warm_folder
from msrun.cluster.messages import Channel, Message, await_input

ANSWER_S = 5.0
"""How long a warm server may take to answer; it may import what an earlier job named."""
_START = "import os; os.fork() and os._exit(0); "
"""It must be nobody's child: the job ends everything below itself."""


@dataclass(frozen=True)
class WarmStart:
    """What `--warm` asks for."""

    imports: tuple[str, ...]
    """What a warm server imports before it has a job."""
    idle_s: float
    """How long it waits for the next job."""


class WarmProcess:
    """A fork server that a warm server has forked: no child of this process."""

    wait_status: int | None = None
    """Only the warm server knows."""

    def __init__(self, pid: int, connection: Channel) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._connection = connection

    def kill(self) -> None:
        """End it at once."""
        for signum in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, signum)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, and, where it was killed, what it left; False when that takes longer."""
        end = time.monotonic() + timeout_s
        while not self._connection.is_closed:
            if not await_input(self._connection, end - time.monotonic()):
                return False
            if any(message["type"] == "ended" for message in self._connection.receive()):
                break
        return await_input(self._descriptor, end - time.monotonic())

    def close(self) -> None:
        """Give up the hold on it, once it has ended."""
        self._connection.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def start_warm(
    warm: WarmStart, *, env: Mapping[str, str], working_directory: str, job_id: str, caller: Mapping[str, str]
) -> ForkServerHandle | None:
    """Return a fork server that has imported already, for `begin`; None where no warm server is ready.

    Then one is started beside the job, for the next.

    Raises:
        UsageError: others could reach the user's warm servers.
    """
    path = warm_folder(caller) / f"{likeness(env, warm.imports, working_directory)}.sock"
    with contextlib.suppress(OSError), locked(path, waits=True):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_S)
        try:
            _connect(connection, path)
        except OSError:  # none, or one that was killed
            connection.close()
            if not _is_importing(path):
                _start_server(path, warm, env, working_directory)
            return None
        return _ask(connection, warm, env, working_directory, job_id)
    return None


def _ask(
    connection: socket.socket, warm: WarmStart, env: Mapping[str, str], working_directory: str, job_id: str
) -> ForkServerHandle | None:
    ours, theirs = socket.socketpair()
    passing, taking = socket.socketpair()
    channel = Channel(connection)
    directory = os.open(working_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        socket.send_fds(connection, [b"f"], [theirs.fileno(), taking.fileno(), directory])
        job = {"job_id": job_id, "agent_pid": os.getpid(), "environment": dict(env), "imports": list(warm.imports)}
        channel.send({"type": "start", **job})
        answer = _answer(channel)
        if answer["type"] == "started":
            ours.settimeout(SEND_S)
            process = WarmProcess(answer["pid"], channel)
            return ForkServerHandle(process, Channel(ours), passing, env, working_directory)
    except OSError:  # it has ended, or still imports; what it forks for us later finds a closed channel
        pass
    finally:
        theirs.close()
        taking.close()
        os.close(directory)
    for one in (ours, passing, channel):
        one.close()
    return None


def _answer(channel: Channel) -> Message:
    while not channel.is_closed:
        for message in channel.receive():
            return message
    return {"type": "gone"}


def _connect(connection: socket.socket, path: Path) -> None:
    with address(path) as name:
        connection.connect(name)


def _is_importing(path: Path) -> bool:
    """Return whether somebody has started this warm server a moment ago."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        _connect(connection, importing(path))
        return True
    return False


def _start_server(path: Path, warm: WarmStart, env: Mapping[str, str], working_directory: str) -> None:
    """Start a warm server that will be found under `path` when it has imported; meanwhile the job runs."""
    importing(path).unlink(missing_ok=True)
    old = os.umask(0o077)
    try:
        listener = socket.socket(socket.AF_UNIX)
        with address(importing(path)) as name:
            listener.bind(name)
    finally:
        os.umask(old)
    listener.listen(64)
    boot = _START + BOOT.format(module="msrun.agent.warm.warm_server")
    words = [ROOT, str(listener.fileno()), str(path), str(warm.idle_s), *warm.imports]
    with listener, path.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", boot, *words],
            env={"PATH": env.get("PATH", os.defpath), **read_at_import(env), contract.MSRUN_JOB_ID: NO_JOB},
            cwd=working_directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    process.wait()


def stop_warm_servers(caller: Mapping[str, str]) -> int:
    """Let every warm server of this user end once its jobs are over; returns how many there were.

    Raises:
        UsageError: others could reach the user's warm servers.
    """
    count = 0
    folder = warm_folder(caller)
    for path in sorted([*folder.glob("*.sock"), *folder.glob("*.new")]):
        with contextlib.suppress(OSError), locked(path, waits=True), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60.0)  # it may still import
            try:
                _connect(connection, path)
            except OSError:  # it was killed
                path.unlink(missing_ok=True)
                continue
            connection.sendall(b"f")
            channel = Channel(connection)
            channel.send({"type": "stop"})
            count += _answer(channel)["type"] == "stopping"
    return count
