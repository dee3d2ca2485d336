"""Which hosts and devices of a list a job uses: `--include` and `--exclude` in DeepSpeed's grammar.

`NAME[:SLOT[,SLOT]]@NAME...`: hosts are separated by @, device ids by commas; a host without ids means all of it.
Ids may also be ranges (`0-3`). Source: the resource filter of DeepSpeed's launcher.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranktable.errors import BuildError, HostListError
from ranktable.sources.hosts import parse_numbers

HostDevices = Sequence[tuple[str, Sequence[int]]]


def filter_hosts(hosts: HostDevices, *, include: str | None = None, exclude: str | None = None) -> HostDevices:
    """Return the hosts and device ids that are left, in the order of `hosts`; hosts without devices are left out.

    Raises BuildError when both are given, for a host or id that `hosts` does not have, and when nothing is left.
    """
    if include is not None and exclude is not None:
        raise BuildError("--include and --exclude are both given", "give one of them")
    if include is None and exclude is None:
        return hosts
    name = "--include" if include is not None else "--exclude"
    chosen = _parse_filter(include if include is not None else exclude or "", name, dict(hosts))
    if include is not None:
        kept = [(host, [number for number in ids if number in chosen.get(host, ())]) for host, ids in hosts]
    else:
        kept = [(host, [number for number in ids if number not in chosen.get(host, ())]) for host, ids in hosts]
    left = [(host, ids) for host, ids in kept if ids]
    if not left:
        raise BuildError(f"{name} leaves no device", "check the filter")
    return left


def _parse_filter(text: str, name: str, hosts: dict[str, Sequence[int]]) -> dict[str, frozenset[int]]:
    chosen: dict[str, frozenset[int]] = {}
    for part in text.split("@"):
        host, ids = _split_part(part.strip(), hosts)
        if host not in hosts:
            remedy = "write names of the host list, as in host-a:0,1@host-b"
            raise BuildError(f"{name}: {host!r} is not in the list of hosts", remedy)
        found = frozenset(hosts[host])
        numbers = found if ids is None else frozenset(_parse_ids(ids, part, name))
        missing = sorted(numbers - found)
        if missing:
            raise BuildError(f"{name}: host {host!r} has no device {missing[0]}", f"it has {len(found)} devices")
        chosen[host] = chosen.get(host, frozenset()) | numbers
    return chosen


def _split_part(part: str, hosts: dict[str, Sequence[int]]) -> tuple[str, str | None]:
    """Split `host:0,1`; a host whose name has colons (IPv6) is taken whole when it is in the list."""
    plain = part.strip("[]")
    if plain in hosts:
        return plain, None
    host, colon, ids = part.rpartition(":")
    return (host.strip("[]"), ids) if colon else (part, None)


def _parse_ids(ids: str, part: str, name: str) -> list[int]:
    try:
        return parse_numbers(ids)
    except HostListError as error:
        raise BuildError(f"{name}: {part!r} has {ids!r} for device ids", "write host-a:0,1 or host-a:0-3") from error
