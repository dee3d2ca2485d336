"""KeyRing: the keys that a login tries, from the agent and from files, the likelier ones first."""

from __future__ import annotations

import base64
import contextlib
import copy
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msrun.launch.transport.ssh.paramiko_names import Agent, paramiko
from msrun.launch.transport.ssh.target import SshTarget
from ranktable.files import read_at_most

MAX_FILE_BYTES = 1 << 20
_MAGIC = b"openssh-key-v1\0"
_OPENSSH = re.compile(r"-----BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END OPENSSH PRIVATE KEY-----", re.DOTALL)


@dataclass(frozen=True)
class KeyFile:
    """A file that was named, or is looked for, as a private key."""

    path: Path
    public: bytes = b""
    """The public key; empty when it is not known."""
    is_encrypted: bool = False
    is_private: bool = True
    """False for a file with the public key only; the agent has the private one."""
    problem: str = ""
    """Why the file is of no use; empty = it is."""


def read_key_file(path: Path) -> KeyFile:
    """Return what a file says of its key; what is wrong with it is in `problem`."""
    try:
        text = _read(path)
    except OSError as error:
        return KeyFile(path, problem=error.strerror or "cannot be read")
    public = parse_public_key(text)
    if public:
        return KeyFile(path, public, is_private=False)
    match = _OPENSSH.search(text)
    if match:
        try:
            encrypted, public = _parse_openssh(base64.b64decode("".join(match[1].split()), validate=True))
        except (struct.error, ValueError):
            return KeyFile(path, problem="is damaged")
        return KeyFile(path, public, encrypted)
    if "PRIVATE KEY-----" not in text:
        return KeyFile(path, problem="is no private key")
    try:
        public = parse_public_key(_read(path.with_name(path.name + ".pub")))
    except OSError:
        public = b""
    return KeyFile(path, public, "ENCRYPTED" in text)


def _read(path: Path) -> str:
    return read_at_most(path, MAX_FILE_BYTES).decode("ascii", "replace")


def parse_public_key(text: str) -> bytes:
    """Return the key of a .pub file; empty when it is none."""
    words = text.split()
    if len(words) < 2:
        return b""
    try:
        blob = base64.b64decode(words[1], validate=True)
    except ValueError:
        return b""
    kind = words[0].encode()
    return blob if blob[4 : 4 + len(kind)] == kind and blob[:4] == struct.pack(">I", len(kind)) else b""


def _parse_openssh(data: bytes) -> tuple[bool, bytes]:
    """Return whether the key is encrypted, and its public part.

    Raises:
        ValueError, struct.error: not of this format.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("magic")
    cipher, at = _string(data, len(_MAGIC))
    _, at = _string(data, at)  # name of the function that makes a key of the passphrase
    _, at = _string(data, at)  # its options
    (count,) = struct.unpack_from(">I", data, at)
    public, _ = _string(data, at + 4)
    if count != 1:
        raise ValueError("number of keys")
    return cipher != b"none", public


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from(">I", data, at)
    end = at + 4 + size
    if end > len(data):
        raise ValueError("length")
    return data[at + 4 : end], end


Ask = Callable[[str], str]
"""Asks for what is named, and returns what was typed, unseen."""
MAX_ASKED = 3
_BROKEN = (OSError, ValueError, TypeError, EOFError, paramiko.SSHException, paramiko.pkey.UnknownKeyType)
"""What a file or an agent that is not as it should be raises."""


@dataclass(frozen=True)
class Identity:
    """A key to be tried."""

    label: str
    key: Any


@dataclass
class Identities:
    """The keys for one login, and why others are not among them."""

    keys: list[Identity] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class KeyRing:
    """Keys of files, read and unlocked once for all connections; thread-safe."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._lock = threading.Lock()
        self._files: dict[Path, KeyFile] = {}
        self._loaded: dict[Path, list[Any]] = {}
        self._problems: dict[Path, str] = {}

    def unlock(self, targets: Iterable[SshTarget], ask: Ask | None) -> None:
        """Ask for the passphrases that logins on these hosts need, each once; nobody is asked later.

        One is needed where the file was asked for, or no other key is there, and the agent does not have the key.
        """
        for target in targets:
            if ask is None or not target.may_prompt:
                continue
            with self.identities(target) as found:
                has_keys = bool(found.keys)
                in_agent = {key.key.asbytes() for key in found.keys}
            for path in target.identity_files:
                file = self._file(path)
                is_wanted = path in target.named_identity_files or not has_keys
                if file.is_encrypted and is_wanted and path not in self._loaded and file.public not in in_agent:
                    self._unlock_one(file, ask)

    def _unlock_one(self, file: KeyFile, ask: Ask) -> None:
        for _ in range(MAX_ASKED):
            passphrase = ask(f"passphrase of {shown(file.path)}")
            if not passphrase:
                break
            if self._load(file, passphrase.encode()):
                return
        self._problems[file.path] = "its passphrase was not given"
        self._loaded[file.path] = []

    @contextlib.contextmanager
    def identities(self, target: SshTarget) -> Iterator[Identities]:
        """Yield the keys for a login; the agent signs as long as the context lasts.

        The order is that of ssh, the agent's keys before those of files, but what somebody named comes first of all: a
        server hangs up after MaxAuthTries keys, and an agent may hold more.
        """
        agent = self._connect_agent(target.agent_socket)
        try:
            yield self._collect(target, list(agent.get_keys()) if agent else [])
        finally:
            if agent:
                agent.close()

    @staticmethod
    def _connect_agent(path: str) -> Agent | None:
        if path:
            with contextlib.suppress(*_BROKEN):
                return Agent(path)
        return None

    def _collect(self, target: SshTarget, agent_keys: list[Any]) -> Identities:
        held = {key.asbytes(): key for key in agent_keys}
        named = Identities()
        in_agent: list[Identity] = []
        others: list[Identity] = []
        for path in target.identity_files:
            with self._lock:
                file = self._file(path)
                keys = [] if file.public in held else [Identity(shown(path), key) for key in self._keys(file)]
                problem = file.problem or self._problems.get(path, "")
            is_named = path in target.named_identity_files
            if file.public in held:
                key = Identity(f"{shown(path)} (in ssh-agent)", held.pop(file.public))
                (named.keys if is_named else in_agent).append(key)
            (named.keys if is_named else others).extend(keys)
            if problem and (is_named or file.is_encrypted):
                named.left_out.append(f"{shown(path)}: {problem}")
        if not target.identities_only:
            in_agent += [Identity(_agent_label(key), key) for key in held.values()]
        return Identities([*named.keys, *in_agent, *others], named.left_out)

    def _file(self, path: Path) -> KeyFile:
        if path not in self._files:
            self._files[path] = read_key_file(path)
        return self._files[path]

    def _keys(self, file: KeyFile) -> list[Any]:
        if file.path not in self._loaded and not file.problem:
            if not file.is_private:
                self._problems[file.path] = "is a public key that ssh-agent does not have"
            elif file.is_encrypted:
                self._problems[file.path] = f"has a passphrase; ssh-add {shown(file.path)}"
            else:
                self._load(file, None)
        return self._loaded.get(file.path, [])

    def _load(self, file: KeyFile, passphrase: bytes | None) -> bool:
        """Read a key, and its certificate where one is beside it, which is tried first."""
        try:
            key = paramiko.PKey.from_path(file.path, passphrase)
        except _BROKEN as error:
            if passphrase is None:
                reason = str(error).partition("\n")[0] or "damaged"
                self._problems[file.path] = f"cannot be used ({reason})"
            return False
        keys = [key]
        if key.public_blob is not None:
            plain = copy.copy(key)
            plain.public_blob = None
            keys.append(plain)
        self._loaded[file.path] = keys
        self._problems.pop(file.path, None)
        return True


def _agent_label(key: Any) -> str:
    return f"{key.comment or key.get_name()} (in ssh-agent)"


def shown(path: Path) -> str:
    """Return a path with ~ for the home directory."""
    home = Path("~").expanduser()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and home != Path("/") else str(path)
