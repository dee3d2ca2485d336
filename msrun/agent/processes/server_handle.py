"""The agent's hold on its fork server: start it, talk to it, see it end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from msrun.agent.processes.process_spec import ProcessSpec
from msrun.cluster.messages import Channel, Message
from msrun.errors import ClusterError

# -c leaves '' in sys.path[0] (not with PYTHONSAFEPATH); it goes, so that nothing is imported from the directory that
# msrun was typed in.
_BOOT = "import sys; '' in sys.path[:1] and sys.path.pop(0); from msrun.agent.processes.fork_server import main; main()"


class ForkServerHandle:
    """A running fork server. Owned by the agent's event loop."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self.channel = channel

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def send(self, kind: str, **fields: Any) -> None:
        """Send one request; a server that has ended is noticed by its closed channel."""
        self.channel.send({"type": kind, **fields})

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Ask for processes; each answers with a `started` message."""
        self.send("start", processes=[spec.to_json() for spec in specs])

    def receive(self) -> list[Message]:
        """Return what the server has reported."""
        return self.channel.receive()

    def kill(self) -> None:
        """End the server at once; the kernel ends its workers with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the server's end; False when it has not come in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def start_fork_server(
    *, env: Mapping[str, str], working_directory: str, log_fd: int, scheduler_fd: int, listener_fd: int
) -> ForkServerHandle:
    """Start a fork server in a session of its own.

    Args:
        log_fd: gets what the server and imported libraries print; closed by the caller.
        scheduler_fd: the scheduler's end of its channel to the agent; closed by the caller.
        listener_fd: listening socket of the store; closed by the caller.

    Raises:
        ClusterError: the process cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        fds = (theirs.fileno(), scheduler_fd, listener_fd)
        argv = [sys.executable, "-c", _BOOT, str(fds[0]), str(os.getpid()), str(scheduler_fd), str(listener_fd)]
        try:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=working_directory,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ClusterError(f"cannot start the fork server ({sys.executable}): {error.strerror}") from None
    return ForkServerHandle(process, Channel(ours))
