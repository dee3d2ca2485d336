"""The hosts that one command starts a job on: from --hosts, --hostfile, --rehearse or, with --ssh, a rank table."""

from __future__ import annotations

import errno
import functools
import hashlib
import ipaddress
import json
import re
import socket
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrun.cluster.rendezvous import own_addresses
from msrun.errors import UsageError
from msrun.launch.rank_table_file import check_rank_table, check_ranks, read_given_table
from msrun.planning.hosts import (
    FIRST_ADDRESS,
    HostAssignment,
    HostEntry,
    assign_hosts,
    blamed_on,
    give_slots,
    order_by_table,
    parse_rehearsal,
    stand_in,
)
from msrun.planning.record import Record
from msrun.planning.spec import is_loopback
from ranktable.files import read_text
from ranktable.hosts.brackets import shorten
from ranktable.hosts.host_list import check_distinct, check_python, parse_hosts, select_hosts
from ranktable.hosts.hostfile import MAX_BYTES, parse_hostfile
from ranktable.hosts.names import LOOPBACK, check_host_name, host_key
from ranktable.hosts.this_host import find_this_host

if TYPE_CHECKING:
    from ranktable import RankTable


SHOWN_SERVERS = 4


class HostList(Record):
    """The hosts of a rank table."""

    path: Path
    hosts: tuple[HostAssignment, ...]  # in the order of their node_rank
    own: HostAssignment  # this host

    def apply(self, options: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        """Return the options with what the table says; those `given` must agree, but for `master_addr` (UsageError)."""
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


class TableHost(Record):
    """A server of a rank table with its devices, as a host to be reached."""

    assignment: HostAssignment
    names: tuple[str, ...]  # what the table calls it, the address for the network first


def read_table_hosts(path: Path) -> list[TableHost]:
    """Return a table's servers with devices by their lowest rank (UsageError: unreadable, or doubtful ranks)."""
    table = read_given_table(path)
    check_ranks(table, path)
    hosts = _find_hosts(table)
    if not all(host.names for host in hosts):
        raise UsageError(f"--rank_table_file {path}: a server of it has an empty server_id; see ranktable validate")
    return hosts


def read_host_list(path: Path) -> HostList | None:
    """Return the hosts of a rank table, of which this is one (UsageError: it is not, or the ranks leave a doubt); None
    where the other checks will find and refuse what is wrong. The table's `rank_id` decides, as in MindSpore; node 0,
    with the scheduler, is the server of rank 0; a single server is this host, whatever its server_id."""
    try:
        table = read_given_table(path)
    except UsageError:
        return None
    found = _find_hosts(table)
    if not all(host.names for host in found):
        return None
    hosts = tuple(host.assignment for host in found)
    if len(hosts) == 1:
        return HostList(path, hosts, hosts[0]) if hosts[0].ranks == tuple(range(len(hosts[0].ranks))) else None
    check_ranks(table, path)
    return HostList(path, hosts, hosts[find_own_server(found, own_addresses(), socket.gethostname(), path)])


def find_own_server(hosts: Sequence[TableHost], addresses: Mapping[str, str], host_name: str, path: Path) -> int:
    """Return the index of the server that is this host: by an address, else by name (UsageError: none or several)."""
    found = find_this_host([list(host.names) for host in hosts], host_name, addresses)
    if len(found) == 1:
        return found[0]
    shown = ", ".join(hosts[index].assignment.name for index in (found or range(len(hosts)))[:SHOWN_SERVERS])
    if found:
        raise UsageError(
            f"--rank_table_file {path}: {len(found)} servers of it are this host ({shown}); each host has one server"
        )
    more = f" and {len(hosts) - SHOWN_SERVERS} more" if len(hosts) > SHOWN_SERVERS else ""
    usable = sorted(address for address in addresses if not ipaddress.ip_address(address).is_loopback)
    raise UsageError(
        f"--rank_table_file {path}: this host ({host_name}, {', '.join(usable)}) is none of its servers "
        f"({shown}{more}); start msrun on those, or correct the table"
    )


def table_digest(hosts: Iterable[HostAssignment]) -> str:
    """Return a short text that two hosts have in common only when their tables say the same; empty without hosts."""
    rows = [assignment.to_json() for assignment in hosts]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:32] if rows else ""


def _find_hosts(table: RankTable) -> list[TableHost]:
    found = []
    for node_rank, server in enumerate(server for server in table.servers_by_rank if server.devices):
        names = tuple(word for word in (server.pod_ip, server.host_ip, server.server_id) if word)
        devices = sorted(server.devices, key=lambda device: device.rank_id)
        ranks, ids = tuple(device.rank_id for device in devices), tuple(device.device_id for device in devices)
        found.append(TableHost(HostAssignment(node_rank, server.server_id, next(iter(names), ""), ranks, ids), names))
    return found


OF_LISTS = ("include", "exclude", "python", "spares", "min_hosts", "nnodes")  # options of a list of hosts
_WITHOUT_LIST = {
    "python": "start msrun with that Python",
    "nnodes": "give --worker_num (over all hosts) and --local_worker_num (on each)",
}
_NNODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


class JobHosts(Record):
    """The hosts of a job."""

    entries: tuple[HostEntry, ...]  # in the order of their node_rank; empty: an ordinary job on this host
    assignments: tuple[HostAssignment, ...]  # where a rank table gives them, or this host is the only one
    options: dict[str, Any]  # the options of the command with what the hosts say
    spares: tuple[HostEntry, ...] = ()  # hosts that take the place of lost ones


def read_job_hosts(options: Mapping[str, Any], given: Collection[str]) -> JobHosts:
    """Read the hosts that the options name; those `given` must agree with them (UsageError: a wrong list or file)."""
    _check_together(options, given)
    path = options["rank_table_file"]
    table = read_table_hosts(path.absolute()) if path is not None else []
    entries = _read_entries(options, table)
    if options["python"] is not None:
        entries = tuple(replace(entry, python=entry.python or options["python"]) for entry in entries)
    worker_num, local_worker_num = options["worker_num"] if "worker_num" in given else None, options["local_worker_num"]
    options = _take_nnodes(options, len(entries))
    min_hosts, count = _check_losses(options, len(entries)), len(entries) - options["spares"]
    spares = entries[count:]
    entries = give_slots(entries[:count], worker_num=worker_num, local_worker_num=local_worker_num)
    is_open = not all(entry.slots for entry in spares)
    share = local_worker_num or (entries[0].slots if is_open else None)
    spares = give_slots(spares, worker_num=None, local_worker_num=share)
    assignments = tuple(host.assignment for host in table)
    total = sum(entry.slots for entry in entries)
    if table:  # the rules of CPU hosts hold everywhere; each host applies those of its devices
        target = "cpu" if options["device_target"] == "auto" else options["device_target"]
        check_rank_table(path, total, target)
    is_here = len(entries) == 1 and not min_hosts and not entries[0].is_rehearsed and is_this_host(entries[0])
    if is_here and entries[0].python in ("", sys.executable):  # no agent is needed
        told = {**options, "worker_num": total, "local_worker_num": total}
        return JobHosts((), assignments or assign_hosts(entries), told)
    if len(entries) > 1 and "master_addr" in given and is_loopback(options["master_addr"]):
        raise UsageError(
            f"--master_addr {options['master_addr']}: the {len(entries)} hosts cannot reach each other by it; give the "
            f"address of {entries[0].name}, on which the scheduler runs, or leave the option out"
        )
    told = {**options, "worker_num": total, "local_worker_num": 0, "min_hosts": min_hosts}
    return JobHosts(entries, assignments, told, spares)


def _take_nnodes(options: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """Return the options with --nnodes MIN:MAX as spare hosts and a least number. Source: torch.distributed.run."""
    text = options["nnodes"]
    if text is None:
        return options
    match = _NNODES.fullmatch(text)
    least, most = (int(number) for number in (match[1], match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {shorten(text)}: give MIN:MAX, such as 2:4, or one number")
    if other := next((name for name in ("spares", "min_hosts") if options[name] not in (None, 0)), None):
        raise UsageError(f"--nnodes {text} and --{other} {options[other]}: give one of the two")
    if count < least:
        raise UsageError(f"--nnodes {text}: the list has {count} hosts; name {least} or more, or give a smaller number")
    if count == least:
        return options
    return {**options, "spares": max(0, count - most), "min_hosts": least}


def _check_losses(options: Mapping[str, Any], count: int) -> int:
    """Return how few of the `count` hosts, spare ones too, may run the job; 0 = the job ends when it loses one."""
    spares, min_hosts = options["spares"], options["min_hosts"]
    if not spares and min_hosts is None:
        return 0
    if not 0 <= spares < count:
        raise UsageError(
            f"--spares {spares}: must be 0 to {count - 1}; one of the {count} hosts at least has to run the job"
        )
    if min_hosts is not None and not 1 <= min_hosts <= count - spares:
        raise UsageError(f"--min_hosts {min_hosts}: must be 1 to {count - spares}, the number of hosts of the job")
    name = next(name for name in ("nnodes", "spares", "min_hosts") if options[name])
    if options["rank_table_file"] is not None:
        raise UsageError(f"--{name} {options[name]}: --rank_table_file names every worker of the job; leave one out")
    if options["max_restarts"] < 1:
        raise UsageError(
            f"--{name} {options[name]}: the job starts again as often as --max_restarts says; give 1 or more"
        )
    return int(min_hosts or count - spares)


def is_this_host(entry: HostEntry) -> bool:
    """Return whether an entry needs no SSH: loopback, or a name or an address of this host, with no user or port."""
    return not entry.user and not entry.port and bool(entry.keys & _own_keys())


@functools.cache
def _own_keys() -> frozenset[str]:
    host_name = socket.gethostname()
    return frozenset(map(host_key, (LOOPBACK, host_name, host_name.partition(".")[0], *own_addresses())))


def _check_together(options: Mapping[str, Any], given: Collection[str]) -> None:
    lists = [name for name in ("hosts", "hostfile", "rehearse") if options[name] is not None]
    has_list = bool(lists)
    if options["rehearse"] is not None and options["ssh"]:
        lists.append("ssh")
    if len(lists) > 1:
        raise UsageError(f"--{lists[0]} and --{lists[1]}: give one of the two")
    if options["rehearse"] is not None and "master_addr" in given:
        raise UsageError(
            f"--master_addr {options['master_addr']}: the hosts of --rehearse meet at {FIRST_ADDRESS}; leave it out"
        )
    if not has_list and not options["ssh"]:
        name = next(name for name in OF_LISTS if options[name] not in (None, 0))
        remedy = _WITHOUT_LIST.get(name, "leave it out")
        raise UsageError(
            f"--{name} {options[name]}: for hosts of --hosts, --hostfile, --rehearse or --ssh; without them {remedy}"
        )
    if not has_list and options["rank_table_file"] is None:
        raise UsageError("--ssh: no hosts are given; add --hosts, --hostfile, or --rank_table_file with their servers")
    if "node_rank" in given:
        raise UsageError(
            f"--node_rank {options['node_rank']}: hosts are numbered in the order of their list; leave it out"
        )
    if options["python"] is not None:
        with blamed_on():
            check_python(options["python"], "--python")
    for name in ("include", "exclude"):
        if options["rank_table_file"] is not None and options[name] is not None:
            raise UsageError(
                f"--{name} {options[name]}: --rank_table_file names every worker of the job; make the table of "
                "those hosts with ranktable generate"
            )


def _read_entries(options: Mapping[str, Any], table: list[TableHost]) -> tuple[HostEntry, ...]:
    source, path = f"--rank_table_file {options['rank_table_file']}", options["hostfile"]
    is_listed = any(options[name] is not None for name in ("hosts", "hostfile", "rehearse"))
    with blamed_on("" if is_listed else source):
        if options["hosts"] is not None:
            entries = parse_hosts(options["hosts"], HostEntry)
        elif path is not None:
            entries = parse_hostfile(_read_hostfile(path), HostEntry, f"--hostfile {path}")
        elif options["rehearse"] is not None:
            entries = parse_rehearsal(options["rehearse"])
        else:
            for host in table:
                check_host_name(host.names[0])
            own = [(host.names[0], len(host.assignment.ranks), host.assignment.device_ids) for host in table]
            entries = tuple(HostEntry(*one, source=source) for one in own)
            check_distinct(entries)
        entries = select_hosts(entries, options["include"], options["exclude"]) if is_listed else entries
    if not table:
        return entries
    assignments = [host.assignment for host in table]
    if options["rehearse"] is not None:
        return stand_in(entries, assignments, source)
    ordered = order_by_table(entries, assignments, [host.names for host in table], source) if is_listed else entries
    return tuple(  # with the address of the table, unless an entry has one itself
        replace(entry, address=entry.address or HostEntry(assignment.address).known_address)
        for entry, assignment in zip(ordered, assignments, strict=True)
    )


def _read_hostfile(path: Path) -> str:
    try:
        return read_text(path, MAX_BYTES)
    except OSError as error:
        remedy = "write ranges: node[0001-1024] slots=8" if error.errno == errno.EFBIG else "give a readable text file"
        raise UsageError(f"--hostfile {path}: cannot be read ({error.strerror}); {remedy}") from None
