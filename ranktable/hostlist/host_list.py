"""Hosts with a number of devices: `a:8,b:8`, `node[01-16]:8`, `10.0.0.[1-4]:8`, `[fe80::1]:8`.

They stand on lines or between commas. A bare IPv6 address has no count: put it in brackets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ranktable.errors import HostListError
from ranktable.hostlist.brackets import MAX_HOSTS, expand, fold_words
from ranktable.hostlist.host_name import MAX_SLOTS, check_host_name, slots_of, split_place


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many devices (slots) it brings; None where the list does not say."""

    name: str
    num_devices: int | None = None


@dataclass(frozen=True, slots=True)
class HostList:
    """Hosts in a fixed order, each once. `str()` folds them back into ranges that parse to the same list.

    >>> str(HostList.parse("node[08-10]:8,node11:8"))
    'node[08-11]:8'
    """

    hosts: tuple[Host, ...]

    @classmethod
    def parse(cls, text: str) -> HostList:
        """Return the hosts of `text`; raises HostListError with the faulty part of it."""
        return cls.of(_parse_word(word) for line in text.splitlines() if line.strip() for word in expand(line))

    @classmethod
    def of(cls, hosts: Iterable[Host]) -> HostList:
        """Return the list of `hosts`; raises HostListError when it is empty or has a host twice."""
        kept: dict[str, Host] = {}
        for host in hosts:
            if host.name in kept:
                raise HostListError(host.name, "is given twice", "give each host once, with all its devices")
            kept[host.name] = host
            if len(kept) > MAX_HOSTS:
                raise HostListError(host.name, f"is one more than {MAX_HOSTS} hosts", "give fewer")
        if not kept:
            raise HostListError("", "names no host", "write a list such as host-a:8,host-b:8")
        return cls(tuple(kept.values()))

    def __str__(self) -> str:
        runs = groupby(self.hosts, key=lambda host: host.num_devices)
        return ",".join(f"{word}{_count_text(count)}" for count, run in runs for word in _fold(run, count))

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)


def _parse_word(word: str) -> Host:
    name, count = split_place(word)
    check_host_name(name)
    if count is None:
        return Host(name)
    if not slots_of(count):
        raise HostListError(word, f"has {count!r} for a number of devices", f"write a number from 1 to {MAX_SLOTS}")
    return Host(name, slots_of(count))


def _fold(hosts: Iterable[Host], count: int | None) -> Iterator[str]:
    """An address with colons stands in brackets where a count follows it."""
    words = fold_words(host.name for host in hosts)
    return (f"[{word}]" if ":" in word and count is not None else word for word in words)


def _count_text(num_devices: int | None) -> str:
    return "" if num_devices is None else f":{num_devices}"
