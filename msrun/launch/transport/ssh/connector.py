"""SshConnector: one SSH connection and one exec for each host of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from msrun.errors import ClusterError, UsageError
from msrun.launch.transport.ssh.client_config import ClientConfig
from msrun.launch.transport.ssh.dialer import Connection, Dialer
from msrun.launch.transport.ssh.key_ring import Ask, KeyRing, read_key_file
from msrun.launch.transport.ssh.known_hosts import HostKeyCheck
from msrun.launch.transport.ssh.login import Login
from msrun.launch.transport.ssh.pipe import SshPipe
from msrun.launch.transport.ssh.target import SshFault, SshTarget, reason_of
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import SshSettings


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
        self._config_lock = threading.Lock()
        self._warn = warn
        self._keys = KeyRing()
        self._ask = ask
        self._dialer = Dialer(Login(HostKeyCheck(warn), self._keys))

    def prepare(self, entries: Iterable[HostEntry]) -> None:
        """Read ssh_config for these hosts, and ask for the passphrases of their keys, before anything is connected.

        Raises:
            UsageError: a key of --ssh_identity is none; ssh_config cannot be read or understood, or says what cannot be
                done.
        """
        for path in self._settings.identity_files:
            problem = read_key_file(path).problem
            if problem:
                raise UsageError(f"--ssh_identity {path}: {problem}; give the file of a private key")
        hops = {hop: None for entry in entries for hop in _route(self._target(entry))}
        if self._config.ignored:
            self._warn(f"ssh_config: {', '.join(sorted(self._config.ignored))}: not supported, left out")
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
            connection = self._dialer.connect(target, deadline)
            try:
                return self._start(connection, command, deadline)
            except BaseException:
                self._dialer.end(connection)
                raise
        except SshFault as fault:
            raise ClusterError(f"{target.label}: {fault.text}") from None

    def close(self) -> None:
        """End all connections, and those that are being made; from any thread."""
        self._dialer.close()

    def _target(self, entry: HostEntry) -> SshTarget:
        with self._config_lock:
            return self._config.resolve(entry.name, user=entry.user, port=entry.port)

    def _start(self, connection: Connection, command: str, deadline: float) -> SshPipe:
        found: list[Any] = []

        def start() -> None:
            try:
                found.append(connection.transport.open_session(timeout=max(0.01, deadline - time.monotonic())))
            except Exception as error:  # noqa: BLE001 - paramiko raises whatever its thread has met
                raise SshFault(f"the server opens no session ({reason_of(error)})") from None
            try:
                found[0].exec_command(command)
            except Exception as error:  # noqa: BLE001
                if connection.transport.is_active():
                    raise SshFault("the server starts no command; see ForceCommand and the shell of the user") from None
                raise SshFault(f"the connection broke before the agent was started ({reason_of(error)})") from None

        self._dialer.within(connection, deadline, start)
        return SshPipe(found[0], connection.stream.address, lambda: self._dialer.end(connection))


def _route(target: SshTarget) -> Iterable[SshTarget]:
    """Yield the jump hosts before a target, and the target."""
    if target.via:
        yield from _route(target.via)
    yield target
