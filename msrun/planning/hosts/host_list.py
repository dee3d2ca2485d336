"""The hosts of --hosts: `h1:8,h2:8`, `node[01-16]:8`, `me@h1`, `[fd77::9]:8`."""

from __future__ import annotations

from collections.abc import Iterable

from msrun.errors import UsageError
from msrun.planning.hosts.fault import blamed_on
from msrun.planning.hosts.host_entry import HostEntry, check_user, parse_slots
from ranktable.hostlist.brackets import expand, shorten
from ranktable.hostlist.host_name import check_host_name, split_place


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
