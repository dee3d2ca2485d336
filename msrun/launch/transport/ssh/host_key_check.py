"""HostKeyCheck: is this the host that we know? Strict, accept-new or off."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from msrun.launch.transport.ssh.fault import SshFault
from msrun.launch.transport.ssh.known_hosts import HostKey, KnownHosts, KnownKey
from msrun.launch.transport.ssh.target import SshTarget


class HostKeyCheck:
    """Checks keys of servers against known_hosts; one for all connections of a launcher, thread-safe."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn`: told once that keys are not checked, and of changed keys that are let pass."""
        self._warn = warn
        self._lock = threading.Lock()
        self._files: dict[tuple[Path, ...], KnownHosts] = {}
        self._has_warned = False

    def known_kinds(self, target: SshTarget) -> list[str]:
        """Return which kinds of key are known of a host, so that the server is asked for one of them.

        Raises:
            SshFault: a file cannot be read.
        """
        with self._lock:
            known_hosts = self._known(target)
            found = known_hosts.find(target.host_key_name) + known_hosts.find(target.plain_host_key_name)
        return list(dict.fromkeys(known.key.kind for known in found if not known.is_revoked))

    def check(self, target: SshTarget, key: HostKey) -> None:
        """Let a server pass, or refuse it.

        Raises:
            SshFault: its key is unknown, another than known, or revoked.
        """
        with self._lock:
            found = self._known(target).find(target.host_key_name)
            plain = self._known(target).find(target.plain_host_key_name)
            same = [known for known in (*found, *plain) if known.key == key]
            for known in same:
                if known.is_revoked:
                    raise SshFault(f"host key {key.fingerprint} is revoked ({known.place}); give the host a new key")
            good = [known for known in found if not known.is_revoked]
            if any(known in good for known in same) or (same and not good):
                return
            if target.host_keys == "off":
                self._let_pass(target, key, good)
            elif good:
                raise _changed(target, key, good)
            elif target.host_keys == "accept-new":
                self._accept(target, key)
            else:
                raise _unknown(target, key)

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
