"""Login: from a stream to a connection whose server is known and that has let us in."""

from __future__ import annotations

import threading
import time
from typing import Any

from msrun.launch.transport.ssh.key_ring import Identities, Identity, KeyRing
from msrun.launch.transport.ssh.known_hosts import HostKey, HostKeyCheck
from msrun.launch.transport.ssh.paramiko_names import Transport, paramiko
from msrun.launch.transport.ssh.stream import Stream
from msrun.launch.transport.ssh.target import SshFault, SshTarget, reason_of

END_S = 1.0
IDLE_WAKE_S = 5.0
"""How often a connection looks around while nothing comes. paramiko's own figure is 0.1 s, and there may be hundreds;
whoever ends a connection shuts its socket, so nothing waits for this."""


class Login:
    """Negotiates, checks the host key, authenticates. Used by many threads, each with a stream of its own."""

    def __init__(self, host_keys: HostKeyCheck, keys: KeyRing) -> None:
        self._host_keys = host_keys
        self._keys = keys

    def run(self, target: SshTarget, stream: Stream, deadline: float) -> Transport:
        """Return a connection that may be used.

        Args:
            deadline: of `time.monotonic`; who calls has to kill the stream then.

        Raises:
            SshFault: no SSH server, a host key that is not let pass, no key that is let in, or a broken connection.
        """
        transport = Transport(stream.socket)
        seconds = max(0.01, deadline - time.monotonic())
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = seconds
        transport.channel_timeout = seconds
        try:
            has_authority = self._host_keys.has_authority(target)
            transport.use_host_keys(self._host_keys.known_kinds(target), has_authority=has_authority)
            try:
                transport.use_algorithms(dict(target.algorithms))
            except ValueError as error:
                raise SshFault(f"ssh_config: {error}") from None
            self._negotiate(transport, stream, seconds)
            self._check_host_key(target, transport)
            with self._keys.identities(target) as found:
                self._authenticate(transport, target, found)
        except BaseException:
            end_transport(transport, stream)
            raise
        stream.socket.settimeout(IDLE_WAKE_S)
        return transport

    def _check_host_key(self, target: SshTarget, transport: Transport) -> None:
        key, shown = transport.get_remote_server_key(), transport.host_certificate()
        _check_size(target, key)
        certificate = HostKey(*shown) if shown else None
        self._host_keys.check(target, HostKey(key.get_name(), key.asbytes()), certificate)

    @staticmethod
    def _negotiate(transport: Transport, stream: Stream, seconds: float) -> None:
        try:
            transport.start_client(timeout=seconds)
            transport.get_remote_server_key()
        except paramiko.IncompatiblePeer as error:
            reason = str(error).removeprefix("Incompatible ssh peer ").removeprefix("Incompatible ssh server ")
            raise SshFault(f"server and paramiko have no algorithm in common: {reason.strip('()')}") from None
        except Exception as error:  # noqa: BLE001 - paramiko raises whatever its thread has met
            raise _broken(transport, stream, error) from None

    def _authenticate(self, transport: Transport, target: SshTarget, found: Identities) -> None:
        tried: list[Identity] = []
        for identity in found.keys:
            if identity.key.get_name() == "ssh-rsa" and identity.key.get_bits() < target.min_rsa_bits:
                found.left_out.append(
                    f"{identity.label}: less than RequiredRSASize {target.min_rsa_bits} of ssh_config"
                )
                continue
            tried.append(identity)
            try:
                missing = transport.auth_publickey(target.user, identity.key)
            except paramiko.BadAuthenticationType as error:
                raise _refused(target, tried, found, f"the server takes {_words(error.allowed_types)} only") from None
            except Exception as error:  # noqa: BLE001
                if transport.is_active():
                    if not isinstance(error, paramiko.AuthenticationException):
                        found.left_out.append(f"{identity.label}: {reason_of(error)}")
                    continue
                hint = "the server has hung up; after MaxAuthTries keys it does: name one with --ssh_identity"
                hint += " and IdentitiesOnly yes in ssh_config"
                raise _refused(target, tried, found, hint if len(tried) > 1 else "the server has hung up") from None
            if not missing:
                return
            if "publickey" not in missing:
                raise _refused(
                    target, tried, found, f"beside a key the server wants {_words(missing)}, which msrun cannot give"
                )
        if not tried:
            self._ask_for_nothing(transport, target, found)
            return
        raise _refused(target, tried, found, "")

    @staticmethod
    def _ask_for_nothing(transport: Transport, target: SshTarget, found: Identities) -> None:
        """Without a key: some servers, above all behind a gate, let in whoever comes."""
        try:
            transport.auth_none(target.user)
        except Exception as error:  # noqa: BLE001
            types = getattr(error, "allowed_types", None)
            raise _refused(target, [], found, f"the server takes {_words(types)}" if types else "") from None


def _check_size(target: SshTarget, key: Any) -> None:
    if key.get_name() == "ssh-rsa" and key.get_bits() < target.min_rsa_bits:
        raise SshFault(
            f"its host key is of RSA with {key.get_bits()} bits, less than RequiredRSASize {target.min_rsa_bits} of "
            "ssh_config; give the host a new key"
        )


def end_transport(transport: Any, stream: Stream) -> None:
    """End a connection and its thread, at once and from any thread."""
    transport.end_handshake()
    stream.kill()
    transport.close()
    stream.socket.close()
    if transport is not threading.current_thread() and transport.is_alive():
        transport.join(END_S)


def _broken(transport: Transport, stream: Stream, error: Exception) -> SshFault:
    """Say why there was no key exchange; a server that is too busy hangs up, and may not the next time."""
    complaint = stream.complaint()
    if complaint and not transport.remote_version:
        return SshFault(complaint, is_temporary=True)
    if transport.remote_version:
        return SshFault(
            f"the server ({transport.remote_version}) has hung up during the key exchange ({reason_of(error)})",
            is_temporary=True,
        )
    if "Indecipherable" in str(error) or isinstance(error, UnicodeDecodeError):
        return SshFault("what answers there is no SSH server; is it the right port?")
    return SshFault(
        "the server has hung up before it said who it is: too many logins at a time (MaxStartups of sshd), or it "
        "refuses this address",
        is_temporary=True,
    )


def _refused(target: SshTarget, tried: list[Identity], found: Identities, hint: str) -> SshFault:
    text = f"login as {target.user} refused: "
    if tried:
        text += f"tried {', '.join(dict.fromkeys(identity.label for identity in tried))}"
    else:
        text += "there is no key to try; give --ssh_identity FILE or ssh-add one"
    if found.left_out:
        text += f"; not tried: {', '.join(found.left_out)}"
    if hint:
        text += f"; {hint}"
    return SshFault(text)


def _words(types: list[str]) -> str:
    return ", ".join(types)
