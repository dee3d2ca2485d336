"""SshConnector: one SSH connection and one exec for each host of a job."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from msrun.errors import ClusterError
from msrun.launch.transport.ssh.client_config import ClientConfig
from msrun.launch.transport.ssh.fault import SshFault
from msrun.launch.transport.ssh.host_key_check import HostKeyCheck
from msrun.launch.transport.ssh.key_ring import Ask, KeyRing
from msrun.launch.transport.ssh.login import Login, end_transport
from msrun.launch.transport.ssh.paramiko_names import Transport, paramiko
from msrun.launch.transport.ssh.pipe import SshPipe
from msrun.launch.transport.ssh.stream import Stream, channel_stream, open_proxy_command, open_tcp
from msrun.launch.transport.ssh.target import SshTarget
from msrun.launch.transport.ssh.watchdog import Guard, Watchdog
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.hosts.ssh_settings import SshSettings

LOGINS_AT_A_TIME = 8
"""With one server: sshd begins to drop connections at random from its tenth that has not logged in yet."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 3.0


@dataclass(frozen=True, eq=False)
class _Connection:
    """A login."""

    transport: Transport
    stream: Stream

    def end(self) -> None:
        end_transport(self.transport, self.stream)


class SshConnector:
    """Opens pipes to agents; `open` may be called by many threads at a time, one for each host."""

    def __init__(self, settings: SshSettings, *, warn: Callable[[str], None], ask: Ask | None = None) -> None:
        """Connect to nothing yet.

        Args:
            warn: told, in one line, what is not refused but should be known.
            ask: asks for a passphrase, in `prepare` only; None = nobody is asked.
        """
        self._settings = settings
        self._config = ClientConfig(settings)
        self._keys = KeyRing()
        self._ask = ask
        self._login = Login(HostKeyCheck(warn), self._keys)
        self._watchdog = Watchdog()
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._jumps: dict[object, Future[_Connection]] = {}
        self._doors: dict[object, threading.Semaphore] = {}

    def prepare(self, entries: Iterable[HostEntry]) -> None:
        """Read ssh_config for these hosts, and ask for the passphrases of their keys, before anything is connected.

        Raises:
            UsageError: ssh_config cannot be read or understood, or says what cannot be done.
        """
        targets = [self._target(entry) for entry in entries]
        hops = {hop: None for target in targets for hop in _route(target)}
        self._keys.unlock(hops, self._ask)

    def open(self, entry: HostEntry, command: str, *, deadline: float) -> SshPipe:
        """Log in on a host and start a command there; waits.

        Args:
            command: read by the login shell there.
            deadline: of `time.monotonic`; --ssh_connect_time_out may end it earlier.

        Raises:
            ClusterError: one line, with the host, the reason and the remedy.
            UsageError: ssh_config cannot be read or understood.
        """
        target = self._target(entry)
        deadline = min(deadline, time.monotonic() + self._settings.connect_time_out_s)
        try:
            connection = self._connect(target, deadline)
            try:
                return self._start(connection, command, deadline)
            except BaseException:
                self._end(connection)
                raise
        except SshFault as fault:
            raise ClusterError(f"{target.label}: {fault.text}") from None

    def close(self) -> None:
        """End all connections, and those that are being made; from any thread."""
        self._watchdog.close()
        with self._lock:
            connections = list(self._connections)
            self._connections.clear()
        for connection in connections:
            connection.end()

    def _target(self, entry: HostEntry) -> SshTarget:
        with self._lock:
            return self._config.resolve(entry.name, user=entry.user, port=entry.port)

    def _start(self, connection: _Connection, command: str, deadline: float) -> SshPipe:
        with self._watchdog.guard(deadline) as guard:
            guard.watch(connection.stream.kill)
            try:
                channel = connection.transport.open_session(timeout=max(0.01, deadline - time.monotonic()))
            except Exception as error:
                raise self._late(guard) or SshFault(f"the server opens no session ({_reason(error)})") from None
            try:
                channel.exec_command(command)
            except Exception as error:
                if late := self._late(guard):
                    raise late from None
                if connection.transport.is_active():
                    raise SshFault("the server starts no command; see ForceCommand and the shell of the user") from None
                raise SshFault(f"the connection broke before the agent was started ({_reason(error)})") from None
        return SshPipe(channel, connection.stream.address, lambda: self._end(connection))

    def _connect(self, target: SshTarget, deadline: float) -> _Connection:
        """Try until it goes well, or cannot."""
        pause = FIRST_PAUSE_S
        tries = 0
        while True:
            tries += 1
            try:
                return self._try(target, deadline)
            except SshFault as fault:
                if not fault.is_temporary:
                    raise
                wait = random.uniform(pause / 2, pause)  # noqa: S311 - so that those who were dropped together part
                if not self._watchdog.pause(wait, deadline):
                    raise SshFault(f"{fault.text} ({tries} tries)") from None
            pause = min(2 * pause, LAST_PAUSE_S)

    def _try(self, target: SshTarget, deadline: float) -> _Connection:
        via = self._jump(target.via, deadline) if target.via else None
        door = self._door(target)
        if not door.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise SshFault("other logins on the same server have taken all the time; raise --ssh_connect_time_out")
        try:
            with self._watchdog.guard(deadline) as guard:
                try:
                    stream = self._open_stream(target, via, guard, deadline)
                    guard.watch(stream.kill)
                    transport = self._login.run(target, stream, deadline)
                except SshFault as fault:
                    raise self._late(guard) or fault from None
        finally:
            door.release()
        return self._keep(_Connection(transport, stream))

    def _open_stream(self, target: SshTarget, via: _Connection | None, guard: Guard, deadline: float) -> Stream:
        if via is None:
            return open_proxy_command(target) if target.proxy_command else open_tcp(target, deadline, guard.watch)
        assert target.via is not None
        place = (target.host_name, target.port)
        try:
            left = max(0.01, deadline - time.monotonic())
            return channel_stream(via.transport.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=left))
        except Exception as error:
            reason = f"jump host {target.via.label} does not reach {target.host_name} port {target.port}"
            raise SshFault(f"{reason} ({_reason(error)}); see AllowTcpForwarding there") from None

    def _jump(self, target: SshTarget, deadline: float) -> _Connection:
        """Return the connection to a jump host, which all hosts behind it share; the first who comes makes it."""
        with self._lock:
            shared = self._jumps.get(target.server)
            if shared is not None and shared.done() and not shared.exception():
                if not shared.result().transport.is_active():
                    shared = None
            is_first = shared is None
            if shared is None:
                shared = self._jumps[target.server] = Future()
        if is_first:
            try:
                shared.set_result(self._connect(target, deadline))
            except BaseException as error:
                shared.set_exception(error)
        try:
            return shared.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise SshFault(f"jump host {target.label}: is not connected in time") from None
        except SshFault as fault:
            text = fault.text if fault.text.startswith("jump host ") else f"jump host {target.label}: {fault.text}"
            raise SshFault(text) from None

    def _door(self, target: SshTarget) -> threading.Semaphore:
        place = (target.host_name.lower(), target.port, target.via and target.via.server)
        with self._lock:
            return self._doors.setdefault(place, threading.Semaphore(LOGINS_AT_A_TIME))

    def _keep(self, connection: _Connection) -> _Connection:
        with self._lock:
            is_closed = self._watchdog.is_closed
            if not is_closed:
                self._connections.add(connection)
        if is_closed:
            connection.end()
            raise SshFault("called off")
        return connection

    def _end(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.end()

    def _late(self, guard: Guard) -> SshFault | None:
        if self._watchdog.is_closed:
            return SshFault("called off")
        if guard.has_fired:
            limit = f"{self._settings.connect_time_out_s:g}"
            return SshFault(
                f"no login within the time; the host or its sshd hangs, or raise --ssh_connect_time_out {limit}"
            )
        return None


def _route(target: SshTarget) -> Iterable[SshTarget]:
    """Yield a target after the hosts before it."""
    if target.via:
        yield from _route(target.via)
    yield target


def _reason(error: Exception) -> str:
    if isinstance(error, paramiko.ChannelException):
        return str(error.text).lower()
    text: Any = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else "connection closed"
