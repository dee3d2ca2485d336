"""The file of --hostfile: a host to a line, with what belongs to it.

    # name                what belongs to it; all may be left out
    node[01-04]           slots=8 python=/opt/py/bin/python
    me@gate.example:4     port=2222 address=10.0.0.1
    h9                    slots=2 devices=4,6

`slots` is the number of workers, as in the hostfiles of Open MPI and DeepSpeed; `name:slots`, as MPICH writes it, is
the same. A value with blanks stands in double quotes. What follows a # at the beginning of a line or after a blank is a
comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msrun.errors import UsageError, near_miss
from msrun.planning.hosts.device_ids import parse_device_ids
from msrun.planning.hosts.fault import blamed_on
from msrun.planning.hosts.host_entry import (
    MAX_PORT,
    HostEntry,
    check_address,
    check_python,
    check_user,
    parse_slots,
)
from msrun.planning.hosts.host_list import check_distinct, parse_host_word
from ranktable.hostlist.brackets import MAX_HOSTS, expand, shorten

MAX_BYTES = 4_000_000

_COMMENT = re.compile(r"(^|\s)#.*")
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')
_LIMIT_KEYS = ("max_slots", "max-slots")
"""Open MPI's limit of what may be started on a host beyond its slots."""


def parse_hostfile(text: str, source: str) -> tuple[HostEntry, ...]:
    """Turn the text of a hostfile into entries; a host of which it says no slots has 0 of them.

    Args:
        source: the path of the file, for messages.

    Raises:
        UsageError: naming file, line and value.
    """
    place = f"--hostfile {source}"
    entries: list[HostEntry] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        entries += _parse_line(_COMMENT.sub("", line).strip(), f"{place}, line {number}")
        if len(entries) > MAX_HOSTS:
            raise UsageError(f"{place}, line {number}: more than {MAX_HOSTS} hosts up to here; give fewer")
    if not entries:
        what = "holds only comments and blank lines" if text.strip("\ufeff \t\r\n") else "is empty"
        raise UsageError(f"{place}: {what}; write lines such as h1 slots=8")
    check_distinct(entries)
    return tuple(entries)


def _parse_line(line: str, source: str) -> list[HostEntry]:
    """Return the hosts of a line without its comment."""
    if line.count('"') % 2:
        raise UsageError(f'{source}: {shorten(line)!r} has a quote that does not close; write key="value"')
    words = [word.replace('"', "") for word in _WORD.findall(line)]
    if not words:
        return []
    with blamed_on(source):
        named = [parse_host_word(word, source) for word in expand(words[0])]
    settings = _parse_settings(words[1:], source)
    addresses = settings.get("address", [""] * len(named))
    if len(addresses) != len(named):
        raise UsageError(
            f"{source}: hosts: {len(named)}, addresses: {len(addresses)}; each host has its own, so write as many: "
            "node[1-4] address=10.0.0.[1-4]"
        )
    return [
        replace(_apply(entry, settings, source), address=address)
        for entry, address in zip(named, addresses, strict=True)
    ]


def _parse_settings(words: list[str], source: str) -> dict[str, Any]:
    """Return what follows the name."""
    settings: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if key in _LIMIT_KEYS:
            raise UsageError(
                f"{source}: {shorten(word)!r}: msrun starts as many workers as slots says, never more; leave {key} out"
            )
        if key not in _READERS:
            raise UsageError(
                f"{source}: {shorten(word)!r}: no such key{near_miss(key, _READERS)}; the keys are "
                f"{', '.join(_READERS)}, each as key=value"
            )
        if not sign or not value:
            raise UsageError(f"{source}: {key} has no value; write {key}=value without blanks around =")
        if key in settings:
            raise UsageError(f"{source}: {key} is given twice; keep one")
        settings[key] = _READERS[key](value, source)
    return settings


def _apply(entry: HostEntry, settings: dict[str, Any], source: str) -> HostEntry:
    """Return the entry of `[user@]name[:slots]` with the settings beside it, which must not say something else."""
    for key, named in (("user", entry.user), ("slots", entry.slots)):
        if named and settings.get(key, named) != named:
            raise UsageError(f"{source}: {entry.name}: {key} is {named} and {settings[key]}; write it once")
    device_ids = settings.get("devices", ())
    slots = entry.slots or settings.get("slots", len(device_ids))
    if device_ids and len(device_ids) != slots:
        raise UsageError(
            f"{source}: {entry.name}: slots is {slots}, but devices names {len(device_ids)}; each worker has one"
        )
    return replace(
        entry,
        slots=slots,
        device_ids=device_ids or tuple(range(slots)),
        user=entry.user or settings.get("user", ""),
        port=settings.get("port", 0),
        python=settings.get("python", ""),
    )


def _read_user(text: str, source: str) -> str:
    check_user(text, source)
    return text


def _read_port(text: str, source: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PORT)) and 0 < int(text) <= MAX_PORT):
        raise UsageError(f"{source}: port {shorten(text)!r}: must be a number from 1 to {MAX_PORT}")
    return int(text)


def _read_python(text: str, source: str) -> str:
    check_python(text, source)
    return text


def _read_addresses(text: str, source: str) -> list[str]:
    with blamed_on(source):
        addresses = expand(text)
    for address in addresses:
        check_address(address, source)
    return addresses


_READERS: dict[str, Callable[[str, str], Any]] = {
    "slots": parse_slots,
    "devices": parse_device_ids,
    "user": _read_user,
    "port": _read_port,
    "python": _read_python,
    "address": _read_addresses,
}
