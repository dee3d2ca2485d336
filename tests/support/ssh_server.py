"""An SSH server in this process, on loopback, that can be told to behave badly. No root, no sshd."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from dataclasses import dataclass, field
from typing import ClassVar

import paramiko
import pytest
from paramiko.common import MSG_CHANNEL_REQUEST
from ssh_net import make_key

from msrun.launch.transport.pipe import LOGIN_LINE

DEADLINE_S = 30.0


@dataclass
class Behaviour:
    """What a server does; by default it lets everybody in."""

    accepted: frozenset[str] = frozenset()
    """Public keys, in base64; empty = any."""
    max_tries: int = 6
    """After so many refused keys it hangs up."""
    first: bytes = b""
    """Said before anything else."""
    says_no_more: bool = False
    """Whether it hangs up after that."""
    hang_ups: int = 0
    """So many connections are closed before a word is said."""
    waits_for: threading.Event = field(default_factory=threading.Event)
    """What a silent server waits for."""
    is_silent: bool = False
    """Whether it accepts connections and says nothing."""
    opens_sessions: bool = True
    starts_commands: bool = True


class SshServer:
    """Serves until the context is left; `key` is its host key as known_hosts has it."""

    def __init__(self, folder, behaviour):
        self.behaviour = behaviour
        self.users = []
        self.offered = []
        self.commands = []
        self.connections = 0
        path = folder / "server_key"
        self.key = make_key(path)
        self._host_key = paramiko.PKey.from_path(path)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self):
        self._acceptor.start()
        return self

    def __exit__(self, *_):
        self.behaviour.waits_for.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(DEADLINE_S)
        self.hang_up()

    def hang_up(self):
        """Break all connections."""
        with self._lock:
            streams, self._open = self._open, []
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.connections <= self.behaviour.hang_ups:
                stream.close()
                continue
            with self._lock:
                self._open.append(stream)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream):
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            if self.behaviour.is_silent:
                self.behaviour.waits_for.wait(DEADLINE_S)
                stream.close()
                return
            stream.sendall(self.behaviour.first)
            if self.behaviour.says_no_more:
                stream.recv(1 << 16)
                stream.close()
                return
            transport = _Transport(stream)
            transport.add_server_key(self._host_key)
            transport.start_server(threading.Event(), _Session(self, transport))
            transport.join()
            transport.packetizer.complete_handshake()  # the timer of one that came to no end


def _answer(channel, message):
    """Answer a request first, then start the command that it asked for."""
    paramiko.Channel._handle_request(channel, message)
    words = channel.__dict__.pop("command", None)
    if words:
        threading.Thread(target=_run, args=(channel, words), daemon=True).start()


class _Transport(paramiko.Transport):
    """The server's side of a connection."""

    _channel_handler_table: ClassVar = {**paramiko.Transport._channel_handler_table, MSG_CHANNEL_REQUEST: _answer}


class _Session(paramiko.ServerInterface):
    """One connection to the server."""

    def __init__(self, server, transport):
        self._server = server
        self._transport = transport
        self._tries = 0

    def get_allowed_auths(self, username):
        return "publickey"

    def check_auth_publickey(self, username, key):
        self._server.users.append(username)
        self._server.offered.append(key.get_base64())
        accepted = self._server.behaviour.accepted
        if not accepted or key.get_base64() in accepted:
            return paramiko.AUTH_SUCCESSFUL
        self._tries += 1
        if self._tries >= self._server.behaviour.max_tries:
            self._transport.close()
        return paramiko.AUTH_FAILED

    def check_channel_request(self, kind, chanid):
        good = self._server.behaviour.opens_sessions
        return paramiko.OPEN_SUCCEEDED if good else paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel, command):
        self._server.commands.append(command.decode())
        channel.command = command.decode().split()
        return self._server.behaviour.starts_commands


def _run(channel, words):
    """Greet, then do `echo`, `exit N`, `flood BYTES` (to stderr, then `done` to stdout) or `wait`."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.sendall(b"Have a nice day.\n" + LOGIN_LINE)
        if words[0] == "echo":
            while data := channel.recv(1 << 16):
                channel.sendall(data)
        elif words[0] == "flood":
            for _ in range(int(words[1]) // 1000):
                channel.sendall_stderr(b"noise" * 200)
            channel.sendall_stderr(b"the end")
            channel.sendall(b"done")
        elif words[0] == "wait":
            channel.recv(1)
        channel.send_exit_status(int(words[1]) if words[0] == "exit" else 0)
        channel.close()


@contextlib.contextmanager
def running_agent(path):
    """Yield the socket of a new ssh-agent; skip the test where there is none."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("there is no ssh-agent")
    with subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it listens then
        try:
            yield path
        finally:
            process.terminate()


def add_key(agent, key):
    """Give a key to an ssh-agent."""
    environment = {"SSH_AUTH_SOCK": str(agent), "PATH": "/usr/bin:/bin"}
    subprocess.run(["ssh-add", "-q", key], env=environment, check=True, capture_output=True, timeout=DEADLINE_S)
