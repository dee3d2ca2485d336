"""KeyFile: what can be seen of a private key without its passphrase.

Source of the format: OpenSSH's PROTOCOL.key. A file of it has the public key in the clear, so a key of the agent can be
matched with its file; of a PEM file that is encrypted only the .pub beside it tells.
"""

from __future__ import annotations

import base64
import re
import struct
from dataclasses import dataclass
from pathlib import Path

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
