"""From the name of a host to how it is reached: tables of ssh_config, and names that a shell would read."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.launch.transport.ssh.client_config import ClientConfig
from msrun.launch.transport.ssh.target import SshTarget
from msrun.planning.spec import SshSettings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


def resolve(home: Path, text: str, name: str = "h1", settings: SshSettings | None = None, **given: object) -> SshTarget:
    path = home / "config"
    path.write_text(text)
    return ClientConfig(settings or SshSettings(config_file=path)).resolve(name, **given)  # type: ignore[arg-type]


def test_without_any_config_a_host_is_what_its_name_says(home: Path) -> None:
    target = ClientConfig(SshSettings(config_file=Path("none"))).resolve("h1")
    assert (target.host_name, target.user, target.port, target.label) == ("h1", getpass.getuser(), 22, "h1")
    assert target.identity_files == tuple(home / ".ssh" / name for name in ("id_rsa", "id_ecdsa", "id_ed25519"))
    assert target.named_identity_files == frozenset()
    assert target.known_hosts_files[0] == home / ".ssh" / "known_hosts"
    assert (target.host_keys, target.via, target.proxy_command, target.agent_socket) == ("strict", None, "", "")
    assert target.min_rsa_bits == 1024


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("Host h1\n HostName 10.0.0.7", "host_name", "10.0.0.7"),
        ("Host h*\n HostName %h.example", "host_name", "h1.example"),
        ("Host H1\n User me", "user", "me"),
        ("Host h1\n User me\nHost *\n User you", "user", "me"),
        ("Host * !h1\n User you\nHost h1\n User me", "user", "me"),
        ("Host h? g1\n Port 2222", "port", 2222),
        ("User=me\nHost g1\nUser you", "user", "me"),
        ('Host "h1"\n  User "me"  # not "you"', "user", "me"),
        ("Match host h1\n User me", "user", "me"),
        ("HostName 10.0.0.7\nMatch host 10.0.0.*\n User me", "user", "me"),
        ("HostName 10.0.0.7\nMatch originalhost h1 user me\n Port 7\nMatch originalhost h1\n User you", "user", "you"),
        ("Match !host h1\n User you\nMatch all\n User me", "user", "me"),
        ('Match exec "test %h = h1"\n User me', "user", "me"),
        ('Match exec "test A%h = Ah1"\n User me', "user", "me"),
        ("Match EXEC=true\n User me", "user", "me"),
        ("Match exec false\n User you\nMatch all\n User me", "user", "me"),
        ("HostName g7\nMatch final host g7\n User me", "user", "me"),
        ("Match localuser nobody-at-all\n User you\nHost *\n User me", "user", "me"),
        ("IdentitiesOnly yes", "identities_only", True),
        ("ConnectTimeout 1m", "tcp_time_out_s", 60.0),
        ("StrictHostKeyChecking ask", "host_keys", "strict"),
        ("StrictHostKeyChecking accept-new", "host_keys", "accept-new"),
        ("StrictHostKeyChecking no", "host_keys", "off"),
        ("Port 2222", "host_key_name", "[h1]:2222"),
        ("Port 2222", "plain_host_key_name", "h1"),
        ("Port 2222\nHostKeyAlias cluster", "host_key_name", "cluster"),
        ("HostName G1", "host_key_name", "g1"),
        ("HashKnownHosts yes", "hash_known_hosts", True),
        ("UserKnownHostsFile /a /b", "known_hosts_files", (Path("/a"), Path("/b"))),
        ("GlobalKnownHostsFile none", "global_known_hosts_files", ()),
        ("ProxyCommand nc -X 5 %h %p # %% %r", "proxy_command", f"nc -X 5 h1 22 # % {getpass.getuser()}"),
        ("ProxyCommand none", "proxy_command", ""),
        ("ProxyCommand nc %h %p\nProxyJump g1", "proxy_command", "nc h1 22"),
        ("IdentityAgent none", "agent_socket", ""),
        ("IdentityAgent /run/%u.sock", "agent_socket", f"/run/{getpass.getuser()}.sock"),
        ("BatchMode yes", "may_prompt", False),
        ("AddressFamily inet6", "address_family", "inet6"),
        ("RevokedHostKeys /etc/%u", "revoked_host_keys", Path(f"/etc/{getpass.getuser()}")),
        ("RevokedHostKeys none", "revoked_host_keys", None),
        ("Ciphers a,b\nMACs +c", "algorithms", (("ciphers", "a,b"), ("macs", "+c"))),
        ("PubkeyAcceptedKeyTypes d", "algorithms", (("pubkeyacceptedalgorithms", "d"),)),
        ("RequiredRSASize 3072", "min_rsa_bits", 3072),
    ],
)
def test_keywords_mean_what_they_mean_to_ssh(home: Path, text: str, field: str, value: object) -> None:
    assert getattr(resolve(home, text), field) == value


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh to compare with")
@settings(max_examples=12)
@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(["Host h1", "Host h* !h2", "Host g1 h1", "Match host 10.0.0.1", "Match originalhost h1"]),
            st.sampled_from(["User a", "User b", "Port 7", "Port 8", "HostName 10.0.0.1", "ConnectTimeout 9"]),
        ),
        max_size=5,
    ),
    name=st.sampled_from(["h1", "h2", "g1"]),
)
def test_any_mix_of_parts_is_read_as_ssh_reads_it(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, str]], name: str
) -> None:
    path = tmp_path_factory.mktemp("config") / "config"
    path.write_text("\n".join(f"{part}\n  {line}" for part, line in parts))
    shown = subprocess.run(["ssh", "-G", "-F", path, name], capture_output=True, text=True, timeout=60, check=True)
    wanted = dict(line.partition(" ")[::2] for line in shown.stdout.splitlines())
    target = ClientConfig(SshSettings(config_file=path)).resolve(name)
    assert (target.host_name, target.user, str(target.port)) == (wanted["hostname"], wanted["user"], wanted["port"])


def bad_config(path: Path, *, wanted: bool = False) -> str:
    settings = SshSettings(config_file=path) if wanted else SshSettings()
    with pytest.raises(UsageError) as raised:
        ClientConfig(settings).resolve("h1")
    return str(raised.value)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_file_that_others_may_write_is_refused_before_anything_of_it_runs(home: Path, mode: int) -> None:
    ran = home / "ran"
    path = home / ".ssh" / "config"
    path.write_text(f"Match exec 'touch {ran}'\n User me\n")
    path.chmod(mode)
    assert f"{path}: bad permissions of an ssh_config (0{mode:o})" in bad_config(path)
    assert "bad permissions" in bad_config(path, wanted=True)
    path.write_text("Include other\n")
    path.chmod(0o600)
    other = home / ".ssh" / "other"
    other.write_text(f"Match exec 'touch {ran}'\n")
    other.chmod(mode)
    assert f"{other}: bad permissions" in bad_config(path)
    assert not ran.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_refused(home: Path) -> None:
    path = home / ".ssh" / "config"
    path.write_text("User me\n")
    os.chown(path, 12345, 12345)
    assert f"{path}: bad owner of an ssh_config (user 12345)" in bad_config(path)


def test_keyword_that_is_not_known_is_named_and_one_that_cannot_be_left_out_is_refused(home: Path) -> None:
    path = home / "config"
    path.write_text(
        "VerifyHostKeyDNS yes\nBindAddress 10.0.0.1\nRekeyLimit none\nCertificateFile /c\nCompression yes\n"
    )
    config = ClientConfig(SshSettings(config_file=path))
    config.resolve("h1")
    assert config.ignored == {"BindAddress", "CertificateFile", "VerifyHostKeyDNS"}
    path.write_text("ProxyCommand nc %h %p\nProxyUseFdpass yes\n")
    assert "ProxyUseFdpass yes: not supported" in bad_config(path, wanted=True)
    path.write_text("RequiredRSASize many\n")
    assert "RequiredRSASize many" in bad_config(path, wanted=True)


def test_identity_files_add_up_and_those_of_the_command_line_come_first(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS", "/keys")
    path = home / "config"
    path.write_text("Host h1\n IdentityFile ~/%n\nHost *\n IdentityFile ${KEYS}/%L\n IdentityFile ~/h1\n")
    settings = SshSettings(config_file=path, identity_files=(Path("/first"),))
    target = ClientConfig(settings).resolve("h1")
    host = socket.gethostname().partition(".")[0]
    assert target.identity_files == (Path("/first"), home / "h1", Path(f"/keys/{host}"))
    assert target.named_identity_files == frozenset(target.identity_files)


def test_host_list_wins_over_options_and_these_over_the_file(home: Path) -> None:
    path = home / "config"
    text = "User c\nPort 3\nStrictHostKeyChecking no"
    options = SshSettings(config_file=path, user="b", port=2, host_keys="strict")
    target = resolve(home, text, settings=options)
    assert (target.user, target.port, target.host_keys) == ("b", 2, "strict")
    target = resolve(home, text, settings=options, user="a", port=1)
    assert (target.user, target.port) == ("a", 1)


def test_files_of_the_user_and_of_the_system_are_read_with_what_they_include(home: Path) -> None:
    folder = home / ".ssh"
    (folder / "config").write_text("Host h1\n  Include conf.d/*.conf\n  Port 7\nHost *\n  User last\n")
    (folder / "conf.d").mkdir()
    (folder / "conf.d" / "1.conf").write_text("User first\nHost g1\n  HostName never\n")
    (folder / "conf.d" / "2.conf").write_text("HostName 10.0.0.7\n")
    config = ClientConfig(SshSettings())
    target = config.resolve("h1")
    assert (target.host_name, target.user, target.port) == ("10.0.0.7", "first", 7)
    target = config.resolve("h2")
    assert (target.host_name, target.user, target.port) == ("h2", "last", 22)


def test_jump_hosts_are_resolved_by_the_same_file(home: Path) -> None:
    text = """
Host h1
  ProxyJump gate
Host gate
  HostName 10.0.0.1
  User keeper
  ProxyJump ssh://me@outer:2222
Host outer
  HostName 192.0.2.1
  User nobody
"""
    gate = resolve(home, text).via
    assert gate is not None and (gate.host_name, gate.user, gate.port) == ("10.0.0.1", "keeper", 22)
    outer = gate.via
    assert outer is not None and (outer.host_name, outer.user, outer.port) == ("192.0.2.1", "me", 2222)
    assert outer.via is None


def test_list_of_jump_hosts_is_the_whole_way(home: Path) -> None:
    target = resolve(home, "Host h1\n ProxyJump a,b@[fd77::1]:7\nHost fd77*\n ProxyJump never")
    assert target.via is not None and (target.via.name, target.via.user, target.via.port) == ("fd77::1", "b", 7)
    assert target.via.via is not None and target.via.via.name == "a" and target.via.via.via is None


def test_way_may_lead_over_eight_jump_hosts_and_not_over_nine(home: Path) -> None:
    hops = "\n".join(f"Host h{number}\n ProxyJump h{number + 1}" for number in range(2, 9))
    target = resolve(home, f"Host h1\n ProxyJump h2\n{hops}")
    names = []
    while target.via is not None:
        target = target.via
        names.append(target.name)
    assert names == [f"h{number}" for number in range(2, 10)]
    with pytest.raises(UsageError, match="h10: more than 8 jump hosts"):
        resolve(home, f"Host h1\n ProxyJump h2\n{hops}\nHost h9\n ProxyJump h10")


def test_given_user_port_and_key_policy_are_for_hosts_the_policy_for_jump_hosts_too(home: Path) -> None:
    path = home / "config"
    path.write_text("Host h1\n ProxyJump gate\nHost gate\n User keeper")
    settings = SshSettings(config_file=path, user="me", port=7, host_keys="accept-new")
    target = ClientConfig(settings).resolve("h1")
    assert target.via is not None
    assert (target.via.user, target.via.port, target.via.host_keys) == ("keeper", 22, "accept-new")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Host h1\n HostName -oProxyCommand=x", "starts with '-'"),
        ("Host h1\n HostName a$(id)", "shell text"),
        ("User a;b", "shell text"),
        ("Port abc", "Port abc: must be 1 to 65535"),
        ("ConnectTimeout soon", "ConnectTimeout soon"),
        ("Nothing", "line 1: 'Nothing' has no value"),
        ('User "me', "line 1: a quote does not close"),
        ("Match version 7\n User me", "line 1: Match version: msrun knows"),
        ("IdentityFile %Z", "%Z is not known here"),
        ("IdentityFile ${NOT_SET_ANYWHERE}/x", "NOT_SET_ANYWHERE is not set"),
        ("ProxyJump a:b:c", "write [user@]host[:port]"),
        ("ProxyJump h1", "is there a loop?"),
        ("Include /proc/self/mem", "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_named_with_its_place(home: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(home, text)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "`id`", "a\nb", "$HOME"])
def test_names_that_a_shell_would_read_are_refused_here_too(home: Path, name: str) -> None:
    with pytest.raises(UsageError, match="starts with '-' or holds shell text"):
        resolve(home, "", name)


def test_absent_file_of_the_command_line_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone: cannot be read"):
        ClientConfig(SshSettings(config_file=tmp_path / "gone")).resolve("h1")
