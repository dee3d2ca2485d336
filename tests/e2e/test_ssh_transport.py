"""Agents over SSH on real OpenSSH servers, each a host of its own in a network namespace."""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from job_runner import WORKERS, wait_until
from pipe_ends import read, write_all
from ssh_net import SshNet, make_key

from msrun.errors import ClusterError
from msrun.launch.transport.pipe import LOGIN_LINE
from msrun.launch.transport.ssh import SshConnector
from msrun.planning.hosts import HostEntry
from msrun.planning.spec import SshSettings

DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def ssh_net():
    """Three hosts; host 1 listens on port 2222 only."""
    with SshNet(3, host_options={1: {"Port": "2222"}}, keys=7) as hosts:
        yield hosts


class Launcher:
    """Opens pipes from the host `control`, with a config of its own before that of the network."""

    def __init__(self, net, folder):
        self.net = net
        self.folder = folder
        self.config = folder / "config"
        self.said = []
        self.connectors = []

    def connector(self, text="", **settings):
        port = f"Host host1\n Port 2222\nHost *\n Include {self.net.client}/config\n"
        self.config.write_text(f"{text}\n{port}")
        settings = {"connect_time_out_s": DEADLINE_S, "config_file": self.config, **settings}
        made = SshConnector(SshSettings(**settings), warn=self.said.append)
        self.connectors.append(made)
        return made

    def open(self, name, text="", command="exec cat", **settings):
        connector = self.connector(text, **settings)
        connector.prepare(HostEntry(name.rpartition("@")[2]))
        return self.open_with(connector, name, command)

    def open_with(self, connector, name, command="exec cat"):
        """Open a pipe; by any thread."""
        user, _, host = name.rpartition("@")
        with self.net.inside(self.net.control):
            text = f"echo {LOGIN_LINE.decode().strip()}; {command}"
            return connector.open(HostEntry(host, user=user), text, deadline=time.monotonic() + DEADLINE_S)

    def says(self, name, text="", command="hostname", **settings):
        """Return what a command says there."""
        pipe = self.open(name, text, command, **settings)
        said = b""
        while data := read(pipe):
            said += data
        assert pipe.exit_status == 0, pipe.stderr_text()
        pipe.close()
        return said.decode().strip()

    def refused(self, name, text="", **settings):
        with pytest.raises(ClusterError) as raised:
            self.open(name, text, **settings)
        return str(raised.value)


@pytest.fixture
def launcher(ssh_net, tmp_path):
    """A launcher; afterwards nothing of it is left on any host, nor here."""
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    made = Launcher(ssh_net, tmp_path)
    yield made
    for connector in made.connectors:
        connector.close()
    wait_until(lambda: threading.active_count() <= threads, f"threads have ended: {threading.enumerate()}")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors are closed")
    servers = {ssh_net.server(host) for host in range(ssh_net.count)}
    everything = lambda: set(ssh_net.processes(*range(ssh_net.count))) - servers  # noqa: E731
    wait_until(lambda: not everything(), "what was started on the hosts has ended")


def sign(key, *words):
    """Have the authority `ca` beside a public key certify it."""
    if not (key.parent / "ca").exists():
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", key.parent / "ca"], check=True, timeout=60)
    made = ["ssh-keygen", "-q", "-s", key.parent / "ca", "-I", "id", *words, key]
    subprocess.run(made, check=True, timeout=60)


def configure(net, host, text):
    """Have a server read lines more."""
    with (net.folder / f"sshd_config_{host}").open("a") as file:
        file.write(text)
    before = net.server_log(host).count("SIGHUP")
    os.kill(net.server(host), signal.SIGHUP)
    listens = lambda: "listening on 0.0.0.0" in net.server_log(host).split("SIGHUP")[-1]  # noqa: E731
    wait_until(lambda: net.server_log(host).count("SIGHUP") > before and listens(), "it has read that")


@pytest.mark.slow
def test_host_is_known_by_the_certificate_of_an_authority(ssh_net, launcher, tmp_path):
    public = next(
        line for line in (ssh_net.client / "known_hosts").read_text().splitlines() if line.startswith("host2")
    )
    (tmp_path / "host_key_2.pub").write_text(public.partition(" ")[2] + "\n")
    sign(tmp_path / "host_key_2.pub", "-h", "-n", "host2")
    configure(ssh_net, 2, f"HostCertificate {tmp_path}/host_key_2-cert.pub\n")
    known = tmp_path / "known"
    alone = f"UserKnownHostsFile {known}\nGlobalKnownHostsFile none"
    known.write_text(f"@cert-authority host* {(tmp_path / 'ca.pub').read_text()}")
    assert launcher.says("host2", f"{alone}\nHostKeyAlias host2") == "host2"
    refused = launcher.refused("host2", f"{alone}\nHostKeyAlias host3")
    assert "its certificate does not count: name is not a listed principal" in refused
    assert " is unknown: host0 is not in known_hosts" in launcher.refused("host0", f"{alone}\nHostKeyAlias host0")
    known.write_text(f"@cert-authority host* {make_key(tmp_path / 'other')}\n")
    assert " is unknown: host2 is not in known_hosts" in launcher.refused("host2", f"{alone}\nHostKeyAlias host2")


@pytest.mark.slow
def test_user_is_let_in_by_a_certificate(ssh_net, launcher, tmp_path):
    (tmp_path / "me.pub").write_text(make_key(tmp_path / "me") + "\n")
    only = tmp_path / "only"
    only.write_text(
        f"HostName {ssh_net.address(0)}\nUser root\nIdentityFile {tmp_path}/me\nIdentityAgent none\n"
        f"UserKnownHostsFile {ssh_net.client}/known_hosts\n"
    )
    sign(tmp_path / "me.pub", "-n", "root")
    assert f"login as root refused: tried {tmp_path}/me" in launcher.refused("host0", config_file=only)
    configure(ssh_net, 0, f"TrustedUserCAKeys {tmp_path}/ca.pub\n")
    assert launcher.says("host0", config_file=only) == "host0"


@pytest.mark.slow
def test_rules_of_ssh_config_are_those_of_ssh(ssh_net, launcher, tmp_path):
    (tmp_path / "more").write_text(
        f'Match originalhost friend exec "test %n = friend"\n HostName {ssh_net.address(0)}\n'
    )
    lists = "Ciphers aes256-gcm@openssh.com\nKexAlgorithms curve25519-sha256\nHostKeyAlgorithms ssh-ed25519\n"
    assert launcher.says("friend", f"Include {tmp_path}/more\nMatch all\n{lists}") == "host0"
    assert "no cipher in common" in launcher.refused("host0", "Ciphers aes128-cbc")
    assert "no host key type in common" in launcher.refused("host0", "HostKeyAlgorithms rsa-sha2-512")
    revoked = tmp_path / "revoked"
    known = (ssh_net.client / "known_hosts").read_text().splitlines()
    revoked.write_text("\n".join(line.partition(" ")[2] for line in known))
    assert f"is revoked ({revoked})" in launcher.refused("host0", f"RevokedHostKeys {revoked}")


@pytest.mark.slow
def test_connection_that_a_user_has_opened_is_shared(ssh_net, launcher, tmp_path):
    text = f"Host host0\n ControlPath {tmp_path}/master\n"
    launcher.connector(text)
    words = ["ssh", "-F", launcher.config, "-N", "-f", "-M", "host0"]
    subprocess.run([*ssh_net.prefix(ssh_net.control), *map(str, words)], check=True, timeout=60)
    logins = ssh_net.server_log(0).count("Accepted publickey")
    try:
        assert launcher.says("host0", text, "hostname") == "host0"
        assert ssh_net.server_log(0).count("Accepted publickey") == logins
    finally:
        subprocess.run(
            ["ssh", "-F", launcher.config, "-O", "exit", "host0"], check=True, capture_output=True, timeout=60
        )


def test_host_is_reached_by_alias_address_port_and_user(ssh_net, launcher):
    pipe = launcher.open("host0")
    pipe.write(b"over and back")
    assert (read(pipe), pipe.address) == (b"over and back", ssh_net.address(0))
    assert launcher.says(ssh_net.address(0)) == "host0"
    assert launcher.says("friend", f"Host friend\n HostName {ssh_net.address(0)}") == "host0"
    assert "connection refused" in launcher.refused("host1", "Host host1\n Port 22")
    assert launcher.says("host1", host_keys="off") == "host1"
    if ssh_net.has_ipv6:
        assert launcher.says(ssh_net.address6(0)) == "host0"
    read(launcher.open("nobody@host0", command="id"))
    assert "Accepted publickey for nobody" in ssh_net.server_log(0)


@pytest.mark.slow
def test_jump_hosts_lead_to_the_next(ssh_net, launcher):
    known = (ssh_net.client / "known_hosts").read_text()
    (launcher.folder / "known").write_text(
        known + known.replace("host1,", f"[host1]:2222,[{ssh_net.address(1)}]:2222,")
    )
    text = f"Host host*\n UserKnownHostsFile {launcher.folder}/known\nHost host2\n ProxyJump host0,host1\nHost b*\n"
    text += f" ProxyJump host0\n HostName {ssh_net.address(2)}\n HostKeyAlias host2"
    assert launcher.says("b1", text, "echo $SSH_CLIENT").split()[0] == ssh_net.address(0)
    connector = launcher.connector(text)
    with ThreadPoolExecutor(4) as pool:
        pipes = list(pool.map(lambda name: launcher.open_with(connector, name), ("b1", "b2", "b3", "host2")))
    for pipe in pipes:
        data = os.urandom(100_000)
        threading.Thread(target=write_all, args=(pipe, data)).start()
        got = b""
        while len(got) < len(data):
            got += read(pipe)
        assert got == data and pipe.address == ""
    connector.close()
    assert [read(pipe) for pipe in pipes] == [b""] * 4
    assert launcher.says("host2", text, "echo $SSH_CLIENT").split()[0] == ssh_net.address(1)


@pytest.mark.slow
def test_one_server_lets_in_as_many_as_come(ssh_net, launcher):
    """MaxStartups 10:30:100 drops those that come together."""
    connector = launcher.connector(f"Host many*\n HostName {ssh_net.address(0)}")
    with ThreadPoolExecutor(32) as pool:
        pipes = list(pool.map(lambda index: launcher.open_with(connector, f"many{index}"), range(65)))
    for index, pipe in enumerate(pipes):
        pipe.write(b"%d" % index)
    assert [read(pipe) for pipe in pipes] == [b"%d" % index for index in range(len(pipes))]


@pytest.mark.slow
def test_stopped_session_holds_up_nobody_who_closes_the_pipe(ssh_net, launcher):
    pipe = launcher.open("host0")
    pipe.write(b"is it there?")
    assert read(pipe) == b"is it there?"  # the command is not sshd any more, as it is before its exec
    sessions = ssh_net.sessions(0)
    for pid in sessions:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert sum(iter(lambda: pipe.write(bytes(1 << 16)), 0)) > 0, "until there is no more room"
        assert pipe.read() is None
    finally:
        pipe.close()
    assert read(pipe) == b""
    with pytest.raises(OSError):
        pipe.write(b"x")
    assert pipe.exit_status is None
    for pid in sessions:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_wrong_key_of_one_host_starts_nothing_on_any(fleet, tmp_path):
    known = (fleet.net.client / "known_hosts").read_text().splitlines()
    (tmp_path / "known").write_text(f"{known[0]}\n{known[2].split()[0]} {make_key(tmp_path / 'other')}\n")
    (tmp_path / "config").write_text(f"UserKnownHostsFile {tmp_path}/known\nInclude {fleet.net.client}/config\n")
    done = fleet.run("host0:1,host2:1", "--ssh_config=config", WORKERS / "wait.py")
    assert done.code == 3
    assert done.errors[0].startswith(f"msrun: error: host2 ({fleet.net.address(2)}): HOST KEY HAS CHANGED")
    assert not list(tmp_path.glob("ready_*"))
