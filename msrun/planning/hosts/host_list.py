"""The hosts of --hosts and --hostfile, and what --include and --exclude leave of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from msrun.errors import UsageError, near_miss
from msrun.planning.hosts.host_entry import (
    MAX_PORT,
    HostEntry,
    blamed_on,
    check_address,
    check_python,
    check_user,
    parse_slots,
)
from msrun.planning.ranks import fold_ranks
from ranktable.hostlist.brackets import MAX_HOSTS, expand, shorten, split_outside
from ranktable.hostlist.host_name import check_host_name, host_key, is_address, split_place
from ranktable.hostlist.ranges import RangeError, read_ranges

MAX_DEVICE_ID = 4095


def parse_device_ids(text: str, source: str) -> tuple[int, ...]:
    """Turn `0,2` or `0-3` into device ids, in this order.

    Raises:
        UsageError: naming source and value: not such a list, beyond `MAX_DEVICE_ID`, or an id given twice.
    """
    place = f"{source}: devices {shorten(text)!r}"
    try:
        found = read_ranges(text, 2 * (MAX_DEVICE_ID + 1), MAX_DEVICE_ID)
    except RangeError as error:
        if error.reason == "many":
            raise UsageError(f"{place}: {error.piece} is given twice; give each id once") from None
        raise UsageError(
            f"{place}: {shorten(error.piece)!r} is no device id and no range of them; give "
            f"some of 0 to {MAX_DEVICE_ID} such as 0,2 or 0-3"
        ) from None
    number, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{place}: {number} is given twice; give each id once")
    return tuple(found)


def parse_hosts(text: str, source: str = "--hosts") -> tuple[HostEntry, ...]:
    """Turn a list of hosts into entries; a host without `:slots` has 0 of them.

    Raises:
        UsageError: naming source and value: empty, a name that is none, slots, or a host given twice.
    """
    if not text.strip():
        raise UsageError(f"{source}: is empty; give hosts such as h1:8,h2:8")
    with blamed_on(source):
        entries = tuple(parse_host_word(word, source) for word in expand(text))
    check_distinct(entries)
    return entries


def parse_host_word(word: str, source: str) -> HostEntry:
    """Turn `[user@]name[:slots]` into an entry; an IPv6 address with slots is written `[fd77::9]:8`.

    Raises:
        UsageError: naming source and value.
    """
    user, at, place = word.rpartition("@")
    if at:
        check_user(user, source)
    with blamed_on(source):
        name, slots = split_place(place)
        check_host_name(name)
    count = parse_slots(slots, f"{source}: {shorten(name)}") if slots is not None else 0
    return HostEntry(name, count, tuple(range(count)), user=user, source=source)


def check_distinct(entries: Iterable[HostEntry]) -> None:
    """Refuse a host that a list names twice, in whatever spelling.

    Raises:
        UsageError: naming both places.
    """
    seen: dict[str, HostEntry] = {}
    for entry in entries:
        for key in entry.keys:
            first = seen.setdefault(key, entry)
            if first is not entry:
                what = entry.name if entry.name == first.name else f"{entry.name} ({first.name})"
                where = entry.source if entry.source == first.source else f"{entry.source} and {first.source}"
                raise UsageError(f"{where}: {what} is given twice; give each host once, with all its slots")


MAX_BYTES = 4_000_000

_COMMENT = re.compile(r"(^|\s)#.*")
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')
_LIMIT_KEYS = ("max_slots", "max-slots")
"""Open MPI's limit of what may be started on a host beyond its slots."""


def parse_hostfile(text: str, source: str) -> tuple[HostEntry, ...]:
    """Turn the text of a hostfile into entries; a host of which it says no slots has 0 of them.

    Names alone, of which some come several times in a row, are a line for each slot, as PBS and LSF write them.

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
    if all(entry == HostEntry(entry.name, source=entry.source) for entry in entries):
        runs = [list(run) for _, run in groupby(entries, key=lambda entry: entry.name)]
        if len(runs) < len(entries):
            entries = [replace(run[0], slots=len(run), device_ids=tuple(range(len(run)))) for run in runs]
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


SHOWN_HOSTS = 4


def select_hosts(entries: Sequence[HostEntry], include: str | None, exclude: str | None) -> tuple[HostEntry, ...]:
    """Return the hosts that stay; None chooses nothing and leaves nothing out.

    A host of which the list says no slots gets those of the devices that `include` names.

    Raises:
        UsageError: both are given, no such host or device in the list, or nothing is left.
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude: give one of the two; --include alone can name all that is to stay")
    text = exclude if include is None else include
    if text is None:
        return tuple(entries)
    option = "--exclude" if include is None else "--include"
    named = _parse_filter(text, option, entries)
    left = [_what_stays(entry, named.get(entry.name), is_include=include is not None) for entry in entries]
    found = tuple(entry for entry in left if entry is not None)
    if not found:
        raise UsageError(f"{option} {shorten(text)}: leaves none of the {len(entries)} hosts; name fewer")
    return found


def _parse_filter(text: str, option: str, entries: Sequence[HostEntry]) -> dict[str, tuple[int, ...]]:
    """Return name of an entry -> devices that are named; none = the whole host."""
    known = {key: entry for entry in entries for key in entry.keys}
    named: dict[str, tuple[int, ...]] = {}
    with blamed_on(option):
        pieces = split_outside(text, "@")
    for piece in pieces:
        place, devices = _split_devices(piece.strip(), option)
        device_ids = parse_device_ids(devices, f"{option}: {shorten(piece)}") if devices is not None else ()
        for name in place:
            entry = known.get(host_key(name))
            if entry is None:
                raise UsageError(f"{option} {shorten(text)}: {_unknown_host(name, entries)}")
            _check_devices(entry, device_ids, f"{option} {shorten(text)}")
            before = named.get(entry.name)
            is_whole = before == () or not device_ids
            named[entry.name] = () if is_whole else tuple(dict.fromkeys([*(before or ()), *device_ids]))
    return named


def _split_devices(piece: str, option: str) -> tuple[list[str], str | None]:
    """Return the hosts of `node[1-4]:0,2` and its devices, None without."""
    if is_address(piece):
        return [piece], None
    with blamed_on(option):
        place, *devices = split_outside(piece, ":")
    if len(devices) > 1:
        raise UsageError(
            f"{option}: {shorten(piece)!r} has two colons; write h1:0,2@h2:1, and an address as [fd77::9]:0"
        )
    with blamed_on(option):
        names = [split_place(name)[0] for name in expand(place)]
        for name in names:
            check_host_name(name)
    return names, devices[0] if devices else None


def _unknown_host(name: str, entries: Sequence[HostEntry]) -> str:
    names = [entry.name for entry in entries]
    hint = near_miss(name, names)
    shown = ", ".join(names[:SHOWN_HOSTS]) + (f" and {len(names) - SHOWN_HOSTS} more" * (len(names) > SHOWN_HOSTS))
    return f"{shorten(name)} is none of the job's hosts{hint}; they are {shown}"


def _check_devices(entry: HostEntry, device_ids: Sequence[int], place: str) -> None:
    if not entry.slots:
        if device_ids and place.startswith("--exclude"):
            raise UsageError(f"{place}: {entry.name} has no slots given to take some from; write {entry.name}:8")
        return
    unknown = [device_id for device_id in device_ids if device_id not in entry.device_ids]
    if unknown:
        raise UsageError(
            f"{place}: {entry.name} has no device {unknown[0]}; its devices are {fold_ranks(entry.device_ids)}"
        )


def _what_stays(entry: HostEntry, named: tuple[int, ...] | None, *, is_include: bool) -> HostEntry | None:
    """`named`: the devices that the words name; none of them = the whole host, None = the host is not named."""
    if not named:
        return entry if is_include == (named is not None) else None
    kept = tuple(number for number in entry.device_ids or named if (number in named) == is_include)
    return replace(entry, slots=len(kept), device_ids=kept) if kept else None
