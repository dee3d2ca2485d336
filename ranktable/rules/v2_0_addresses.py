"""The addresses and ports of version 2.0, a part of rule R30. Source: HCCL's parser of that version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

from ranktable.codec.schema import read_integer, walk_objects
from ranktable.problem import Problem, join_index, show_value
from ranktable.survey import Entry

_MAX_ADDRESSES = 24
_MAX_ADDRESS = 256
_MAX_PLANE_ID = 1024
_MAX_PORTS = 16
_MAX_PORT_NAME = 32
_MAX_BACKUPS = 16
_MAX_LISTEN_PORT = 65536
_ADDRESS_TYPES = ("EID", "IPV4", "IPV6")
_EID = re.compile(r"[0-9A-Fa-f]{32}")


def check_addresses(level: Entry, rank: Entry, owners: dict[str, str]) -> Iterator[Problem]:
    """Check the addresses of one level; `owners` remembers which rank has which address."""
    addresses = [Entry(*found) for found in walk_objects(level.members, level.path, "rank_addr_list")]
    if len(addresses) > _MAX_ADDRESSES:
        message = f"the level has {len(addresses)} addresses, HCCL reads at most {_MAX_ADDRESSES}"
        yield Problem(level.path_of("rank_addr_list"), "R30", "error", message, "remove addresses")
    for address in addresses:
        yield from _check_address(address)
        yield from check_length(address, "plane_id", _MAX_PLANE_ID, lowest=0)
        yield from _check_port_names(address)
        yield from _check_backups(address)
        text = address.text("addr")
        if text and owners.setdefault(text.lower(), rank.path) != rank.path:
            message = f"the rank at {owners[text.lower()]} has the same address"
            yield report_warning(address, "addr", message, "give every rank its own addresses")


def check_control(control: Entry) -> Iterator[Problem]:
    """Check the address and the port of a control_plane."""
    yield from _check_address(control)
    yield from check_range(control, "listen_port", 1, _MAX_LISTEN_PORT)


def _check_address(entry: Entry) -> Iterator[Problem]:
    kind, text = entry.text("addr_type"), entry.text("addr")
    if kind is not None and kind not in _ADDRESS_TYPES:
        yield report_error(entry, "addr_type", "the type is not known", f"write {quote_names(_ADDRESS_TYPES)}")
    elif kind is not None and text is not None and not _fits(text, kind):
        wanted = "the 32 hexadecimal digits of an EID" if kind == "EID" else f"an {kind[:2]}{kind[2:].lower()} address"
        yield report_error(entry, "addr", f"the value is not {wanted}", f"write {wanted}, or another addr_type")


def _fits(text: str, kind: str) -> bool:
    if kind == "EID":
        return _EID.fullmatch(text) is not None
    if len(text) > _MAX_ADDRESS:
        return False
    try:
        (IPv4Address if kind == "IPV4" else IPv6Address)(text)
    except ValueError:
        return False
    return True


def _check_port_names(address: Entry) -> Iterator[Problem]:
    """A port is named by die and number, such as "0/4"; HCCL counts equal names once."""
    ports = address.members.get("ports")
    if not isinstance(ports, list):
        return
    names = {port for port in ports if isinstance(port, str)}
    if not 1 <= len(names) <= _MAX_PORTS:
        message = f"an address must have 1 to {_MAX_PORTS} different ports"
        yield report_error(address, "ports", message, 'write names like "0/4"')
        return
    wrong = {name for name in names if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= _MAX_PORT_NAME}
    for name in sorted(wrong):
        message, path = f"the name of a port must have 1 to {_MAX_PORT_NAME} bytes", address.path_of("ports")
        yield Problem(join_index(path, ports.index(name)), "R30", "error", message, 'write a name like "0/4"')


def _check_backups(address: Entry) -> Iterator[Problem]:
    backups, kind, path = address.members.get("backup_addr"), address.text("addr_type"), address.path_of("backup_addr")
    if not isinstance(backups, list) or kind not in _ADDRESS_TYPES:
        return
    if kind == "EID" and backups:
        yield report_error(address, "backup_addr", "an EID has no backup addresses", "remove the key")
    elif len(backups) > _MAX_BACKUPS:
        message = f"the address has {len(backups)} backups, HCCL reads at most {_MAX_BACKUPS}"
        yield Problem(path, "R30", "error", message, "remove backups")
    else:
        for index, text in enumerate(backups):
            if isinstance(text, str) and not _fits(text, kind):
                message = "the backup is not an address of the same type"
                remedy = "write an address of the type in addr_type"
                yield Problem(join_index(path, index), "R30", "error", message, remedy, show_value(text))


def report_error(entry: Entry, key: str, message: str, remedy: str) -> Problem:
    """Return an error of R30 about member `key`."""
    return entry.complain(key, "R30", "error", message, remedy)


def report_warning(entry: Entry, key: str, message: str, remedy: str) -> Problem:
    """Return a warning of R30 about member `key`."""
    return entry.complain(key, "R30", "warning", message, remedy)


def check_range(entry: Entry, key: str, lowest: int, highest: int) -> Iterator[Problem]:
    """Yield an error for a readable number that is out of range."""
    number = read_integer(entry.members.get(key))
    if number is not None and not lowest <= number <= highest:
        yield report_error(entry, key, f"the number must be from {lowest} to {highest}", "write a number in that range")


def check_length(entry: Entry, key: str, highest: int, lowest: int = 1) -> Iterator[Problem]:
    """Yield an error for a text whose length in bytes is out of range."""
    text = entry.text(key)
    size = None if text is None else len(text.encode("utf-8", "surrogatepass"))
    if size is not None and not lowest <= size <= highest:
        yield report_error(
            entry, key, f"the text must have {lowest} to {highest} bytes", "write a shorter or a filled text"
        )


def quote_names(names: tuple[str, ...]) -> str:
    """Return `"A" or "B"`."""
    return " or ".join(f'"{name}"' for name in names)
