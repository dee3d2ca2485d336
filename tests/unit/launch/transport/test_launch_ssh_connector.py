"""Logins on a server in this process that behaves badly in every way: each its own error, nothing left behind."""

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from job_runner import wait_until
from pipe_ends import read, write_all
from ssh_net import make_key
from ssh_server import Behaviour, SshServer, add_key, running_agent

from msrun.errors import ClusterError, UsageError
from msrun.launch.transport import ssh
from msrun.launch.transport.pipe import LocalPipe, agent_command
from msrun.launch.transport.ssh import SshConnector
from msrun.planning.hosts import HostEntry
from msrun.planning.spec import NO_CONFIG, SshSettings

DEADLINE_S = 30.0
pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")


class Client:
    """The launcher's side: a home with one key, and an ssh_config that says how to get to `h1`."""

    def __init__(self, home):
        self.home = home
        self.key = make_key(home / "id")
        self.config = home / "config"
        self.known_hosts = home / "known_hosts"
        self.said = []
        self.connectors = []

    def connector(self, port, text="", **more):
        lines = [text, "Host h*", " HostName 127.0.0.1", f" Port {port}", f" IdentityFile {self.home}/id"]
        self.config.write_text("\n".join([*lines, f" UserKnownHostsFile {self.known_hosts}", " IdentityAgent none"]))
        settings = {"host_keys": "off", "config_file": self.config, **more}
        made = SshConnector(SshSettings(**settings), warn=self.said.append)
        self.connectors.append(made)
        return made

    def open(self, port, command="echo", text="", within_s=DEADLINE_S, **more):
        """Log in on 127.0.0.1 at a port."""
        connector = self.connector(port, text, **more)
        connector.prepare(HostEntry("h1"))
        return connector.open(HostEntry("h1"), command, deadline=time.monotonic() + within_s)

    def refused(self, *args, **settings):
        """Return why a login is refused."""
        with pytest.raises(ClusterError) as raised:
            self.open(*args, **settings)
        assert "\n" not in str(raised.value)
        return str(raised.value)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A client; afterwards there are as many threads, children and descriptors as before."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    made = Client(tmp_path)
    yield made
    for connector in made.connectors:
        connector.close()
    wait_until(lambda: threading.active_count() <= threads, f"threads {threading.enumerate()} have ended")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors are closed", 5.0)


@pytest.fixture
def serve(client, tmp_path):
    """Starts servers; they end before the client looks what is left."""
    servers = []

    def start(**behaviour):
        server = SshServer(tmp_path, Behaviour(**behaviour))
        servers.append(server)
        return server.__enter__()

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def read_all(pipe):
    data = b""
    while piece := read(pipe):
        data += piece
    return data


def test_agent_gets_what_is_written_and_ends_when_the_pipe_is_closed(serve, client):
    server = serve(accepted=frozenset({client.key.split()[1]}))
    pipe = client.open(server.port, text="User me")
    assert (set(server.users), server.commands, pipe.address) == ({"me"}, ["echo"], "127.0.0.1")
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
        assert pipe.read() is None and not selector.select(0)
        pipe.write(b"more")
        assert selector.select(DEADLINE_S) and read(pipe) == b"more"
        server.hang_up()
        assert selector.select(DEADLINE_S)
    assert read(pipe) == b"" and pipe.exit_status is None
    pipe.close()
    with pytest.raises(OSError):
        pipe.write(b"more")


def test_end_of_an_agent_is_known_with_the_end_of_its_stderr(serve, client):
    for status in (0, 127):
        pipe = client.open(serve().port, f"exit {status}")
        assert read_all(pipe) == b"" and pipe.exit_status == status
    pipe = client.open(serve().port, "flood 1000000")
    assert read_all(pipe) == b"done" and pipe.exit_status == 0
    text = pipe.stderr_text()  # what ssh itself logs is not in it, but ends a line
    assert text.replace("\n", "").endswith("noise" + "the end") and len(text) <= 16 * 1024


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "fish"])
def test_login_shell_tells_by_which_signal_an_agent_was_ended(tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    agent = tmp_path / "agent.py"
    agent.write_text(f"#!{sys.executable}\nimport os, signal\nos.kill(os.getppid(), 15)\nos.kill(os.getpid(), 9)\n")
    agent.chmod(0o700)
    for program, status, text in ((str(agent), 137, ""), ("/no/python", 127, "/no/python")):
        pipe = LocalPipe([shell, "-c", agent_command(program)], "")
        assert pipe.wait_for_login(lambda: DEADLINE_S) is True
        assert (read(pipe), pipe.exit_status) == (b"", status)
        assert text in pipe.stderr_text() and bool(pipe.stderr_text()) == bool(text)
        pipe.close()


def test_server_that_hangs_up_at_first_is_tried_again_and_an_ssh_that_hangs_is_killed(serve, client, monkeypatch):
    server = serve(hang_ups=3)
    pipe = client.open(server.port)
    assert server.connections == 4
    monkeypatch.setattr(ssh, "END_S", 0.01)
    os.kill(pipe.process.pid, signal.SIGSTOP)
    pipe.close()
    assert pipe.process.returncode == -signal.SIGKILL


def test_server_that_always_hangs_up_is_named_with_the_tries(serve, client):
    server = serve(hang_ups=10**9)
    text = client.refused(server.port, within_s=1.0)
    assert text.startswith(f"h1 (127.0.0.1 port {server.port}): the server has hung up before it said who it is")
    assert "MaxStartups" in text and text.endswith("tries)")
    assert server.connections > 1


def test_silent_server_is_given_up_in_time(serve, client):
    text = client.refused(serve(is_silent=True).port, connect_time_out_s=0.5)
    assert ": no login within 0." in text and "the host or its sshd hangs, or is slow" in text


def test_what_is_said_before_the_banner_is_passed_over_but_for_other_protocols(serve, client):
    client.open(serve(first=b"Welcome to the cluster.\r\nBe nice.\r\n").port).close()
    server = serve(first=b"HTTP/1.1 400 Bad Request\r\n" * 120, says_no_more=True)
    assert client.refused(server.port).endswith("what answers there is no SSH server; is it the right port?")
    assert server.connections == 1


def test_refused_keys_are_named(serve, client):
    server = serve(accepted=frozenset({"none"}))
    text = client.refused(server.port, text="User me\nIdentityFile ~/absent")
    assert "login as me refused: tried ~/id; the server takes publickey" in text
    assert set(server.offered) == {client.key.split()[1]}


def test_server_that_hangs_up_after_too_many_keys_is_explained(serve, client, tmp_path):
    keys = [tmp_path / f"other_{number}" for number in range(3)]
    for path in keys:
        make_key(path)
    server = serve(accepted=frozenset({client.key.split()[1]}), max_tries=2)
    text = client.refused(server.port, identity_files=tuple(keys))
    assert "tried ~/other_0, ~/other_1" in text and "MaxAuthTries" in text and "IdentitiesOnly yes" in text
    client.open(server.port, identity_files=(tmp_path / "id", *keys)).close()


def test_client_without_a_key_says_so(serve, client, tmp_path):
    (tmp_path / "id").unlink()
    text = client.refused(serve().port)
    assert "no key was tried (give --ssh_identity FILE, or ssh-add one)" in text


def test_sessions_and_commands_that_are_refused_are_told_apart(serve, client):
    text = client.refused(serve(opens_sessions=False).port)
    assert "the server opens no session (administratively prohibited)" in text.lower()
    assert "the server starts no command; see ForceCommand" in client.refused(serve(starts_commands=False).port)


def test_host_key_is_strict_by_default_then_accepted_once_then_known(serve, client):
    server = serve()
    text = client.refused(server.port, host_keys=None)
    assert (
        ": host key ED25519 SHA256:" in text and f"is unknown: [127.0.0.1]:{server.port} is not in known_hosts" in text
    )
    assert " is unknown: " in client.refused(server.port, host_keys=None, text="StrictHostKeyChecking ask")
    assert not client.known_hosts.exists() and server.offered == []
    client.open(server.port, host_keys="accept-new").close()
    assert client.known_hosts.read_text() == f"[127.0.0.1]:{server.port} {server.key}\n"
    client.open(server.port, host_keys=None).close()
    assert client.said == []


@pytest.mark.parametrize("policy", [None, "accept-new", "off"])
def test_wrong_host_key_stops_all_but_policy_off_before_any_key_is_shown(serve, client, tmp_path, policy):
    server = serve()
    before = f"[127.0.0.1]:{server.port} {make_key(tmp_path / 'other')}\n"
    client.known_hosts.write_text(before)
    if policy == "off":
        client.open(server.port, host_keys=policy).close()
        assert ["host keys are not checked" in said for said in client.said] == [True]
    else:
        text = client.refused(server.port, host_keys=policy)
        assert "HOST KEY HAS CHANGED: it is ED25519 SHA256:" in text and "ssh-keygen " in text
        assert f"but {client.known_hosts}:1 has another ED25519 key" in text
        assert server.offered == []
    assert client.known_hosts.read_text() == before


def test_agent_lets_in_without_any_file(serve, client, tmp_path, monkeypatch):
    server = serve(accepted=frozenset({client.key.split()[1]}))
    with running_agent(tmp_path / "agent") as path:
        add_key(path, tmp_path / "id")
        (tmp_path / "id").unlink()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        client.open(server.port, text="IdentityAgent SSH_AUTH_SOCK").close()
    assert set(server.offered) == {client.key.split()[1]}


def test_closing_calls_off_what_is_being_made_and_ends_what_was(serve, client):
    pipe = client.open(serve().port, "wait")
    silent = serve(is_silent=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.refused, silent.port)
        wait_until(lambda: silent.connections and len(client.connectors) > 1, "the client has connected")
        client.connectors[1].close()
        assert waiting.result(DEADLINE_S).endswith(": called off")
    assert pipe.read() is None
    client.connectors[0].close()
    assert read(pipe) == b"" and pipe.process.returncode != -signal.SIGKILL


def test_key_with_a_passphrase_is_refused_with_the_remedy(serve, client):
    words = ["ssh-keygen", "-q", "-a", "1", "-p", "-N", "open sesame", "-f", client.home / "id"]
    subprocess.run(words, check=True, capture_output=True, timeout=DEADLINE_S)
    server = serve(accepted=frozenset({client.key.split()[1]}))
    assert "has it a passphrase? ssh-add ~/id" in client.refused(server.port)


def test_way_of_ssh_config_is_quoted_when_it_fails(client, monkeypatch):
    monkeypatch.setattr(ssh, "FIRST_PAUSE_S", 100.0)
    text = client.refused(22, text="ProxyCommand ls /no/way/to/%h", within_s=1.0)
    assert "ProxyCommand ls /no/way/to/127.0.0.1: ls: " in text
    assert text.endswith("No such file or directory (in 1 try)")


@pytest.mark.parametrize("text", ["Foo bar", "Port x", "Include bad/*", "Match exec"])
def test_config_that_ssh_does_not_take_is_refused_before_anything(client, text):
    (client.home / "bad").mkdir()
    (client.home / "bad" / "open").write_text("User me\n")
    (client.home / "bad" / "open").chmod(0o666)
    with pytest.raises(UsageError, match=r"ssh_config: .*; correct it, or name another file by --ssh_config"):
        client.open(22, text=text.replace("bad", f"{client.home}/bad"))


def test_config_that_others_may_write_or_takes_long_to_read_is_refused(client, monkeypatch):
    connector = client.connector(22)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="reading it takes more than 0 s; see its"):
        patch.setattr(ssh, "CHECK_S", 0.0)
        connector.prepare(HostEntry("h1"))
    client.config.chmod(0o666)
    with pytest.raises(UsageError, match=r"(?i)ssh_config: .*bad owner or permissions"):
        connector.prepare(HostEntry("h1"))


def test_ssh_that_cannot_be_started_and_one_that_nobody_wants_any_more_are_refused(client, monkeypatch):
    connectors = [client.connector(22)]
    monkeypatch.setattr(shutil, "which", lambda _: "/no/such/ssh")
    connectors += [client.connector(22)]
    connectors[0].close()
    for connector, why in zip(connectors, ("called off", "/no/such/ssh cannot be started (No such"), strict=True):
        with pytest.raises(ClusterError, match=f"^h1: {re.escape(why)}"):
            connector.open(HostEntry("h1"), "echo", deadline=time.monotonic() + DEADLINE_S)


def test_options_are_enough_and_keys_and_known_hosts_are_those_of_home(serve, client):
    (client.home / ".ssh").mkdir()
    server = serve(accepted=frozenset({make_key(client.home / ".ssh" / "id_ed25519").split()[1]}))
    for policy in ("accept-new", None):
        settings = {"host_keys": policy, "config_file": Path(NO_CONFIG), "port": server.port, "user": "me"}
        connector = SshConnector(SshSettings(**settings), warn=client.said.append)
        client.connectors.append(connector)
        connector.prepare(HostEntry("127.0.0.1"))
        connector.open(HostEntry("127.0.0.1"), "echo", deadline=time.monotonic() + DEADLINE_S).close()
    assert set(server.users) == {"me"} and client.said == []


def test_launcher_without_ssh_or_without_a_name_for_its_user_says_so(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="needs a name for user"):
        patch.setattr("pwd.getpwuid", {}.__getitem__)
        SshConnector(SshSettings(), warn=print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no ssh on PATH"):
        SshConnector(SshSettings(), warn=print)


@pytest.mark.parametrize(("content", "text"), [(None, "No such file or directory"), (b"\xffjunk", "is no private key")])
def test_files_of_the_command_line_are_looked_at_before_anything(tmp_path, content, text):
    if content:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(UsageError, match=f"--ssh_identity .*/key: {text}; give the file of a private key"):
        SshConnector(SshSettings(identity_files=(tmp_path / "key",)), warn=print)
    with pytest.raises(UsageError, match=r"--ssh_config .*/gone: is no file that can be read; give an"):
        SshConnector(SshSettings(config_file=tmp_path / "gone"), warn=print)
