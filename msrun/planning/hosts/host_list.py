"""The hosts of --hosts: `h1:8,h2:8`, `node[01-16]:8`, `me@h1`, `[fd77::9]:8`."""

from __future__ import annotations

from collections.abc import Iterable

from msrun.errors import UsageError
from msrun.planning.hosts.brackets import expand, shorten
from msrun.planning.hosts.host_entry import HostEntry, check_host_name, check_user, parse_slots


def parse_hosts(text: str, source: str = "--hosts") -> tuple[HostEntry, ...]:
    """Turn a list of hosts into entries; a host without `:slots` has 0 of them.

    Raises:
        UsageError: naming source and value: empty, a name that is none, slots, or a host given twice.
    """
    if not text.strip():
        raise UsageError(f"{source}: is empty; give hosts such as h1:8,h2:8")
    entries = tuple(parse_host_word(word, source) for word in expand(text, source))
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
    name, slots = split_place(place, source)
    check_host_name(name, source)
    count = parse_slots(slots, f"{source}: {shorten(name)}") if slots is not None else 0
    return HostEntry(name, count, tuple(range(count)), user=user, source=source)


def split_place(place: str, source: str) -> tuple[str, str | None]:
    """Return a host and what follows its colon, None without one.

    Two colons and no brackets are an IPv6 address alone.

    Raises:
        UsageError: something else than a colon after `[address]`.
    """
    if place.startswith("["):
        name, bracket, rest = place[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(f"{source}: {shorten(place)!r}: write [address]:slots")
        return name, rest[1:] if rest else None
    if place.count(":") > 1:
        return place, None
    name, colon, slots = place.partition(":")
    return name, slots if colon else None


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
