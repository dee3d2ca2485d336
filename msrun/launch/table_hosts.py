"""A rank table as the list of a job's hosts: which of them this one is, and what it runs."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrun.cluster.addresses import own_addresses
from msrun.errors import UsageError
from msrun.launch.rank_table_file import check_ranks, read_given_table
from msrun.planning.host_assignment import HostAssignment

if TYPE_CHECKING:
    from ranktable import Server

SHOWN_SERVERS = 4


@dataclass(frozen=True)
class HostList:
    """The hosts of a rank table."""

    path: Path
    hosts: tuple[HostAssignment, ...]
    """In the order of their node_rank."""
    own: HostAssignment
    """This host."""

    def apply(self, options: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        """Return the options of the command with what the table says.

        Args:
            given: names of the options that were set; these must agree with the table, but for `master_addr`.

        Raises:
            UsageError: an option contradicts the table.
        """
        told: dict[str, Any] = {
            "worker_num": sum(len(assignment.ranks) for assignment in self.hosts),
            "local_worker_num": len(self.own.ranks),
            "node_rank": self.own.node_rank,
        }
        if len(self.hosts) == 1:
            del told["node_rank"]
        for name, value in told.items():
            if name in given and options[name] != value:
                raise UsageError(
                    f"--{name} {options[name]}: --rank_table_file {self.path} says {value} for {self.own.describe()}; "
                    "make them equal, or leave the option out"
                )
        if len(self.hosts) > 1 and "master_addr" not in given:
            told["master_addr"] = self.hosts[0].address
        return {**options, **told}


@dataclass(frozen=True)
class TableHost:
    """A server of a rank table with its devices, as a host to be reached."""

    assignment: HostAssignment
    names: tuple[str, ...]
    """What the table calls it, the address for the network first."""


def read_table_hosts(path: Path) -> list[TableHost]:
    """Return the servers of a rank table that have devices, in the order of their lowest rank.

    Raises:
        UsageError: it cannot be read, has no devices, or its ranks leave a doubt.
    """
    table = read_given_table(path)
    check_ranks(table, path)
    servers = [server for server in table.servers_by_rank if server.devices]
    if not servers:
        raise UsageError(f"--rank_table_file {path}: no server of it has devices; see ranktable validate")
    if not all(map(_names, servers)):
        raise UsageError(f"--rank_table_file {path}: a server of it has an empty server_id; see ranktable validate")
    return [
        TableHost(_assignment(node_rank, server), tuple(_names(server))) for node_rank, server in enumerate(servers)
    ]


def read_host_list(path: Path) -> HostList | None:
    """Return the hosts of a rank table: its servers with devices.

    None when it cannot be read, a server has no name, or one server's ranks are wrong: that is found, and refused, with
    the other checks. One server alone is this host, whatever its server_id.

    The ranks are those of the table; node 0, which runs the scheduler, is the server of rank 0.
    Source: the table's `rank_id` decides, as in MindSpore, which re-orders ranks by a table with `pod_ip`.

    Raises:
        UsageError: this host is not in the table, or its ranks leave a doubt.
    """
    try:
        table = read_given_table(path)
    except UsageError:
        return None
    servers = [server for server in table.servers_by_rank if server.devices]
    if not servers or not all(map(_names, servers)):
        return None
    hosts = tuple(_assignment(node_rank, server) for node_rank, server in enumerate(servers))
    if len(servers) == 1:
        return HostList(path, hosts, hosts[0]) if hosts[0].ranks == tuple(range(len(hosts[0].ranks))) else None
    check_ranks(table, path)
    index = find_own_server(servers, own_addresses(), socket.gethostname(), path)
    return HostList(path, hosts, hosts[index])


def find_own_server(servers: Sequence[Server], addresses: Mapping[str, str], host_name: str, path: Path) -> int:
    """Return the index of the server that is this host: by one of its addresses, else by its name.

    Args:
        addresses: numeric addresses of this host.

    Raises:
        UsageError: none or several of them are.
    """
    own = {_plain(address) for address in addresses}
    found = [index for index, server in enumerate(servers) if own & {_plain(word) for word in _names(server)}]
    if not found:
        names = {host_name, host_name.partition(".")[0]}
        found = [index for index, server in enumerate(servers) if names & set(_names(server))]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(servers[index].server_id for index in (found or range(len(servers)))[:SHOWN_SERVERS])
    if found:
        raise UsageError(
            f"--rank_table_file {path}: {len(found)} servers of it are this host ({shown}); each host has one server"
        )
    more = f" and {len(servers) - SHOWN_SERVERS} more" if len(servers) > SHOWN_SERVERS else ""
    usable = sorted(address for address in own if not ipaddress.ip_address(address).is_loopback)
    raise UsageError(
        f"--rank_table_file {path}: this host ({host_name}, {', '.join(usable)}) is none of its servers "
        f"({shown}{more}); start msrun on those, or correct the table"
    )


def table_digest(hosts: Iterable[HostAssignment]) -> str:
    """Return a short text that two hosts have in common only when their tables say the same; empty without hosts."""
    rows = [assignment.to_json() for assignment in hosts]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:32] if rows else ""


def _names(server: Server) -> list[str]:
    return [word for word in (server.pod_ip, server.host_ip, server.server_id) if word]


def _plain(word: str) -> str:
    """Return an address in its shortest form; anything else as it is."""
    try:
        return str(ipaddress.ip_address(word))
    except ValueError:
        return word


def _assignment(node_rank: int, server: Server) -> HostAssignment:
    devices = sorted(server.devices, key=lambda device: device.rank_id)
    return HostAssignment(
        node_rank,
        server.server_id,
        _names(server)[0],
        tuple(device.rank_id for device in devices),
        tuple(device.device_id for device in devices),
    )
