"""Reads in which order a file lists hosts: host lists of a line per host, of DeepSpeed, MPI or by hand.

Only the order is read: what follows the name (`slots=8`, `:8`) says how many processes a host takes, and is left out.
"""

from __future__ import annotations

from ranktable.errors import HostListError
from ranktable.reading.source import read_source
from ranktable.sources.hosts import HostList


def read_host_order(path: str) -> list[str]:
    """Return the hosts of the file at `path` (`-` is standard input), each once.

    A line may hold a range such as `node[01-16]`; blank lines and what follows # are skipped.
    Raises ReadError, and HostListError for text that names no hosts or names one twice.
    """
    name, data = read_source(path)
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise HostListError(name, "is not UTF-8 text", "write a host per line") from error
    words = [line.partition("#")[0].split() for line in lines]
    names = [found[0].rpartition("@")[2] for found in words if found]
    return [host.name for host in HostList.parse("\n".join(names))]
