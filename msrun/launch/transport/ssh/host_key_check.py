"""HostKeyCheck: is this the host that we know? Strict, accept-new or off."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from msrun.launch.transport.ssh.algorithms import AUTHORITY_SIGNATURES, choose_algorithms
from msrun.launch.transport.ssh.fault import SshFault
from msrun.launch.transport.ssh.host_certificate import BadCertificate, check_certificate, read_authority
from msrun.launch.transport.ssh.known_hosts import HostKey, KnownHosts, KnownKey, read_revoked_keys
from msrun.launch.transport.ssh.target import SshTarget


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
