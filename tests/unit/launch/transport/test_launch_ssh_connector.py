"""Logins on a server in this process that behaves badly in every way: each its own error, nothing left behind."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from job_runner import wait_until
from pipe_ends import read, write_all
from ssh_net import make_key
from ssh_server import SshServer, add_key, running_agent, running_server

from msrun.errors import ClusterError, UsageError
from msrun.launch.transport.ssh import paramiko_names
from msrun.launch.transport.ssh.connector import SshConnector
from msrun.launch.transport.ssh.paramiko_names import paramiko
from msrun.launch.transport.ssh.pipe import SshPipe
from msrun.launch.transport.ssh.stream import open_proxy_command
from msrun.launch.transport.ssh.target import SshFault, SshTarget
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import SshSettings

DEADLINE_S = 30.0


class Client:
    """The launcher's side: a home with one key, and an ssh_config that says how to get to `h1`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.key = make_key(home / "id")
        self.config = home / "config"
        self.known_hosts = home / "known_hosts"
        self.said: list[str] = []
        self.connectors: list[SshConnector] = []

    def open(
        self, port: int, command: str = "echo", text: str = "", *, within_s: float = DEADLINE_S, **settings: Any
    ) -> SshPipe:
        """Log in on 127.0.0.1 at a port."""
        lines = [text, "Host h*", " HostName 127.0.0.1", f" Port {port}", f" IdentityFile {self.home}/id"]
        self.config.write_text("\n".join([*lines, f" UserKnownHostsFile {self.known_hosts}", " IdentityAgent none"]))
        settings = {"host_keys": "off", **settings}
        connector = SshConnector(SshSettings(config_file=self.config, **settings), warn=self.said.append)
        self.connectors.append(connector)
        return connector.open(HostEntry("h1"), command, deadline=time.monotonic() + within_s)

    def refused(self, *args: Any, **settings: Any) -> str:
        """Return why a login is refused."""
        with pytest.raises(ClusterError) as raised:
            self.open(*args, **settings)
        assert "\n" not in str(raised.value)
        return str(raised.value)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client; afterwards there are as many threads and descriptors as before."""
    monkeypatch.setenv("HOME", str(tmp_path))
    paramiko.Transport  # noqa: B018 - imported, with what it keeps open
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    made = Client(tmp_path)
    yield made
    for connector in made.connectors:
        connector.close()
    wait_until(lambda: threading.active_count() <= threads, f"threads {threading.enumerate()} have ended")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors are closed")


@pytest.fixture
def serve(client: Client, tmp_path: Path) -> Iterator[Callable[..., SshServer]]:
    """Starts servers; they end before the client looks what is left."""
    servers: list[SshServer] = []

    def start(**behaviour: Any) -> SshServer:
        server = running_server(tmp_path, **behaviour)
        servers.append(server)  # type: ignore[arg-type]
        return server.__enter__()

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def read_all(pipe: SshPipe) -> bytes:
    data = b""
    while piece := read(pipe):
        data += piece
    return data


def test_agent_gets_what_is_written_and_ends_when_the_pipe_is_closed(
    serve: Callable[..., SshServer], client: Client
) -> None:
    server = serve(accepted=frozenset({client.key.split()[1]}))
    pipe = client.open(server.port, text="User me")
    assert (server.users, server.commands, pipe.address) == (["me"], ["echo"], "127.0.0.1")
    data = os.urandom(300_000)
    writer = threading.Thread(target=write_all, args=(pipe, data))
    writer.start()
    echoed = b""
    while len(echoed) < len(data):
        echoed += read(pipe)
    writer.join(DEADLINE_S)
    assert echoed == data
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(0):  # that bytes had come may be told after they were read
            assert pipe.read() is None
        pipe.write(b"more")
        assert selector.select(DEADLINE_S) and read(pipe) == b"more"
        pipe._end()
        assert selector.select(DEADLINE_S)
    assert read(pipe) == b"" and pipe.exit_status is None
    pipe.close()
    with pytest.raises(OSError):
        pipe.write(b"more")


@pytest.mark.parametrize(
    ("command", "status"), [("exit 0", 0), ("exit 127", 127), ("signal KILL", 137), ("signal TERM", 143)]
)
def test_end_of_an_agent_is_known(serve: Callable[..., SshServer], client: Client, command: str, status: int) -> None:
    pipe = client.open(serve().port, command)
    assert read_all(pipe) == b"" and pipe.exit_status == status


def test_much_text_on_stderr_holds_nothing_up_and_its_end_is_kept(
    serve: Callable[..., SshServer], client: Client
) -> None:
    pipe = client.open(serve().port, "flood 5000000")
    assert read_all(pipe) == b"done"
    text = pipe.stderr_text()
    assert text.endswith("noise" + "the end") and len(text) <= 16 * 1024


def test_broken_connection_ends_reader_and_has_no_status(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve()
    pipe = client.open(server.port, "wait")
    server.hang_up()
    assert read(pipe) == b"" and pipe.exit_status is None


def test_server_that_hangs_up_at_first_is_tried_again(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve(hang_ups=3)
    client.open(server.port).close()
    assert server.connections == 4


def test_server_that_always_hangs_up_is_named_with_the_tries(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve(hang_ups=10**9)
    text = client.refused(server.port, within_s=1.0)
    assert text.startswith(f"h1 (127.0.0.1 port {server.port}): the server has hung up before it said who it is")
    assert "MaxStartups" in text and text.endswith("tries)")
    assert server.connections > 1


def test_silent_server_is_given_up_in_time(serve: Callable[..., SshServer], client: Client) -> None:
    text = client.refused(serve(is_silent=True).port, connect_time_out_s=0.5)
    assert ": no login within 0." in text and "the host or its sshd hangs, or is slow" in text


def test_banner_that_is_late_is_waited_for(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve(first=b"Welcome to the cluster.\r\nBe nice.\r\n")
    client.open(server.port).close()


def test_what_is_no_ssh_server_is_called_so(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve(first=b"HTTP/1.1 400 Bad Request\r\n" * 120)
    assert client.refused(server.port).endswith("what answers there is no SSH server; is it the right port?")
    assert server.connections == 1


def test_server_that_hangs_up_in_the_key_exchange_is_tried_again(
    serve: Callable[..., SshServer], client: Client
) -> None:
    server = serve(first=b"SSH-2.0-Fake\r\n", says_no_more=True)
    text = client.refused(server.port, within_s=0.6)
    assert "the server (SSH-2.0-Fake) has hung up during the key exchange" in text and server.connections > 1


def test_port_without_a_server_is_refused_at_once(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert client.refused(port) == (
        f"h1 (127.0.0.1 port {port}): connection refused: nothing listens there; is sshd running, and is it this port?"
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EHOSTUNREACH, "no route to the host"),
        (errno.ENETUNREACH, "its network is unreachable"),
        (errno.ETIMEDOUT, "does not answer; is the host up"),
        (errno.EADDRNOTAVAIL, "cannot be connected to (Cannot assign requested address)"),
    ],
)
def test_each_way_of_not_being_reached_has_its_words(
    client: Client, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, "connect", fail)
    assert text in client.refused(22)


def test_name_that_nobody_knows_is_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def look(name: str, *args: Any, **more: Any) -> Any:
        if name == "gone":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(name, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    text = client.refused(22, text="HostName gone")
    assert "the name gone cannot be resolved (Name or service not known); give an address, or see HostName" in text


def test_resolver_that_does_not_answer_is_given_up_in_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    known = socket.getaddrinfo

    def look(name: str, *args: Any, **more: Any) -> Any:
        if name == "slow" and not more.get("flags"):
            done.wait(DEADLINE_S)
        return known("127.0.0.1" if name == "slow" and not more.get("flags") else name, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    text = client.refused(22, text="HostName slow", within_s=0.3)
    done.set()
    assert "slow is not resolved in time; is the name server well?" in text


def test_refused_keys_are_named_with_those_that_were_left_out(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve(accepted=frozenset({"none"}))
    text = client.refused(server.port, text="User me\nIdentityFile ~/absent")
    assert "login as me refused: tried ~/id; not tried: ~/absent: No such file" in text
    assert server.offered == [client.key.split()[1]]


def test_server_that_hangs_up_after_too_many_keys_is_explained(
    serve: Callable[..., SshServer], client: Client, tmp_path: Path
) -> None:
    keys = [tmp_path / f"other_{number}" for number in range(3)]
    for path in keys:
        make_key(path)
    server = serve(accepted=frozenset({client.key.split()[1]}), max_tries=2)
    text = client.refused(server.port, identity_files=tuple(keys))
    assert "tried ~/other_0, ~/other_1" in text and "MaxAuthTries" in text and "IdentitiesOnly yes" in text
    client.open(server.port, identity_files=(tmp_path / "id", *keys)).close()


def test_server_that_takes_passwords_only_is_named(serve: Callable[..., SshServer], client: Client) -> None:
    text = client.refused(serve(types="password").port)
    assert text.endswith("tried ~/id; the server takes password only")


def test_client_without_a_key_says_so(serve: Callable[..., SshServer], client: Client, tmp_path: Path) -> None:
    (tmp_path / "id").unlink()
    text = client.refused(serve().port)
    assert "there is no key to try; give --ssh_identity FILE or ssh-add one; not tried: ~/id: No such file" in text


def test_sessions_and_commands_that_are_refused_are_told_apart(serve: Callable[..., SshServer], client: Client) -> None:
    assert "the server opens no session (Administratively prohibited)" in client.refused(
        serve(opens_sessions=False).port
    )
    assert "the server starts no command; see ForceCommand" in client.refused(serve(starts_commands=False).port)


def test_host_key_is_strict_by_default_then_accepted_once_then_known(
    serve: Callable[..., SshServer], client: Client
) -> None:
    server = serve()
    assert "is unknown: [127.0.0.1]:" in client.refused(server.port, host_keys=None)
    assert not client.known_hosts.exists() and server.offered == []
    client.open(server.port, host_keys="accept-new").close()
    assert client.known_hosts.read_text() == f"[127.0.0.1]:{server.port} {server.key}\n"
    client.open(server.port, host_keys=None).close()
    assert client.said == []


@pytest.mark.parametrize("policy", [None, "accept-new", "off"])
def test_wrong_host_key_stops_all_but_policy_off_before_any_key_is_shown(
    serve: Callable[..., SshServer], client: Client, tmp_path: Path, policy: Any
) -> None:
    server = serve()
    other = make_key(tmp_path / "other")
    client.known_hosts.write_text(f"[127.0.0.1]:{server.port} {other}\n")
    if policy == "off":
        client.open(server.port, host_keys=policy).close()
        assert "host keys are not checked" in client.said[0] and "HOST KEY HAS CHANGED" in client.said[1]
        return
    text = client.refused(server.port, host_keys=policy)
    assert "HOST KEY HAS CHANGED: it is ED25519 SHA256:" in text and f"but {client.known_hosts}:1 has ED25519" in text
    assert text.endswith(f"ssh-keygen -f {client.known_hosts} -R '[127.0.0.1]:{server.port}'")
    assert server.offered == []


def test_proxy_command_is_the_way_to_the_server(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve()
    relay = (
        "import socket, sys, threading, os; s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def back():\n"
        "    while d := s.recv(65536): os.write(1, d)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=back, daemon=True).start()\n"
        "while d := os.read(0, 65536): s.sendall(d)\n"
    )
    (client.home / "relay.py").write_text(relay)
    pipe = client.open(server.port, text=f"ProxyCommand python3 {client.home}/relay.py %h %p")
    pipe.write(b"over the relay")
    assert (read(pipe), pipe.address) == (b"over the relay", "")
    pipe.close()


def test_proxy_command_that_fails_is_quoted(client: Client) -> None:
    text = client.refused(22, text="ProxyCommand echo no way to %h >&2; exit 3", within_s=1.5)
    assert "ProxyCommand echo no way to 127.0.0.1 >&2; exit 3: no way to 127.0.0.1 (in " in text


def test_name_with_shell_text_never_reaches_a_proxy_command(client: Client, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shell text"):
        client.open(22, text=f"HostName x;touch${{IFS}}{tmp_path}/harm\nProxyCommand echo %h")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a;b"])
def test_proxy_command_looks_at_the_name_itself_too(name: str) -> None:
    with pytest.raises(UsageError, match="starts with '-' or holds shell text"):
        open_proxy_command(SshTarget("h1", name, "me", proxy_command=f"echo {name}"))


def test_shell_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/no/shell")
    with pytest.raises(SshFault, match=r"ProxyCommand: /no/shell cannot be started \(No such file or directory\)"):
        open_proxy_command(SshTarget("h1", "h1", "me", proxy_command="cat"))


def test_agent_lets_in_without_any_file(
    serve: Callable[..., SshServer], client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(accepted=frozenset({client.key.split()[1]}))
    with running_agent(tmp_path / "agent") as socket_path:
        add_key(socket_path, tmp_path / "id")
        (tmp_path / "id").unlink()
        client.open(server.port, text=f"IdentityAgent {socket_path}").close()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        client.open(server.port, text="IdentityAgent SSH_AUTH_SOCK").close()
    assert server.offered == [client.key.split()[1]] * 2


def test_server_that_wants_more_than_a_key_is_named(serve: Callable[..., SshServer], client: Client) -> None:
    text = client.refused(serve(types="keyboard-interactive", wants_more=True).port)
    assert "tried ~/id; beside a key the server wants keyboard-interactive, which msrun cannot give" in text


def test_closing_calls_off_what_is_being_made(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve(is_silent=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.refused, server.port)
        wait_until(lambda: server.connections and client.connectors, "the client has connected")
        client.connectors[0].close()
        assert waiting.result(DEADLINE_S).endswith(": called off")


def test_closing_ends_the_logins_that_were_made(serve: Callable[..., SshServer], client: Client) -> None:
    server = serve()
    pipe = client.open(server.port, "wait")
    assert pipe.read() is None
    client.connectors[0].close()
    try:
        assert read(pipe) == b""
    finally:
        server.hang_up()


def test_passphrases_are_asked_for_before_anything_is_connected(client: Client, tmp_path: Path) -> None:
    """One question for two hosts with the same key; see the tests of keys for when there is none."""
    key = paramiko.PKey.from_path(tmp_path / "id")
    from cryptography.hazmat.primitives import serialization

    data = serialization.load_ssh_private_key((tmp_path / "id").read_bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.BestAvailableEncryption(b"word")
    )
    (tmp_path / "id").write_bytes(data)
    asked: list[str] = []
    settings = SshSettings(config_file=Path("none"), identity_files=(tmp_path / "id",))
    connector = SshConnector(settings, warn=client.said.append, ask=lambda what: asked.append(what) or "word")  # type: ignore[func-returns-value]
    connector.prepare([HostEntry("h1"), HostEntry("h2")])
    connector.close()
    assert asked == ["passphrase of ~/id"] and key.get_base64() == client.key.split()[1]


def test_key_of_the_command_line_that_is_none_is_refused_before_anything(client: Client, tmp_path: Path) -> None:
    settings = SshSettings(config_file=Path("none"), identity_files=(tmp_path / "id", tmp_path / "gone"))
    connector = SshConnector(settings, warn=client.said.append)
    with pytest.raises(UsageError, match=r"--ssh_identity .*/gone: No such file or directory; give the file of a"):
        connector.prepare([HostEntry("h1")])
    connector.close()


def test_private_names_of_paramiko_are_where_they_were() -> None:
    """What `paramiko_names` leans on; the behaviour itself is tested above."""
    transport = paramiko.Transport
    assert transport._channel_handler_table[paramiko.common.MSG_CHANNEL_REQUEST] is paramiko.Channel._handle_request
    assert "ssh-ed25519" in transport._preferred_keys and "rsa-sha2-512" in transport._preferred_keys
    assert callable(paramiko.packet.Packetizer.complete_handshake) and callable(paramiko.agent.AgentSSH._connect)
    assert paramiko_names.Transport.run is transport.run
