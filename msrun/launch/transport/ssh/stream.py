"""Streams that an SSH connection runs over: TCP, a ProxyCommand, or a channel of the connection to a jump host."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from msrun.cluster.own_thread import OwnThread, print_fault
from msrun.launch.transport.ssh.client_config import check_command_word
from msrun.launch.transport.ssh.paramiko_names import paramiko
from msrun.launch.transport.ssh.target import SshFault, SshTarget

END_S = 1.0
MAX_COMPLAINT_BYTES = 1 << 14
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_REASONS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there; is sshd running, and is it this port?",
    errno.ETIMEDOUT: "does not answer; is the host up, and does a firewall let SSH through?",
    errno.EHOSTUNREACH: "no route to the host; is it up, and in a network that this one reaches?",
    errno.ENETUNREACH: "its network is unreachable from here; see ProxyJump in ssh_config",
}


@dataclass(frozen=True)
class Stream:
    """Bytes both ways."""

    socket: Any
    """A socket, or what behaves like one."""
    kill: Callable[[], None]
    """Ends it at once, from any thread; whoever waits for it comes back."""
    address: str = ""
    """Numeric address of the other end; empty when it is not seen from here."""
    complaint: Callable[[], str] = lambda: ""
    """What the way itself had to say when it failed."""


def open_tcp(target: SshTarget, deadline: float, on_socket: Callable[[Callable[[], None]], None]) -> Stream:
    """Connect to a server.

    Args:
        deadline: of `time.monotonic`.
        on_socket: gets what ends the try, from any thread.

    Raises:
        SshFault: no such name, or no connection.
    """
    found = _resolve(target, deadline)
    fault = SshFault("has no address")
    for index, (family, kind, protocol, _, address) in enumerate(found):
        left = max(0.0, deadline - time.monotonic()) / (len(found) - index)
        limit = min(left, target.tcp_time_out_s) if target.tcp_time_out_s else left
        stream = socket.socket(family, kind, protocol)
        on_socket(partial(_shut, stream))
        try:
            stream.settimeout(max(limit, 0.001))
            stream.connect(address)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            stream.close()
            fault = _connect_fault(error, limit, is_late=time.monotonic() >= deadline)
            continue
        return Stream(stream, partial(_shut, stream), _numeric(str(address[0])))
    raise fault


def _connect_fault(error: OSError, limit: float, *, is_late: bool) -> SshFault:
    if is_late or (isinstance(error, TimeoutError) and error.errno is None):
        return SshFault(f"does not answer within {limit:.1f} s; is the host up, and does a firewall let SSH through?")
    reason = _REASONS.get(error.errno or 0) or f"cannot be connected to ({error.strerror or error})"
    return SshFault(reason, is_temporary=error.errno == errno.ECONNRESET)


def _resolve(target: SshTarget, deadline: float) -> list[Any]:
    """Look a name up; a thread of its own waits, for a resolver cannot be told when to stop."""
    answer: list[Any] = []

    def look() -> None:
        family = _FAMILIES.get(target.address_family, socket.AF_UNSPEC)
        try:
            answer.append(socket.getaddrinfo(target.host_name, target.port, family, socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.append(error)

    if _is_numeric(target.host_name):
        look()
    else:
        asker = OwnThread("resolve", look, answer.append)
        asker.start()
        asker.join(max(0.0, deadline - time.monotonic()))
    if not answer:
        raise SshFault(f"{target.host_name} is not resolved in time; is the name server well?")
    if isinstance(answer[0], BaseException) and not isinstance(answer[0], OSError | UnicodeError):
        raise answer[0]
    if isinstance(answer[0], Exception):
        reason = getattr(answer[0], "strerror", None) or "not a host name"
        raise SshFault(f"the name {target.host_name} cannot be resolved ({reason}); give an address, or see HostName")
    return list(answer[0])


def _is_numeric(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def _numeric(address: str) -> str:
    return address.partition("%")[0].removeprefix("::ffff:")


def _shut(stream: socket.socket) -> None:
    """End a socket for all threads; whoever uses it closes it."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def open_proxy_command(target: SshTarget) -> Stream:
    """Run the command that leads to a server, as ssh does: by the user's shell, which is replaced by it.

    Raises:
        SshFault: it cannot be started.
        UsageError: the host's name is none that may be given to a shell.
    """
    check_command_word("HostName", target.host_name)
    shell = os.environ.get("SHELL") or "/bin/sh"
    ours, theirs = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - goes with the last who reads it
    try:
        process = subprocess.Popen(
            [shell, "-c", f"exec {target.proxy_command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise SshFault(f"ProxyCommand: {shell} cannot be started ({error.strerror})") from None
    finally:
        theirs.close()

    def kill() -> None:
        _shut(ours)
        with contextlib.suppress(OSError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        errors.close()

    def complaint() -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        try:
            text = os.pread(errors.fileno(), MAX_COMPLAINT_BYTES, 0).decode("utf-8", "backslashreplace").strip()
        except (OSError, ValueError):  # ended by another thread
            return ""
        said = text.splitlines()[-1] if text else f"exit status {process.poll()}"
        return f"ProxyCommand {target.proxy_command}: {said}"

    return Stream(ours, kill, complaint=complaint)


class ChannelSocket:
    """A channel of the connection to a jump host, as the socket of another connection.

    Closing never waits for the jump host, which may be the one that does not answer.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._closed = False  # by this name paramiko looks for it

    def settimeout(self, seconds: float | None) -> None:
        """Set how long `recv` and `send` may take."""
        self._channel.settimeout(seconds)

    def recv(self, size: int) -> bytes:
        """Return what has come; empty at the end."""
        data: bytes = b"" if self._closed else self._channel.recv(size)
        return data

    def send(self, data: bytes) -> int:
        """Send some of the bytes."""
        if self._closed:
            raise BrokenPipeError
        count: int = self._channel.send(data)
        return count

    def has_room(self) -> bool:
        """Return whether `send` takes something without waiting."""
        return bool(self._closed or (self._channel.send_ready() and self._channel.transport.has_room()))

    def close(self) -> None:
        """Close it; that is told to the jump host when it can be."""
        if not self._closed:
            self._closed = True
            OwnThread("close channel", self._tell, print_fault).start()

    def _tell(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()

    def getpeername(self) -> tuple[str, int]:
        """Return nothing that is known here."""
        return "", 0


def channel_stream(channel: Any) -> Stream:
    """Return a stream over a channel of type direct-tcpip."""
    ours = ChannelSocket(channel)
    return Stream(ours, ours.close)
