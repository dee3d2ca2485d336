"""--include and --exclude: some of the hosts of a list, or some of their devices, in DeepSpeed's words.

    h1@h2:0,2      all of h1, and devices 0 and 2 of h2
    node[01-04]:0-3

Hosts and devices keep the order of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msrun.errors import UsageError, near_miss
from msrun.planning.hosts.device_ids import parse_device_ids
from msrun.planning.hosts.fault import blamed_on
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.ranks import fold_ranks
from ranktable.hostlist.brackets import expand, shorten, split_outside
from ranktable.hostlist.host_name import check_host_name, host_key, is_address, split_place

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
