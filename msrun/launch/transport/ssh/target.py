"""SshTarget: one server and how to get to it, as command line, host list and ssh_config together say it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msrun.planning.spec import HostKeyPolicy


class SshFault(Exception):
    """One line without the host's name: what happened, and the remedy."""

    def __init__(self, text: str, *, is_temporary: bool = False, is_late: bool = False) -> None:
        """
        Args:
            is_temporary: another try a moment later may go well.
            is_late: there is no time for one.
        """
        super().__init__(text)
        self.text = text
        self.is_temporary = is_temporary
        self.is_late = is_late


def reason_of(error: Exception) -> str:
    """Return what an exception of paramiko says, in one line; a refusal of the server has its reason in `text`."""
    text = str(getattr(error, "text", "") or error).strip()
    return text.partition("\n")[0].rstrip(".") or "connection closed"


DEFAULT_PORT = 22


@dataclass(frozen=True)
class SshTarget:
    """A server, with everything expanded."""

    name: str
    """As the user wrote it."""
    host_name: str
    """Name or address to connect to."""
    user: str
    port: int = DEFAULT_PORT
    identity_files: tuple[Path, ...] = ()
    """Private keys, in the order in which they are tried."""
    named_identity_files: frozenset[Path] = frozenset()
    """Those that somebody asked for; the others are where ssh looks by itself."""
    identities_only: bool = False
    """Whether keys of the agent that are none of `identity_files` are left out."""
    agent_socket: str = ""
    """Of the ssh-agent; empty = none."""
    may_prompt: bool = True
    via: SshTarget | None = None
    """The jump host before it."""
    proxy_command: str = ""
    known_hosts_files: tuple[Path, ...] = ()
    """The user's; the first is the one that new hosts are written to."""
    global_known_hosts_files: tuple[Path, ...] = ()
    host_key_name: str = ""
    """What known_hosts has it under: HostKeyAlias, else the host name, with the port when it is not 22."""
    plain_host_key_name: str = ""
    """A second name to look for: without the port; empty = none."""
    certificate_name: str = ""
    """What a certificate has to be for: HostKeyAlias, else the host name; empty = the host name."""
    revoked_host_keys: Path | None = None
    """File of keys that no host may have."""
    algorithms: tuple[tuple[str, str], ...] = ()
    """Keywords of `algorithms.KEYWORDS`, each with its list of ssh_config."""
    min_rsa_bits: int = 1024
    host_keys: HostKeyPolicy = "strict"
    hash_known_hosts: bool = False
    tcp_time_out_s: float = 0.0
    """ConnectTimeout: for the TCP connection alone; 0 = none of its own."""
    address_family: str = "any"
    """any, inet or inet6."""

    @property
    def label(self) -> str:
        """The name and, where it differs, what is connected to."""
        place = self.host_name if self.port == DEFAULT_PORT else f"{self.host_name} port {self.port}"
        return place if self.host_name == self.name else f"{self.name} ({place})"

    @property
    def server(self) -> tuple[object, ...]:
        """What two targets that are the same login on the same server have in common."""
        route = self.via.server if self.via else ()
        return self.host_name.lower(), self.port, self.user, self.proxy_command, route
