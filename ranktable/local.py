"""Holds a table against the host that it is read on: rules L1 to L7, which no look at the file alone can decide."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ranktable import local_host
from ranktable.document import read_document
from ranktable.errors import JsonTextError, UnknownDialectError
from ranktable.files import STDIN_NAME
from ranktable.hosts.this_host import find_this_host
from ranktable.model import Entry, RankTable, Server
from ranktable.problem import Problem, Severity
from ranktable.profile import build_profile
from ranktable.rules.identity import about_devices
from ranktable.rules.network import read_device_addresses
from ranktable.tables import detect_table
from ranktable.validate import Report, locate, validate_document, validate_file
from ranktable.values import is_loopback, parse_address

_NAME_KEYS = ("server_id", "host_ip", "pod_ip", "server_ip", "container_ip")


class LocalReport(NamedTuple):
    """What validation and the look at this host found."""

    report: Report
    servers: tuple[Server, ...] = ()
    """Which server this host is: one, when all is well."""


def check_file(
    path: str | os.PathLike[str],
    *,
    device_target: str = "ascend",
    chip: str | None = None,
    profile: str | None = None,
    root: str | os.PathLike[str] = "/",
    environment: Mapping[str, str] | None = None,
) -> LocalReport:
    """Return the report of `validate_file` on the table at `path`, with the findings of rules L1 to L7 in it.

    `root` is the folder with the host's /dev and /etc; `environment` that of the job, by default this process's.
    hccn_tool and npu-smi are asked about this host's devices if they are here.
    Raises BuildError, ReadError, UnsupportedDialectError, and HostListError for answers that cannot be taken.
    """
    checked_for = build_profile(device_target, chip, profile)
    try:
        document = read_document(path)
        report = validate_document(document, checked_for)
    except (JsonTextError, UnknownDialectError):
        return LocalReport(validate_file(path, device_target=device_target, chip=chip))
    if not report.is_ready:
        return LocalReport(report)
    kind = detect_table(document).dialect
    table, host = kind.read(Entry(members=document.value), kind), local_host.read_local_host()
    variables = os.environ if environment is None else environment
    servers = find_local_servers(table, host)
    found = [*report.problems, *_check_file(os.fspath(path), variables), *_check_host(table, servers, host)]
    for server in servers:
        found += _check_devices(server, checked_for.device_target, Path(root))
    found += _check_variables(table, servers, variables) if servers else ()
    return LocalReport(replace(report, problems=locate(found, document)), tuple(servers))


def find_local_servers(table: RankTable, host: local_host.LocalHost) -> list[Server]:
    """Return the servers of the table that are this host. A lone server on loopback is every host's own."""
    words = [[text for key in _NAME_KEYS if (text := server.text(key))] for server in table.servers]
    places = find_this_host(words, host.name, map(str, host.addresses))
    found = [table.servers[place] for place in places]
    if not found and len(table.servers) == 1 and is_loopback(table.servers[0].server_id):
        return list(table.servers)
    return found


def _check_host(table: RankTable, servers: list[Server], host: local_host.LocalHost) -> Iterator[Problem]:
    """Rule L1."""
    if not servers:
        known = ", ".join([host.name, *map(str, host.addresses[:4])])
        where = table.servers[0].path.rpartition("[")[0] if table.servers else ""
        remedy = "add this host, or use the table of the job of this host"
        yield Problem(where, "L1", "error", f"no server of the table is this host ({known})", remedy)
    for server in servers[1:]:
        message = f"{len(servers)} servers of the table are this host; two pods on one host make one server"
        yield server.complain("server_id", "L1", message, "join them")


def _check_file(path: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Rule L5. Kubernetes mounts ConfigMaps as links, so an entry script has to copy the table first."""
    if path != STDIN_NAME and Path(path).is_symlink():
        message = f"{path} is a symbolic link, as mounted ConfigMaps are; torch_npu goes on without the table then"
        yield Problem("", "L5", "warning", message, "copy the table to a plain file, and set RANK_TABLE_FILE to that")
    named = environment.get("RANK_TABLE_FILE")
    if not named:
        return
    severity: Severity = "warning"
    message = ""
    try:
        if not os.access(named, os.R_OK):
            severity, message = "error", f"RANK_TABLE_FILE is {named}, which is missing or not readable"
        elif not Path(named).samefile(path):
            message = f"RANK_TABLE_FILE is {named}, another file than this one"
        elif Path(named).is_symlink() and not Path(path).is_symlink():
            message = f"RANK_TABLE_FILE is {named}, a symbolic link; torch_npu goes on without the table then"
    except (OSError, ValueError):
        severity, message = "error", "RANK_TABLE_FILE is no path"
    if message:
        yield Problem("", "L5", severity, message, f"set RANK_TABLE_FILE to {path}")


def _check_devices(server: Server, target: str, root: Path) -> Iterator[Problem]:
    """Rule L2, and L3, L4 and L6 for devices that are here: only what the table has values for is asked for."""
    present = local_host.find_device_ids(target, root)
    if target in local_host.NODE_NAMES and not present:
        message = f"this host has no {local_host.NODE_NAMES[target]}, the table gives it {len(server.devices)} devices"
        remedy = "mount the devices into the container, or choose another --device_target"
        yield Problem(server.path, "L2", "error", message, remedy)
    for device in server.devices if present else ():
        if device.device_id >= 0 and device.device_id not in present:
            message = f"this host has no such device; it has {', '.join(map(str, present))}"
            yield device.complain("device_id", "L2", message, "write physical ids, not those inside a container")
    if target != "ascend":
        return
    asked = [device.device_id for device in server.devices if device.device_id in present]
    if any(device.has("device_ip") for device in server.devices):
        yield from _check_addresses(server, asked, root)
    has_numbers = any(device.has("super_device_id") for device in server.devices)
    answers = local_host.ask_super_pod(asked, root) if has_numbers else None
    numbers = answers.super_device_ids if answers else {}
    for device in server.devices:
        text, said = device.text("super_device_id"), numbers.get(device.device_id)
        if text is not None and said is not None and text != said.value:
            message = f"the device has another SDID here: {said.value} ({said.origin})"
            yield device.complain("super_device_id", "L6", message, f'write "{said.value}"')


def _check_addresses(server: Server, device_ids: list[int], root: Path) -> Iterator[Problem]:
    """Rules L3 and L4."""
    conf = local_host.read_hccn_conf(root)
    answers = local_host.ask_addresses(device_ids, root) or conf
    if answers is None:
        message = "neither hccn_tool nor /etc/hccn.conf is here, so device_ip cannot be compared"
        yield Problem(server.path, "L3", "warning", message, "mount /etc/hccn.conf and the driver into the container")
        return
    for device in server.devices:
        number = device.device_id
        if number not in device_ids or device.text("device_ip") is None:
            continue
        said, stale = answers.addresses.get(number), conf and conf.addresses.get(number)
        if said is None:
            failed = answers.failed.get(number)
            what = f"hccn_tool says {failed.value!r}" if failed else "/etc/hccn.conf has no line for it"
            remedy = f"set it with hccn_tool -i {number} -ip -s, or leave device_ip out"
            yield device.complain("device_ip", "L3", f"the device has no address here: {what}", remedy)
            continue
        if parse_address(said.value) not in read_device_addresses(device):
            message = f"the device has another address here: {said.value} ({said.origin})"
            yield device.complain("device_ip", "L3", message, f'write "{said.value}"')
        if stale and parse_address(stale.value) != parse_address(said.value):
            message = f"{stale.origin} has {stale.value} for device {number}, {said.origin} says {said.value}"
            yield Problem("", "L4", "warning", message, "write the address in use into hccn.conf")


def _check_variables(table: RankTable, servers: list[Server], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Rule L7: what an entry script sets by hand for each process."""
    size, rank, device = (environment.get(name) for name in ("RANK_SIZE", "RANK_ID", "DEVICE_ID"))
    if size is not None and size != str(table.world_size):
        message = f"RANK_SIZE is {size}, the table has {table.world_size} devices"
        yield Problem("", "L7", "error", message, f"set RANK_SIZE={table.world_size}")
    if rank is None:
        return
    mine = next((entry for server in servers for entry in server.devices if str(entry.rank_id) == rank), None)
    if mine is None:
        ranks = sorted(rank for server in servers for rank in server.ranks)
        remedy = f"take one of {ranks[0]} to {ranks[-1]}" if ranks else "give the server its ranks"
        message = f"RANK_ID is {rank}, which is no rank of this host"
        yield about_devices(servers[0], "L7", "error", message, remedy)
    elif device is not None and device != str(mine.device_id):
        message = f"DEVICE_ID is {device} for RANK_ID {rank}"
        yield mine.complain("device_id", "L7", message, f"set DEVICE_ID={mine.device_id}")
