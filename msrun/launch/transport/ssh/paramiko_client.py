"""ParamikoClient: logins where OpenSSH's client is not installed. What only that can do is refused, not left out."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import paramiko

from msrun.cluster.own_thread import OwnThread, print_fault
from msrun.errors import UsageError
from msrun.launch.transport.pipe import MAX_STDERR_BYTES, READ_BYTES, SocketPipe
from msrun.launch.transport.ssh import login as words
from msrun.launch.transport.ssh.login import HOST_KEYS, Questions, SshFault, explain_refusal, shown
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import NO_CONFIG, SshSettings

# What goes wrong is told by exceptions; without a handler, logging would write it to stderr, traceback and all.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

END_S = 2.0
_KNOWN = {"hostname", "user", "port", "identityfile", "identitiesonly", "userknownhostsfile", "stricthostkeychecking"}
_HARMLESS = {"batchmode", "compression", "forwardagent", "forwardx11", "hashknownhosts", "loglevel", "sendenv"}
_HARMLESS |= {"serveraliveinterval", "serveralivecountmax", "tcpkeepalive", "addkeystoagent", "gssapiauthentication"}
_HARMLESS |= {"connecttimeout", "passwordauthentication", "controlmaster", "controlpath", "controlpersist"}
_REMEDY = "install OpenSSH's client, which msrun then uses"


class ChannelPipe(SocketPipe):
    """A command on a host; three threads pass its streams on, so that a host that stalls holds up nobody else."""

    def __init__(self, channel: Any, address: str, end: Callable[[], None]) -> None:
        super().__init__(address)
        self._channel, self._end = channel, end
        self._stderr = b""
        works = (self._send, self._receive, self._receive_stderr)
        self._threads = [OwnThread("ssh stream", partial(_pass_on, work), print_fault) for work in works]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while data := self._theirs.recv(READ_BYTES):
            self._channel.sendall(data)
        self._channel.shutdown_write()

    def _receive(self) -> None:
        try:
            while data := self._channel.recv(READ_BYTES):
                self._theirs.sendall(data)
        finally:
            self._theirs.shutdown(socket.SHUT_RDWR)

    def _receive_stderr(self) -> None:
        while data := self._channel.recv_stderr(READ_BYTES):
            self._stderr = (self._stderr + data)[-MAX_STDERR_BYTES:]

    def close(self) -> None:
        for end in (self._socket, self._theirs):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._end()
        for thread in self._threads:
            thread.join(END_S)
        self._socket.close()
        self._theirs.close()

    @property
    def exit_status(self) -> int | None:
        self._channel.status_event.wait(END_S)
        status = int(self._channel.exit_status)
        return status if status >= 0 else None

    def stderr_text(self) -> str:
        self._threads[-1].join(END_S)
        return self._stderr.decode("utf-8", "backslashreplace")


def _pass_on(work: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        work()


class _HostKeys(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko has no types
    """What becomes of a host that is not in known_hosts."""

    def __init__(self, policy: str, path: Path, lock: threading.Lock) -> None:
        self._policy, self._path, self._lock = policy, path, lock

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:  # noqa: ARG002 - paramiko's interface
        if self._policy == "accept-new":
            with self._lock:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._path.touch(mode=0o600)
                with self._path.open("a") as file:
                    file.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")
        elif self._policy != "no":
            raise SshFault(words.UNKNOWN.format(_show(key), hostname, ""))


def _show(key: Any) -> str:
    return words.show_key(key.get_name(), key.fingerprint)


class ParamikoClient:
    """One connection, with a thread of paramiko's, for each host; `connect` is for many threads at a time."""

    def __init__(self, settings: SshSettings, questions: Questions) -> None:
        self._settings, self._questions = settings, questions
        self._lock, self._accepting = threading.Lock(), threading.Lock()
        self._ends: dict[Any, Callable[[], None]] = {}
        self._sockets: dict[Any, Any] = {}
        """client -> its connection: while a login begins, the client does not close it yet"""
        self._is_closed = False

    def check(self, entry: HostEntry) -> bool:
        """Return whether host keys are checked. Raises UsageError: ssh_config cannot be read, or needs ssh itself."""
        return self._policy(self._look_up(entry.name)) != "no"

    def connect(self, entry: HostEntry, command: str, time_left: Callable[[], float]) -> ChannelPipe:
        """Log in and start a command. Raises SshFault: that failed; UsageError: as for `check`."""
        found = self._look_up(entry.name)
        port = entry.port or self._settings.port or int(found["port"])
        user = entry.user or self._settings.user or found.get("user", getpass.getuser())
        files = [Path(path).expanduser() for path in [*self._settings.identity_files, *found.get("identityfile", [])]]
        files = [path for path in files if path.exists()]
        client, seconds = paramiko.SSHClient(), time_left()
        with self._lock:
            if self._is_closed:
                raise SshFault("called off")
            self._ends[client] = partial(self._end, client)
        late = threading.Timer(max(0.01, seconds), client.close)
        late.start()
        try:
            self._set_host_keys(client, found)
            only = found.get("identitiesonly") == "yes" or bool(self._settings.identity_files)
            self._log_in(client, (found["hostname"], port, user), files, only=only, seconds=max(0.01, seconds))
            transport = client.get_transport()
            channel = transport.open_session(timeout=max(0.01, time_left()))
            channel.exec_command(command)
            address = str(transport.getpeername()[0]).removeprefix("::ffff:")
            pipe = ChannelPipe(channel, address, partial(self._end, client))
            self._ends[client] = pipe.close
            if pipe.wait_for_login(time_left) is None:
                pipe.close()
                raise SshFault("")  # for being late
        except Exception as error:  # noqa: BLE001 - paramiko raises whatever its thread has met
            self._end(client)
            fault = error if isinstance(error, SshFault) else _explain(error, user, files)
            if time_left() <= 0:
                fault = SshFault(words.LATE.format(seconds), is_late=True)
            fault.place = found["hostname"] if port == words.DEFAULT_PORT else f"{found['hostname']} port {port}"
            raise fault from None
        finally:
            late.cancel()
        return pipe

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            ends = list(self._ends.values())
        for end in ends:
            end()

    def _end(self, client: Any) -> None:
        transport = client.get_transport()
        client.close()
        with self._lock:
            connection = self._sockets.pop(client, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if transport is not None:
            transport.join(END_S)
        with self._lock:
            self._ends.pop(client, None)

    def _transport(self, client: Any, connection: Any, **options: Any) -> Any:
        """Return what paramiko speaks SSH by, over a connection that `close` can end from now on."""
        with self._lock:
            if self._is_closed:
                connection.close()
                raise SshFault("called off")
            self._sockets[client] = connection
        return paramiko.Transport(connection, **options)

    def _log_in(
        self, client: Any, place: tuple[str, int, str], files: list[Path], *, only: bool, seconds: float
    ) -> None:
        host, port, user = place
        limits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), seconds)
        made = partial(self._transport, client)
        keys = list(map(str, files))
        login = partial(client.connect, host, port, user, key_filename=keys, transport_factory=made, **limits)
        try:
            login(allow_agent=not only, look_for_keys=not files)
        except paramiko.PasswordRequiredException:
            path = next(filter(_is_locked, files), Path("~/.ssh/id_ed25519").expanduser())
            answer = self._questions.answer(f"Enter passphrase for key '{path}': ", str(id(client)))
            if not answer:
                text = f"{shown(path)} has a passphrase; ssh-add {shown(path)}"
                raise SshFault(f"login as {user} refused: {text}") from None
            login(allow_agent=not only, look_for_keys=not files, passphrase=answer)

    def _look_up(self, name: str) -> dict[str, Any]:
        given = self._settings.config_file
        files = [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")] if given is None else [given]
        files = [path for path in files if str(given) != NO_CONFIG and path.exists()]
        for path in files:  # whose Match exec runs commands
            if path.stat().st_uid not in (0, os.getuid()) or path.stat().st_mode & 0o022:
                raise UsageError(f"ssh_config: {path}: bad owner or permissions; it must be yours: chmod go-w {path}")
        try:
            texts = (path.read_text(errors="replace") for path in files)
            found: dict[str, Any] = dict(paramiko.SSHConfig.from_text("\nHost *\n".join(texts)).lookup(name))
            found["port"] = int(found.get("port", words.DEFAULT_PORT))
        except Exception as error:  # noqa: BLE001 - whatever its parser stumbles over
            raise UsageError(f"ssh_config: {error}; correct it, or {_REMEDY}") from None
        asked = {word for word, value in found.items() if str(value).lower() not in ("no", "none")}
        if unknown := sorted(asked - _KNOWN - _HARMLESS):
            raise UsageError(f"ssh_config: {', '.join(unknown)}: not without ssh; {_REMEDY}, or give --ssh_config none")
        return found

    def _policy(self, found: dict[str, Any]) -> str:
        asked = HOST_KEYS.get(self._settings.host_keys or "", found.get("stricthostkeychecking", "yes").lower())
        return "no" if asked == "off" else asked

    def _set_host_keys(self, client: Any, found: dict[str, Any]) -> None:
        policy = self._policy(found)
        own = found.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
        paths = [Path(word).expanduser() for word in [*own, "/etc/ssh/ssh_known_hosts"]]
        for path in paths if policy != "no" else ():
            if path.exists():
                if any(line.lstrip().startswith("@") for line in path.read_text(errors="replace").splitlines()):
                    raise SshFault(f"{path}: its @cert-authority and @revoked count with ssh only; {_REMEDY}")
                client.load_system_host_keys(str(path))
        client.set_missing_host_key_policy(_HostKeys(policy, paths[0], self._accepting))


def _is_locked(path: Path) -> bool:
    try:
        paramiko.PKey.from_path(path)
    except Exception as error:  # noqa: BLE001 - whatever its parsers raise
        return isinstance(error, paramiko.PasswordRequiredException) or "assword" in str(error)
    return False


def _explain(error: Exception, user: str, files: list[Path]) -> SshFault:
    said = str(error) or type(error).__name__
    if isinstance(error, paramiko.BadHostKeyException):
        known, remedy = f"known_hosts has {_show(error.expected_key)}", f"ssh-keygen -R '{error.hostname}'"
        return SshFault(words.CHANGED.format(_show(error.key), known, remedy))
    if isinstance(error, paramiko.AuthenticationException) or re.search("No (authentication|existing session)", said):
        types = getattr(error, "allowed_types", None)
        hint = f"the server takes {', '.join(types)} only" if types else "the server knows none"
        hint = words.TOO_MANY if "No existing session" in said else hint
        return SshFault(explain_refusal(user, list(map(shown, files)), hint))
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        error = next(iter(error.errors.values()))
    if isinstance(error, socket.gaierror | UnicodeError):
        return SshFault(f"its name cannot be resolved ({said}); give an address, or HostName")
    if isinstance(error, OSError) and (reason := words.REASONS.get(os.strerror(error.errno or 0))):
        return SshFault(reason)
    if isinstance(error, paramiko.ChannelException):
        return SshFault(f"the server opens no session ({error.text})")
    if "Channel closed" in said:
        return SshFault(words.NO_COMMAND)
    if "Indecipherable" in said:
        return SshFault(words.NO_SERVER)
    if "banner" in said or isinstance(error, EOFError | ConnectionError):
        return SshFault(words.BUSY, is_temporary=True)
    return SshFault(f"no login ({said})")
