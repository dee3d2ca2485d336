"""A host as a list names it, lists such as `a:8,me@node[01-16]:8,[fd77::9]:2`, and what a filter leaves of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from ranktable.errors import HostListError, near_miss
from ranktable.hosts.brackets import expand, quote, shorten, split_outside
from ranktable.hosts.names import MAX_SLOTS, address_of, check_host_name, host_key, split_place
from ranktable.hosts.ranges import RangeError, fold_numbers, read_ranges
from ranktable.record import Record

MAX_DEVICE_ID = 4095
MAX_PORT = 65535
SHOWN_HOSTS = 4

_USER = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*\Z"
_PATH = r"/[^\x00-\x1f\x7f]*\Z"


class ListedHost(Record):
    """One host. Its name is checked: no ssh and no shell can read it wrong."""

    name: str
    """As the user wrote it: a name of ssh_config, a host name or an address."""
    slots: int = 0
    """Its workers or devices; 0 where the list says nothing of them."""
    device_ids: tuple[int, ...] = ()
    user: str = ""
    """Empty = that of ssh_config, else the launcher's user."""
    port: int = 0
    """0 = that of ssh_config, else 22."""
    python: str = ""
    """Absolute path of the interpreter there; empty = the launcher's own path."""
    address: str = ""
    """Its numeric address for the other hosts; empty = found out."""
    source: str = ""
    """Where it was named, for errors: "--hosts", "--hostfile hosts.txt, line 3"."""
    max_slots: int = 0
    """The most workers that it takes; 0 = the list does not say."""

    @property
    def keys(self) -> set[str]:
        """What different spellings of this host have in common: case, the form of an address, all of loopback."""
        return {host_key(self.name), *([host_key(self.address)] if self.address else [])}

    @property
    def known_address(self) -> str:
        """Its address for the other hosts as far as the list tells it; empty for a name, and for loopback."""
        if self.address:
            return self.address
        address = address_of(self.name)
        return str(address) if address is not None and not address.is_loopback else ""


Host = TypeVar("Host", bound=ListedHost)


def parse_hosts(text: str, make: type[Host], source: str = "--hosts") -> tuple[Host, ...]:
    """Turn a list of hosts into entries of the type `make`, with 0 slots where it gives none; raises HostListError."""
    if not text.strip():
        raise HostListError("is empty", "give hosts such as h1:8,h2:8", source)
    with HostListError.at(source):
        hosts = tuple(parse_host_word(word, make, source) for word in expand(text))
    check_distinct(hosts)
    return hosts


def parse_names(text: str, source: str) -> list[str]:
    """Turn a list of hosts into their names; raises HostListError also for a host with a user or slots."""
    hosts = parse_hosts(text, ListedHost, source)
    more = next((host.name for host in hosts if host.slots or host.user), None)
    if more is not None:
        raise HostListError(f"{more!r} has slots or a user here", "write names only", source)
    return [host.name for host in hosts]


def parse_host_word(word: str, make: type[Host], source: str) -> Host:
    """Turn `[user@]name[:slots]`, also `[fd77::9]:8`, into an entry; raises HostListError, naming source and value."""
    user, at, place = word.rpartition("@")
    if at:
        check_user(user, source)
    with HostListError.at(source):
        name, slots = split_place(place)
        check_host_name(name)
    count = parse_slots(slots, f"{source}: {shorten(name)}") if slots is not None else 0
    return make(name, count, tuple(range(count)), user=user, source=source)


def check_distinct(hosts: Iterable[ListedHost]) -> None:
    """Refuse a host that a list names twice, in whatever spelling. Raises HostListError: naming both places."""
    seen: dict[str, ListedHost] = {}
    for host in hosts:
        for key in host.keys:
            first = seen.setdefault(key, host)
            if first is not host:
                what = host.name if host.name == first.name else f"{host.name} ({first.name})"
                where = host.source if host.source == first.source else f"{host.source} and {first.source}"
                raise HostListError(f"{what} is given twice", "give each host once, with all its slots", where)


def check_user(user: str, source: str) -> str:
    """Return a name of a user; raises HostListError for what is none."""
    if not re.match(_USER, user):
        remedy = "letters, digits, '_', '.', '+', '@' and '-' only"
        raise HostListError(f"user {quote(user)} is no user name", remedy, source)
    return user


def check_python(path: str, source: str) -> str:
    """Return a path that is absolute, since no shell looks it up on the host; raises HostListError for others."""
    if not re.match(_PATH, path):
        remedy = "give the absolute path of a Python on the host"
        raise HostListError(f"python {quote(path)} is no absolute path", remedy, source)
    return path


def parse_slots(text: str, source: str) -> int:
    """Turn a number of slots, 1 to `MAX_SLOTS`, into a number; raises HostListError."""
    return parse_count(text, "slots", MAX_SLOTS, source)


def parse_count(text: str, noun: str, largest: int, source: str) -> int:
    """Turn digits into a number from 1 to the largest; raises HostListError."""
    if text.isascii() and text.isdigit() and len(text) <= len(str(largest)) and 0 < int(text) <= largest:
        return int(text)
    raise HostListError(f"{noun} {quote(text)} is no such number", f"write one from 1 to {largest}", source)


def parse_device_ids(text: str, source: str) -> tuple[int, ...]:
    """Turn `0,2` or `0-3` into device ids in this order; raises HostListError, naming source and value."""
    what = f"devices {quote(text)}"
    try:
        found = read_ranges(text, 2 * (MAX_DEVICE_ID + 1), MAX_DEVICE_ID)
    except RangeError as error:
        if error.reason == "many":
            raise HostListError(f"{what}: {error.piece} is given twice", "give each id once", source) from None
        remedy = f"give some of 0 to {MAX_DEVICE_ID} such as 0,2 or 0-3"
        raise HostListError(f"{what}: {quote(error.piece)} is no device id and no range", remedy, source) from None
    twice = next((number for place, number in enumerate(found) if number in found[:place]), None)
    if twice is not None:
        raise HostListError(f"{what}: {twice} is given twice", "give each id once", source)
    return tuple(found)


def select_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the hosts that stay; None chooses nothing and leaves nothing out.

    The filters are DeepSpeed's, `h1:0,2@h2`, with ranges. A host of which the list says no slots gets those of the
    devices that `include` names. Raises HostListError: both are given, no such host or device in the list, or nothing
    is left.
    """
    if include is not None and exclude is not None:
        remedy = "--include alone can name all that is to stay"
        raise HostListError("give one of the two", remedy, "--include and --exclude")
    text = exclude if include is None else include
    if text is None:
        return tuple(hosts)
    option = "--exclude" if include is None else "--include"
    named = _parse_filter(text, option, hosts)
    left = [_what_stays(host, named.get(host.name), is_include=include is not None) for host in hosts]
    found = tuple(host for host in left if host is not None)
    if not found:
        raise HostListError(f"leaves none of the {len(hosts)} hosts", "name fewer", f"{option} {shorten(text)}")
    return found


def _parse_filter(text: str, option: str, hosts: Sequence[ListedHost]) -> dict[str, tuple[int, ...]]:
    """Return name of a host -> devices that are named; none = the whole host."""
    known = {key: host for host in hosts for key in host.keys}
    place = f"{option} {shorten(text)}"
    named: dict[str, tuple[int, ...]] = {}
    with HostListError.at(option):
        pieces = split_outside(text, "@")
    for piece in pieces:
        names, devices = _split_devices(piece.strip(), option)
        device_ids = parse_device_ids(devices, f"{option}: {shorten(piece)}") if devices is not None else ()
        for name in names:
            host = known.get(host_key(name))
            if host is None:
                names = [host.name for host in hosts]
                more = f" and {len(names) - SHOWN_HOSTS} more" if len(names) > SHOWN_HOSTS else ""
                fault = f"{shorten(name)} is none of the job's hosts{near_miss(name, names)}"
                raise HostListError(fault, f"they are {', '.join(names[:SHOWN_HOSTS])}{more}", place)
            _check_devices(host, device_ids, place)
            before = named.get(host.name)
            is_whole = before == () or not device_ids
            named[host.name] = () if is_whole else tuple(dict.fromkeys([*(before or ()), *device_ids]))
    return named


def _split_devices(piece: str, option: str) -> tuple[list[str], str | None]:
    """Return the hosts of `node[1-4]:0,2` and its devices, None without."""
    if address_of(piece) is not None:
        return [piece], None
    with HostListError.at(option):
        place, *devices = split_outside(piece, ":")
        if len(devices) > 1:
            remedy = "write h1:0,2@h2:1, and an address as [fd77::9]:0"
            raise HostListError(f"{quote(piece)} has two colons", remedy)
        names = [split_place(name)[0] for name in expand(place)]
        for name in names:
            check_host_name(name)
    return names, devices[0] if devices else None


def _check_devices(host: ListedHost, device_ids: Sequence[int], place: str) -> None:
    if not host.slots:
        if device_ids and place.startswith("--exclude"):
            raise HostListError(f"{host.name} has no slots given to take some from", f"write {host.name}:8", place)
        return
    unknown = [device_id for device_id in device_ids if device_id not in host.device_ids]
    if unknown:
        remedy = f"its devices are {fold_numbers(host.device_ids)}"
        raise HostListError(f"{host.name} has no device {unknown[0]}", remedy, place)


def _what_stays(host: Host, named: tuple[int, ...] | None, *, is_include: bool) -> Host | None:
    """`named`: the devices that the words name; none of them = the whole host, None = the host is not named."""
    if not named:
        return host if is_include == (named is not None) else None
    kept = tuple(number for number in host.device_ids or named if (number in named) == is_include)
    return replace(host, slots=len(kept), device_ids=kept) if kept else None
