"""Files of known_hosts: which host keys a name may have, and new ones written to them. Format: sshd(8)."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ranktable.files import read_at_most

MAX_FILE_BYTES = 64 << 20
SALT_BYTES = 20
"""As long as a digest of SHA-1, which the format has."""
_SPECIAL = re.compile(r"[*?]")


@dataclass(frozen=True)
class HostKey:
    """A public key."""

    kind: str
    """ssh-ed25519, ssh-rsa and so on."""
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The key as people compare it."""
        digest = base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")
        return f"{_SHORT_KINDS.get(self.kind, self.kind)} SHA256:{digest}"


_SHORT_KINDS = {
    "ssh-ed25519": "ED25519",
    "ssh-rsa": "RSA",
    "ecdsa-sha2-nistp256": "ECDSA",
    "ecdsa-sha2-nistp384": "ECDSA",
    "ecdsa-sha2-nistp521": "ECDSA",
}


@dataclass(frozen=True)
class KnownKey:
    """A line of a file."""

    names: str
    """Patterns with commas between them, or one hashed name."""
    key: HostKey
    is_revoked: bool
    place: str
    """File and line."""
    path: Path
    is_authority: bool = False
    """The key is none of a host's: it signs certificates of hosts."""

    def is_of(self, name: str) -> bool:
        """Return whether the line speaks of this host; by patterns and hashes as ssh has them."""
        if self.names.startswith("|"):
            return _matches_hash(self.names, name)
        found = False
        for pattern in self.names.lower().split(","):
            bare = pattern.removeprefix("!")
            if bare == name or (_SPECIAL.search(bare) and _as_pattern(bare).match(name)):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def _as_pattern(text: str) -> re.Pattern[str]:
    letters = {"*": ".*", "?": "."}
    return re.compile("".join(letters.get(letter, re.escape(letter)) for letter in text) + r"\Z")


def _matches_hash(hashed: str, name: str) -> bool:
    parts = hashed.split("|")  # "", "1", salt, digest
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in parts[2:])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def hash_name(name: str) -> str:
    """Return a name as HashKnownHosts has it."""
    salt = os.urandom(SALT_BYTES)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def parse_known_hosts(text: str, path: Path) -> Iterator[KnownKey]:
    """Yield what can be understood; as ssh does, lines that cannot are passed over."""
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if marker not in ("", "@revoked", "@cert-authority"):
            continue
        if len(words) < 3 or words[0].startswith("#"):
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except ValueError:
            continue
        is_authority = marker == "@cert-authority"
        yield KnownKey(words[0], HostKey(words[1], blob), marker == "@revoked", f"{path}:{number}", path, is_authority)


def read_revoked_keys(path: Path) -> frozenset[bytes]:
    """Return the keys of a file of RevokedHostKeys, one to a line.

    Raises:
        OSError: it cannot be read.
        ValueError: it is a key revocation list (KRL), which is not understood, or a line is no key.
    """
    data = read_at_most(path, MAX_FILE_BYTES)
    if data.startswith(b"SSHKRL"):
        raise ValueError("is a KRL, which msrun cannot read; give public keys, one to a line")
    found = set()
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            found.add(base64.b64decode(words[1], validate=True))
        except (IndexError, ValueError):
            raise ValueError(
                f"line {number} is no public key; give one to a line, such as ssh-ed25519 AAAA..."
            ) from None
    return frozenset(found)


class KnownHosts:
    """The lines of some files, read once; thread-safe but for `add`, which the caller has to guard."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the files that are there.

        Raises:
            OSError: one is there but cannot be read.
        """
        self._known = [known for path in paths for known in parse_known_hosts(_read(path), path)]
        self._found: dict[str, list[KnownKey]] = {}

    def find(self, name: str) -> list[KnownKey]:
        """Return the lines of a host; none for an empty name."""
        if name not in self._found:  # a large file of hashed names takes its time
            self._found[name] = [known for known in self._known if name and known.is_of(name)]
        return self._found[name]

    def add(self, path: Path, name: str, key: HostKey, *, is_hashed: bool) -> list[KnownKey]:
        """Write a key to a file and return nothing, or, when another process was first, what that has written.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read(MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
            found = [known for known in parse_known_hosts(text, path) if known.is_of(name)]
            others = [known for known in found if not known.is_authority]
            if others:
                self._known += others
                self._found.clear()
                return others
            words = f"{hash_name(name) if is_hashed else name} {key.kind} {base64.b64encode(key.blob).decode()}\n"
            file.write((("\n" if text and not text.endswith("\n") else "") + words).encode())
            file.flush()
        self._known.append(KnownKey(name, key, is_revoked=False, place=str(path), path=path))
        self._found.clear()
        return []


def _read(path: Path) -> str:
    try:
        return read_at_most(path, MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return ""
