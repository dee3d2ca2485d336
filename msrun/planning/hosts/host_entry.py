"""HostEntry: a host of a job that is started from here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from msrun.errors import UsageError
from ranktable.errors import HostListError
from ranktable.hosts.host_list import ListedHost


@contextmanager
def blamed_on(source: str = "") -> Iterator[None]:
    """Turn an error of a host list into a UsageError; it names `source` where it does not name its own."""
    try:
        with HostListError.at(source):
            yield
    except HostListError as error:
        raise UsageError(str(error)) from None


@dataclass(frozen=True)
class HostEntry(ListedHost):
    """One host of a job."""

    has_come: bool = False  # msrun was started there, and has come to the scheduler's host; nothing is to be reached
    is_rehearsed: bool = False  # an agent on this machine stands for it, at an address of loopback
