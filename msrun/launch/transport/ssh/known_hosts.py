"""Is this the host that we know? Files of known_hosts, certificates of host keys; strict, accept-new or off."""

from __future__ import annotations

import base64
import fcntl
import fnmatch
import hashlib
import hmac
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

from msrun.launch.transport.ssh.client_config import AUTHORITY_SIGNATURES, choose_algorithms
from msrun.launch.transport.ssh.target import SshFault, SshTarget
from ranktable.files import read_at_most

CERTIFICATE = "-cert-v01@openssh.com"
"""End of the names of such algorithms."""


class BadCertificate(Exception):
    """It does not make the key that of the host; the message says why."""


def read_authority(kind: str, blob: bytes) -> bytes:
    """Return the key of the authority that has signed a certificate.

    Raises:
        BadCertificate: it is none that can be read.
    """
    return _key_blob(_read_certificate(kind, blob).signature_key())


def check_certificate(kind: str, blob: bytes, key: bytes, names: Iterable[str], signatures: Collection[str]) -> None:
    """Let a certificate pass whose authority is trusted for the host.

    Args:
        kind: of the certificate, ssh-ed25519-cert-v01@openssh.com and so on.
        key: with which the server has proved who it is.
        names: of the host, as known_hosts may have them; without the port.
        signatures: by which it may be signed.

    Raises:
        BadCertificate: it is not for this host, not for now, or not what its authority has signed.
    """
    certificate = _read_certificate(kind, blob)
    try:
        certificate.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise BadCertificate("its signature is wrong") from None
    signature = _signature_kind(certificate, blob)
    if signature not in signatures:
        raise BadCertificate(f"its authority has signed it with {signature}")
    now = time.time()
    principals = [name.decode("utf-8", "backslashreplace") for name in certificate.valid_principals]
    if _key_blob(certificate.public_key()) != key:
        raise BadCertificate("it is of another key")
    if certificate.type is not SSHCertificateType.HOST:
        raise BadCertificate("it is a user's, not a host's")
    if certificate.critical_options:
        raise BadCertificate("it has critical options, and none is known for hosts")
    if not certificate.valid_after <= now < certificate.valid_before:
        raise BadCertificate("it is not valid now; see its dates and the clock")
    patterns = [principal.replace("[", "[[]") for principal in principals]
    if not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns):
        raise BadCertificate(f"it is for {', '.join(principals) or 'no host by name'}")


def _read_certificate(kind: str, blob: bytes) -> SSHCertificate:
    try:
        found = load_ssh_public_identity(kind.encode() + b" " + base64.b64encode(blob))
    except (ValueError, UnsupportedAlgorithm):
        raise BadCertificate("it cannot be read") from None
    if not isinstance(found, SSHCertificate):
        raise BadCertificate("it is a plain key")
    return found


def _signature_kind(certificate: SSHCertificate, blob: bytes) -> str:
    authority = certificate.signature_key()
    if not isinstance(authority, RSAPublicKey):
        return authority.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[0].decode()
    before = blob[
        : -((authority.key_size + 7) // 8 + 4)
    ]  # the signature and its length come last, its kind before them
    return next((name for name in ("rsa-sha2-512", "rsa-sha2-256") if before.endswith(name.encode())), "ssh-rsa")


def _key_blob(key: object) -> bytes:
    text = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)  # type: ignore[attr-defined]
    return base64.b64decode(text.split()[1])


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


class HostKeyCheck:
    """Checks keys of servers against known_hosts; one for all connections of a launcher, thread-safe."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn`: told once that keys are not checked, and of changed keys that are let pass."""
        self._warn = warn
        self._lock = threading.Lock()
        self._files: dict[tuple[Path, ...], KnownHosts] = {}
        self._revoked: dict[Path, frozenset[bytes]] = {}
        self._has_warned = False

    def known_kinds(self, target: SshTarget) -> list[str]:
        """Return which kinds of key are known of a host, so that the server is asked for one of them.

        Raises:
            SshFault: a file cannot be read.
        """
        with self._lock:
            found = self._find(target)
        return list(dict.fromkeys(known.key.kind for known in found if not known.is_revoked and not known.is_authority))

    def has_authority(self, target: SshTarget) -> bool:
        """Return whether a certificate would make a host known."""
        with self._lock:
            return any(known.is_authority for known in self._find(target))

    def check(self, target: SshTarget, key: HostKey, certificate: HostKey | None = None) -> None:
        """Let a server pass, or refuse it.

        Args:
            certificate: of this key, if the server has shown one.

        Raises:
            SshFault: its key is unknown, another than known, or revoked.
        """
        with self._lock:
            lines = self._find(target)
            found = [known for known in self._known(target).find(target.host_key_name) if not known.is_authority]
            same = [known for known in lines if known.key == key and not known.is_authority]
            self._refuse_revoked(target, key, lines)
            good = [known for known in found if not known.is_revoked]
            if any(known in good for known in same) or (same and not good):
                return
            doubt = self._doubt(target, key, certificate, lines) if certificate else "it has no certificate"
            if not doubt:
                return
            if target.host_keys == "off":
                self._let_pass(target, key, good)
            elif good:
                raise _changed(target, key, good)
            elif target.host_keys == "accept-new":
                self._accept(target, key)
            elif any(known.is_authority for known in lines):
                raise SshFault(f"host key {key.fingerprint} is not let pass by an authority of known_hosts: {doubt}")
            else:
                raise _unknown(target, key)

    def _refuse_revoked(self, target: SshTarget, key: HostKey, lines: Sequence[KnownKey]) -> None:
        place = next((known.place for known in lines if known.is_revoked and known.key == key), "")
        if not place and target.revoked_host_keys and key.blob in self._revoked_keys(target.revoked_host_keys):
            place = str(target.revoked_host_keys)
        if place:
            raise SshFault(f"host key {key.fingerprint} is revoked ({place}); give the host a new key")

    def _revoked_keys(self, path: Path) -> frozenset[bytes]:
        if path not in self._revoked:
            try:
                self._revoked[path] = read_revoked_keys(path)
            except OSError as error:
                raise SshFault(f"RevokedHostKeys {path}: cannot be read ({error.strerror}); correct it") from None
            except ValueError as error:
                raise SshFault(f"RevokedHostKeys {path}: {error}") from None
        return self._revoked[path]

    def _doubt(self, target: SshTarget, key: HostKey, certificate: HostKey, lines: Sequence[KnownKey]) -> str:
        """Return why a certificate does not make the key that of the host; empty when it does."""
        try:
            authority = read_authority(certificate.kind, certificate.blob)
            trusted = next((known for known in lines if known.is_authority and known.key.blob == authority), None)
            if trusted is None:
                return "another authority has signed its certificate"
            self._refuse_revoked(target, trusted.key, lines)
            names = {target.certificate_name or target.host_name.lower()}
            given = dict(target.algorithms).get("casignaturealgorithms", "")
            allowed = choose_algorithms(given or "^", AUTHORITY_SIGNATURES, ())
            check_certificate(certificate.kind, certificate.blob, key.blob, names, allowed)
        except BadCertificate as error:
            return f"its certificate does not count: {error}"
        return ""

    def _find(self, target: SshTarget) -> list[KnownKey]:
        """Return all lines that speak of a host, by its name with the port and without it."""
        known_hosts = self._known(target)
        return known_hosts.find(target.host_key_name) + known_hosts.find(target.plain_host_key_name)

    def _known(self, target: SshTarget) -> KnownHosts:
        paths = (*target.known_hosts_files, *target.global_known_hosts_files)
        if paths not in self._files:
            try:
                self._files[paths] = KnownHosts(paths)
            except OSError as error:
                raise SshFault(f"{error.filename}: cannot be read ({error.strerror}); correct its rights") from None
        return self._files[paths]

    def _let_pass(self, target: SshTarget, key: HostKey, known: Sequence[KnownKey]) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                "host keys are not checked (--ssh_host_keys off, or StrictHostKeyChecking no in ssh_config): "
                "another host could pass itself off as one of the job's"
            )
        if known:
            self._warn(f"{target.label}: {_changed(target, key, known).text}")

    def _accept(self, target: SshTarget, key: HostKey) -> None:
        if not target.known_hosts_files:
            raise SshFault("there is no UserKnownHostsFile that a new host key could be written to; see ssh_config")
        path = target.known_hosts_files[0]
        try:
            others = self._known(target).add(path, target.host_key_name, key, is_hashed=target.hash_known_hosts)
        except OSError as error:
            raise SshFault(f"{path}: the host key cannot be written ({error.strerror}); correct its rights") from None
        if others and not any(known.key == key and not known.is_revoked for known in others):
            raise _changed(target, key, others)


def _unknown(target: SshTarget, key: HostKey) -> SshFault:
    where = target.known_hosts_files[0] if target.known_hosts_files else "known_hosts"
    return SshFault(
        f"host key {key.fingerprint} is unknown: {target.host_key_name} is not in {where}; "
        "compare it and log in once with ssh, or give --ssh_host_keys accept-new"
    )


def _changed(target: SshTarget, key: HostKey, known: Sequence[KnownKey]) -> SshFault:
    first = next((one for one in known if one.key.kind == key.kind), known[0])
    command = shlex.join(["ssh-keygen", "-f", str(first.path), "-R", target.host_key_name])
    return SshFault(
        f"HOST KEY HAS CHANGED: it is {key.fingerprint}, but {first.place} has {first.key.fingerprint}: "
        f"another host answers, or it was set up anew; if that is so: {command}"
    )
