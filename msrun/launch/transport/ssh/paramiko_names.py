"""What msrun uses of paramiko beside its public names, all of it here; a test fails when one of them moves.

paramiko itself is imported here and nowhere else.
"""

from __future__ import annotations

import logging
import select
import socket
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from msrun.launch.transport.ssh.client_config import KEYWORDS, choose_algorithms
from msrun.launch.transport.ssh.known_hosts import CERTIFICATE

_is_ours = sys.modules.setdefault("invoke", None) is None  # type: ignore[arg-type]
try:
    # paramiko.config takes invoke when it is there, for Match exec, which is not its task here; it brings asyncio and
    # unittest.mock with it, a third of the time that paramiko takes to import.
    import paramiko
    import paramiko.agent
    import paramiko.common
finally:
    if _is_ours:
        del sys.modules["invoke"]

# What goes wrong is told by exceptions; without a handler, logging would write it to stderr, traceback and all.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

__all__ = ["Agent", "Transport", "paramiko"]

AGENT_TIME_OUT_S = 10.0


def _note_request(channel: Any, message: Any) -> None:
    """Take the signal that ended a command (RFC 4254, 6.10), which paramiko passes over."""
    start = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        channel.exit_signal = message.get_text()
        channel.status_event.set()
        return
    message.packet.seek(start)
    paramiko.Channel._handle_request(channel, message)


class Transport(paramiko.Transport):  # type: ignore[misc]  # paramiko has no types
    """A connection whose channels know by which signal their command ended: `channel.exit_signal`."""

    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,
        paramiko.common.MSG_CHANNEL_REQUEST: _note_request,
    }

    def use_host_keys(self, kinds: list[str], *, has_authority: bool = False) -> None:
        """Ask the server for a host key of one of these kinds first; for a certificate before, if one would count."""
        preferred = list(paramiko.Transport._preferred_keys)
        certificates = [f"{name}{CERTIFICATE}" for name in preferred] if has_authority else []
        wanted = [name for kind in kinds for name in _signatures(kind) if name in preferred]
        self._preferred_keys = tuple(dict.fromkeys([*certificates, *wanted, *preferred]))

    def use_algorithms(self, lists: Mapping[str, str]) -> None:
        """Offer what the lists of ssh_config leave, after `use_host_keys`.

        Raises:
            ValueError: a list leaves nothing; says which, and what there is.
        """
        for keyword, (name, known) in _OFFERED.items():
            if keyword in lists:
                left = choose_algorithms(lists[keyword], getattr(self, name), getattr(self, known))
                if not left:
                    every = ", ".join(getattr(self, known))
                    raise ValueError(
                        f"{KEYWORDS[keyword]} {lists[keyword]}: leaves none of those that msrun has: {every}"
                    )
                setattr(self, name, left)

    def host_certificate(self) -> tuple[str, bytes] | None:
        """Return kind and bytes of the certificate that the server has shown; None when it has shown a plain key."""
        found = self.get_remote_server_key().public_blob
        return (found.key_type, found.key_blob) if found is not None else None

    def has_room(self) -> bool:
        """Return whether a message goes without waiting, or fails at once."""
        if not self.is_active():
            return True
        if not self.clear_to_send.is_set():  # keys are being exchanged
            return False
        if not isinstance(self.sock, socket.socket):
            return bool(self.sock.has_room())  # of the connection to a jump host
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLOUT)
        except ValueError:  # closed
            return True
        return bool(poll.poll(0))

    def end_handshake(self) -> None:
        """Stop the timer thread of a handshake that came to no end; it would hold up the end of the process."""
        self.packetizer.complete_handshake()


_OFFERED = {
    "ciphers": ("_preferred_ciphers", "_cipher_info"),
    "macs": ("_preferred_macs", "_mac_info"),
    "kexalgorithms": ("_preferred_kex", "_kex_info"),
    "hostkeyalgorithms": ("_preferred_keys", "_key_info"),
    "pubkeyacceptedalgorithms": ("_preferred_pubkeys", "_key_info"),
}
"""Keyword -> what a connection offers, and all that it could."""


def _signatures(kind: str) -> tuple[str, ...]:
    """Return the signatures that a key makes; an RSA key makes several (RFC 8332)."""
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


class Agent(paramiko.agent.AgentSSH):  # type: ignore[misc]
    """A connection to the ssh-agent of a socket, of one thread."""

    def __init__(self, path: str) -> None:
        """Connect and get the list of keys.

        Raises:
            OSError, paramiko.SSHException: there is no agent, or it does not answer.
        """
        super().__init__()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(AGENT_TIME_OUT_S)
        try:
            stream.connect(path)
            self._connect(stream)
        except BaseException:
            stream.close()
            raise

    def close(self) -> None:
        """Leave the agent."""
        self._close()
