"""Host files: Open MPI's, MPICH's and Intel MPI's, DeepSpeed's, Slurm's, those of PBS and LSF, and plain names.

What a line says is the same in all of them; what they do with lines that say nothing of slots, and with several lines
of one host, is each one's own (`Family`). Sources: the host file page of Open MPI and PRRTE (`slots`, `max_slots`,
`user@node`; lines of a host add up, one without slots counts 1 of them); MPICH's Hydra page (`host:N`, 1 without N,
lines of a host add up); microsoft/DeepSpeed deepspeed/launcher/runner.py (a host that comes again is an error);
the node files of PBS and LSF (a line for each slot).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ranktable.errors import HostListError, near_miss
from ranktable.hosts.brackets import MAX_HOSTS, expand, quote
from ranktable.hosts.host_list import (
    MAX_PORT,
    Host,
    check_distinct,
    check_python,
    check_user,
    parse_count,
    parse_device_ids,
    parse_host_word,
    parse_slots,
)
from ranktable.hosts.names import MAX_SLOTS, address_of, host_key

MAX_BYTES = 4_000_000
Family = Literal["deepspeed", "openmpi", "mpich", "slurm", "plain"]
FAMILIES: tuple[Family, ...] = ("deepspeed", "openmpi", "mpich", "slurm", "plain")

_COMMENT = re.compile(r"(^|\s)#.*")
_VALUE = r'(?:[^\s"]|"[^"]*")'
_WORD = re.compile(rf'(?:[^\s"=]|"[^"]*")+(?:\s*=\s*{_VALUE}*)?')
_RANKFILE = re.compile(r"rank\s+\d+\s*=")
_ALIASES = dict.fromkeys(("max-slots", "slots_max", "slots-max"), "max_slots") | {"count": "slots", "cpu": "slots"}
"""Other words of Open MPI for its keys."""
_UNREAD = frozenset({"binding", "ifname", "iface"})
"""Keys of MPICH that say nothing of a host or its slots."""
_OURS = frozenset({"devices", "port", "python", "address"})
"""Keys that no launcher but msrun has."""


class _Line(NamedTuple):
    """One line that is neither blank nor a comment."""

    hosts: tuple[Any, ...]
    keys: frozenset[str]
    has_count: bool
    is_openmpi: bool
    """It is written as only Open MPI reads it: user@host, blanks around =, another word for a key."""


def parse_hostfile(text: str, make: type[Host], source: str, family: Family | None = None) -> tuple[Host, ...]:
    """Turn the text of a host file into entries of the type `make`; a host of which it says no slots has 0 of them.

    `source` is what messages call the file; without a `family` what stands in it decides whose it is.
    Raises HostListError: naming file, line and value.
    """
    lines: list[_Line] = []
    count = 0
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = _parse_line(_COMMENT.sub("", raw).strip(), make, f"{source}, line {number}")
        if line is not None:
            lines.append(line)
            count += len(line.hosts)
        if count > MAX_HOSTS:
            raise HostListError(f"more than {MAX_HOSTS} hosts up to here", "give fewer", f"{source}, line {number}")
    if not lines:
        what = "holds only comments and blank lines" if text.strip("\ufeff \t\r\n") else "is empty"
        raise HostListError(what, "write lines such as h1 slots=8", source)
    hosts = _join_repeats([host for line in lines for host in line.hosts], family or _recognise(lines))
    check_distinct(hosts)
    return tuple(hosts)


def _recognise(lines: Iterable[_Line]) -> Family:
    """Return whose file it is. Where a host that comes again may be a mistake, it is the one that refuses it."""
    lines = list(lines)
    if any(line.keys & _OURS for line in lines):
        return "deepspeed"
    if any(line.keys & {"slots", "max_slots"} for line in lines):
        is_strict = all(line.keys == {"slots"} and not line.is_openmpi for line in lines)
        return "deepspeed" if is_strict else "openmpi"
    if any(line.is_openmpi for line in lines):
        return "openmpi"
    if any(len(line.hosts) > 1 for line in lines):
        return "slurm"
    return "mpich" if any(line.has_count for line in lines) else "plain"


def _join_repeats(hosts: list[Host], family: Family) -> list[Host]:
    """Make several lines of one host one, as the family does it; what it refuses is left as it is."""
    if family == "plain":  # a line for each slot, or nothing said of slots
        runs = [list(run) for _, run in groupby(hosts, key=lambda host: host_key(host.name))]
        if len(runs) < len(hosts):
            return [_with_slots(_add_up(run), sum(host.slots or 1 for host in run)) for run in runs]
    if family == "mpich":
        hosts = [host if host.slots else _with_slots(host, 1) for host in hosts]
    if family in ("mpich", "openmpi"):
        lines: dict[str, list[Host]] = {}
        for host in hosts:
            lines.setdefault(host_key(host.name), []).append(host)
        return [_add_up(run) for run in lines.values()]
    return hosts


def _add_up(lines: list[Host]) -> Host:
    """Return the host of several lines; one alone is left as it is."""
    first, *others = lines
    if not others:
        return first
    for other in others:
        if other.user != first.user:
            fault = f"{other.name}: user is {first.user or 'none'} and {other.user or 'none'}"
            raise HostListError(fault, "write it once", f"{other.source} and {first.source}")
    most = max(line.max_slots for line in lines)
    return _checked(replace(_with_slots(first, sum(line.slots or 1 for line in lines)), max_slots=most))


def _with_slots(host: Host, slots: int) -> Host:
    if slots > MAX_SLOTS:
        raise HostListError(f"{host.name}: slots add up to {slots}", f"give at most {MAX_SLOTS}", host.source)
    return replace(host, slots=slots, device_ids=tuple(range(slots)))


def _parse_line(line: str, make: type[Host], source: str) -> _Line | None:
    """Return the hosts of a line without its comment."""
    if line.count('"') % 2:
        raise HostListError(f"{quote(line)} has a quote that does not close", 'write key="value"', source)
    if _RANKFILE.match(line):
        raise HostListError(f"{quote(line)} is a line of a rank file", "give the host file", source)
    words = _WORD.findall(line)
    if not words:
        if line:
            raise HostListError(f"{quote(line)} names no host", "write lines such as h1 slots=8", source)
        return None
    name = words[0].replace('"', "")
    if name.startswith("+"):
        raise HostListError(f"{quote(name)} is a place in an allocation", "write the name of the host", source)
    with HostListError.at(source):
        named = [parse_host_word(word, make, source) for word in expand(name)]
    settings = _parse_settings(words[1:], source)
    addresses = settings.get("address", [""] * len(named))
    if len(addresses) != len(named):
        remedy = "each host has its own, so write as many: node[1-4] address=10.0.0.[1-4]"
        raise HostListError(f"hosts: {len(named)}, addresses: {len(addresses)}", remedy, source)
    hosts = tuple(
        replace(_apply(host, settings, source), address=address) for host, address in zip(named, addresses, strict=True)
    )
    is_openmpi = "@" in name or any(re.search(r"\s", word.partition('"')[0]) for word in words[1:])
    is_openmpi = is_openmpi or any(word.partition("=")[0].strip() in _ALIASES for word in words[1:])
    return _Line(hosts, frozenset(settings), named[0].slots > 0, is_openmpi)


def _parse_settings(words: list[str], source: str) -> dict[str, Any]:
    """Return what follows the name."""
    settings: dict[str, Any] = {}
    for word in words:
        written, sign, value = (part.strip() for part in word.replace('"', "").partition("="))
        key = _ALIASES.get(written, written)
        if key in _UNREAD and value:
            continue
        if key not in _READERS:
            remedy = f"the keys are {', '.join(_READERS)}, each as key=value"
            raise HostListError(f"{quote(word)}: no such key{near_miss(key, _READERS)}", remedy, source)
        if not sign or not value:
            raise HostListError(f"{written} has no value", f"write {written}=value", source)
        if key in settings:
            raise HostListError(f"{key} is given twice", "keep one", source)
        settings[key] = _READERS[key](value, source)
    return settings


def _apply(host: Host, settings: dict[str, Any], source: str) -> Host:
    """Return the host of `[user@]name[:slots]` with the settings beside it, which must not say something else."""
    for key, named in (("user", host.user), ("slots", host.slots)):
        if named and settings.get(key, named) != named:
            raise HostListError(f"{host.name}: {key} is {named} and {settings[key]}", "write it once", source)
    device_ids = settings.get("devices", ())
    slots = host.slots or settings.get("slots", len(device_ids))
    if device_ids and len(device_ids) != slots:
        what = f"{host.name}: slots is {slots}, but devices names {len(device_ids)}"
        raise HostListError(what, "each worker has one", source)
    return _checked(
        replace(
            host,
            slots=slots,
            device_ids=device_ids or tuple(range(slots)),
            user=host.user or settings.get("user", ""),
            port=settings.get("port", 0),
            python=settings.get("python", ""),
            max_slots=settings.get("max_slots", 0),
        )
    )


def _checked(host: Host) -> Host:
    if 0 < host.max_slots < host.slots:
        what = f"{host.name}: slots is {host.slots}, more than max_slots, {host.max_slots}"
        raise HostListError(what, "lower slots", host.source)
    return host


def _read_addresses(text: str, source: str) -> list[str]:
    """Return numeric addresses by which other hosts can reach these; raises HostListError for others."""
    with HostListError.at(source):
        addresses = expand(text)
    for address in addresses:
        number = address_of(address)
        if number is None or number.is_loopback or number.is_unspecified or number.is_multicast:
            remedy = "give the numeric address by which other hosts reach it, such as 10.0.0.1"
            raise HostListError(f"address {quote(address)} is none that others can reach", remedy, source)
    return addresses


_READERS: dict[str, Callable[[str, str], Any]] = {
    "slots": parse_slots,
    "devices": parse_device_ids,
    "user": check_user,
    "port": lambda text, source: parse_count(text, "port", MAX_PORT, source),
    "python": check_python,
    "address": _read_addresses,
    "max_slots": parse_slots,
}
