"""Which keys a login tries and in which order: files, passphrases, certificates, and a real ssh-agent."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ssh_server import add_key, running_agent

from msrun.launch.transport.ssh import key_ring, paramiko_names
from msrun.launch.transport.ssh.key_ring import KeyRing, parse_public_key, read_key_file
from msrun.launch.transport.ssh.paramiko_names import paramiko
from msrun.launch.transport.ssh.target import SshTarget

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen to make keys with")


def make(path: Path, passphrase: str = "", kind: str = "ed25519", *more: str) -> Path:
    words = ["-q", "-a", "1", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path), *more]
    words += ["-b", "1024"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", *words], check=True, capture_output=True, timeout=60)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A key without a passphrase, `plain`, and one with, `locked`."""
    make(tmp_path / "plain")
    make(tmp_path / "locked", "open sesame")
    return tmp_path


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """The socket of an empty ssh-agent."""
    with running_agent(tmp_path / "agent") as path:
        yield str(path)


def target(*named: Path, agent: str = "", others: tuple[Path, ...] = (), **more: Any) -> SshTarget:
    return SshTarget(
        "h1",
        "h1",
        "me",
        identity_files=(*named, *others),
        named_identity_files=frozenset(named),
        agent_socket=agent,
        **more,
    )


def labels(ring: KeyRing, wanted: SshTarget) -> tuple[list[str], list[str]]:
    with ring.identities(wanted) as found:
        return [identity.label.replace("(in ssh-agent)", "@") for identity in found.keys], found.left_out


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize("form", [(), ("-m", "PEM")])
def test_what_a_file_shows_of_its_key_without_the_passphrase(tmp_path: Path, kind: str, form: tuple[str, ...]) -> None:
    for name, passphrase in (("open", ""), ("locked", "secret")):
        file = read_key_file(make(tmp_path / name, passphrase, kind, *form))
        assert (file.is_encrypted, file.is_private, file.problem) == (bool(passphrase), True, "")
        assert file.public == parse_public_key((tmp_path / f"{name}.pub").read_text()) != b""
        assert read_key_file(tmp_path / f"{name}.pub").is_private is False


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        (b"", "is no private key"),
        (b"ssh-ed25519 AAAA broken", "is no private key"),
        (b"\xff\xfe\x00" * 99, "is no private key"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----", "is damaged"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn?\n-----END OPENSSH PRIVATE KEY-----", "is damaged"),
    ],
)
def test_file_that_is_no_key_says_why(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    assert read_key_file(tmp_path / "key").problem == problem


def test_key_of_another_version_of_the_format_is_damaged(folder: Path) -> None:
    begin, *lines, end = (folder / "plain").read_text().splitlines()
    newer = base64.b64decode("".join(lines)).replace(b"openssh-key-v1", b"openssh-key-v9")
    (folder / "newer").write_text("\n".join([begin, base64.b64encode(newer).decode(), end]))
    assert read_key_file(folder / "newer").problem == "is damaged"


def test_key_whose_private_part_is_damaged_is_left_out_and_named(folder: Path) -> None:
    begin, *lines, end = (folder / "plain").read_text().splitlines()
    short = base64.b64encode(base64.b64decode("".join(lines))[:-9]).decode()
    (folder / "short").write_text("\n".join([begin, short, end, ""]))
    tried, left_out = labels(KeyRing(), target(folder / "short"))
    assert tried == [] and [text.partition(" (")[0] for text in left_out] == [f"{folder}/short: cannot be used"]


def test_files_come_in_their_order_and_those_that_were_named_are_accounted_for(folder: Path) -> None:
    make(folder / "usual")
    (folder / "junk").write_text("junk")
    wanted = target(folder / "junk", folder / "locked", folder / "plain", others=(folder / "usual", folder / "absent"))
    tried, left_out = labels(KeyRing(), wanted)
    assert tried == [f"{folder}/plain", f"{folder}/usual"]
    assert left_out == [
        f"{folder}/junk: is no private key",
        f"{folder}/locked: has a passphrase; ssh-add {folder}/locked",
    ]


def test_named_keys_come_before_those_that_the_agent_has_beside(folder: Path, agent: str) -> None:
    for name in ("extra", "usual"):
        add_key(Path(agent), make(folder / name))
    wanted = target(folder / "plain", agent=agent, others=(folder / "usual",))
    assert labels(KeyRing(), wanted)[0] == [f"{folder}/plain", f"{folder}/usual @", "extra @"]
    only = target(folder / "plain", agent=agent, others=(folder / "usual",), identities_only=True)
    assert labels(KeyRing(), only)[0] == [f"{folder}/plain", f"{folder}/usual @"]


def test_agent_signs_for_a_file_that_is_locked_or_has_the_public_key_only(folder: Path, agent: str) -> None:
    add_key(Path(agent), folder / "plain")
    shutil.move(folder / "plain", folder / "hidden")
    ring = KeyRing()
    wanted = target(folder / "plain.pub", agent=agent)
    assert labels(ring, wanted) == ([f"{folder}/plain.pub @"], [])
    with ring.identities(wanted) as found:
        signature = found.keys[0].key.sign_ssh_data(b"data")
        public = found.keys[0].key.inner_key
    assert public.verify_ssh_sig(b"data", paramiko.Message(signature))
    assert labels(ring, target(folder / "plain.pub")) == (
        [],
        [f"{folder}/plain.pub: is a public key that ssh-agent does not have"],
    )


def test_agent_is_left_after_the_login_also_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []

    class Agent:
        def __init__(self, path: str) -> None:
            held.append(path)

        def get_keys(self) -> tuple[()]:
            return ()

        def close(self) -> None:
            held.clear()

    monkeypatch.setattr(key_ring, "Agent", Agent)
    with KeyRing().identities(target(agent="/agent")):
        assert held == ["/agent"]
    assert held == []
    with pytest.raises(ValueError, match="refused"), KeyRing().identities(target(agent="/agent")):
        assert held == ["/agent"]
        raise ValueError("refused")
    assert held == []


@pytest.mark.parametrize("is_silent", [True, False])
def test_agent_that_is_silent_or_absent_is_given_up_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    monkeypatch.setattr(paramiko_names, "AGENT_TIME_OUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        if is_silent:
            listener.listen()
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises((OSError, paramiko.SSHException)) as raised:
            paramiko_names.Agent(str(tmp_path / "s"))
        del raised
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_absent_agent_is_none(folder: Path) -> None:
    assert labels(KeyRing(), target(folder / "plain", agent=str(folder / "gone"))) == ([f"{folder}/plain"], [])


def test_passphrase_is_asked_for_once_before_and_never_later(folder: Path) -> None:
    ring = KeyRing()
    asked: list[str] = []
    answers = iter(["wrong", "open sesame"])

    def ask(what: str) -> str:
        asked.append(what)
        return next(answers)

    wanted = target(folder / "locked")
    ring.unlock([wanted, wanted, target(folder / "locked", folder / "plain")], ask)
    assert asked == [f"passphrase of {folder}/locked"] * 2
    assert labels(ring, wanted) == ([f"{folder}/locked"], [])


def test_nobody_is_asked_without_a_terminal_in_batch_mode_or_for_what_is_not_needed(folder: Path) -> None:
    def ask(what: str) -> str:
        raise AssertionError(what)

    KeyRing().unlock([target(folder / "locked")], None)
    KeyRing().unlock([target(folder / "locked", may_prompt=False)], ask)
    KeyRing().unlock([target(folder / "plain", others=(folder / "locked",))], ask)


def test_key_in_the_agent_needs_no_passphrase(folder: Path, agent: str) -> None:
    shutil.copy(folder / "plain", folder / "same")
    subprocess.run(
        ["ssh-keygen", "-q", "-a", "1", "-p", "-N", "secret", "-f", folder / "same"], check=True, capture_output=True
    )
    add_key(Path(agent), folder / "plain")

    def ask(what: str) -> str:
        raise AssertionError(what)

    KeyRing().unlock([target(folder / "same", agent=agent)], ask)


def test_passphrase_that_is_not_given_leaves_the_key_out(folder: Path) -> None:
    ring = KeyRing()
    ring.unlock([target(folder / "locked")], lambda _: "")
    assert labels(ring, target(folder / "locked")) == ([], [f"{folder}/locked: its passphrase was not given"])


def test_certificate_beside_a_key_is_tried_before_the_key_alone(folder: Path) -> None:
    make(folder / "authority")
    words = ["ssh-keygen", "-q", "-s", folder / "authority", "-I", "me", "-n", "me", folder / "plain.pub"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    with KeyRing().identities(target(folder / "plain")) as found:
        first, second = (identity.key for identity in found.keys)
    assert first.public_blob.key_type == "ssh-ed25519-cert-v01@openssh.com" and second.public_blob is None


def public_key(kind: str, named: str, length: int | None = None) -> str:
    """Return the line of a .pub file whose blob says `named`, in a text of so many bytes."""
    blob = struct.pack(">I", len(named) if length is None else length) + named.encode() + b"key"
    return f"{kind} {base64.b64encode(blob).decode()} me@here"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ssh-ed25519",
        "ssh-ed25519 !!!",
        public_key("ssh-ed25519", "ssh-rsa"),
        public_key("ssh-ed25519", "ssh-ed25519", length=7),
        public_key("ssh", "ssh-ed25519"),
    ],
)
def test_text_that_is_no_public_key_gives_none(text: str) -> None:
    assert parse_public_key(text) == b""


def test_public_key_is_what_stands_between_its_kind_and_its_comment() -> None:
    assert parse_public_key(public_key("ssh-ed25519", "ssh-ed25519")).endswith(b"ssh-ed25519key")
