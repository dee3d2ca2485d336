"""Open MPI: `mpirun -npernode 1 msrun train.py` (version 4), `mpirun --map-by ppr:1:node msrun train.py` (version 5).

mpirun starts a daemon on every host; daemon 0 is mpirun itself. Every process knows the number of its own daemon, and
as ranks follow the order of hosts, own daemon - own rank is the daemon of rank 0. Source: the variables of processes
that Open MPI 4.1.4 and 5.0.11 started; they are no documented interface, so what is not as expected is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msrun.errors import UsageError
from msrun.planning.discovery.surroundings import (
    OFF,
    HostView,
    Surroundings,
    Told,
    derived_port,
    read_number,
    read_place,
)
from ranktable.hostlist.ranges import RangeError, read_ranges

RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
DAEMON = "PMIX_SERVER_URI"
"""Begins the names of PMIX_SERVER_URI4 and the like: `JOB.DAEMON;ADDRESS`."""
MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"
"""Where mpirun listens, in version 4: `JOB.0;tcp://10.0.0.1,10.1.0.1:5000;tcp6://[fd00::1]:5000`."""
NODE_REGEX = "OMPI_MCA_orte_node_regex"
"""All hosts by daemon, in version 4 and not on mpirun's own host: `login[1:1],node[2:1-4]@0(5)`."""
NAMESPACE = "PMIX_NAMESPACE"
"""Of the job; in version 5 it holds the name of mpirun's host: `prterun-HOST-PID@1`."""

_REMEDY = "add --master_addr ADDRESS of the host of rank 0: mpirun ... msrun --master_addr ADDRESS ..."
_REGEX_PIECE = re.compile(r"([^,\[\]@]*)(?:\[([0-9]{1,9}):([0-9,-]+)\]([^,\[\]@]*))?(?:,|@|\Z)")
_MAX_HOSTS = 16_384


def find_open_mpi(environ: Mapping[str, str], _host: HostView) -> Surroundings | None:
    """Return the job whose ranks are the msruns that mpirun has started; None outside of one.

    Raises:
        UsageError: several ranks on a host, or variables that contradict each other.
    """
    if not environ.get(RANK) or not environ.get(SIZE):
        return None
    node_rank, node_num = read_place(environ, RANK, SIZE)
    local_size = read_number(environ, LOCAL_SIZE, least=1) if environ.get(LOCAL_SIZE) else 1
    if local_size > 1:
        raise UsageError(
            f"{LOCAL_SIZE}={local_size}: mpirun starts msrun once per worker; start it once per host (mpirun --map-by "
            f"ppr:1:node msrun ...), or give {OFF} for {node_num.value} jobs, each on one host"
        )
    key = environ.get(NAMESPACE, "")
    return Surroundings(
        name="mpirun",
        node_num=node_num,
        node_rank=node_rank,
        master_addr=_master(environ, node_rank.value) if node_num.value > 1 else None,
        master_port=derived_port(NAMESPACE, f"mpirun {key}") if key else None,
        remedy=_REMEDY,
    )


def _master(environ: Mapping[str, str], rank: int) -> Told[str] | None:
    daemon = _own_daemon(environ)
    if daemon is None:
        return None
    if daemon == rank:  # rank 0 runs on mpirun's own host
        return _mpirun_address(environ) or _mpirun_name(environ)
    names = read_node_regex(environ.get(NODE_REGEX, ""))
    first = daemon - rank
    return Told(names[first], NODE_REGEX) if 0 < first < len(names) else None


def _own_daemon(environ: Mapping[str, str]) -> int | None:
    for name in sorted(environ):
        match = name.startswith(DAEMON) and re.match(r"[^;]*\.(\d{1,9});", environ[name])
        if match:
            return int(match[1])
    return None


def _mpirun_address(environ: Mapping[str, str]) -> Told[str] | None:
    """Return the first address on which mpirun listens for its daemons, IPv4 before IPv6."""
    uri = environ.get(MPIRUN_URI, "")
    match = re.search(r"tcp://([0-9.]+)[,:]", uri) or re.search(r"tcp6://\[([0-9a-fA-F:]+)[],]", uri)
    return Told(match[1], MPIRUN_URI) if match else None


def _mpirun_name(environ: Mapping[str, str]) -> Told[str] | None:
    match = re.match(r"[a-z]+-(.+)-\d+@\d+\Z", environ.get(NAMESPACE, ""))
    return Told(match[1], NAMESPACE) if match else None


def read_node_regex(text: str) -> list[str]:
    """Return the hosts of orte_node_regex in the order of their daemons; none when it is not understood.

    `node[2:1-4,7].dc` is node01.dc to node04.dc and node07.dc: the number before the colon is that of digits.
    """
    names: list[str] = []
    position = 0
    while position < len(text) and text[position - 1 : position] != "@":
        match = _REGEX_PIECE.match(text, position)
        if match is None or not match[0]:
            return []
        names += _names(*match.groups()) if match[3] else [match[1]]
        position = match.end()
        if len(names) > _MAX_HOSTS:
            return []
    return names


def _names(head: str, width: str, ranges: str, tail: str) -> list[str]:
    try:
        numbers = read_ranges(ranges, _MAX_HOSTS + 1)
    except RangeError:
        return []
    return [f"{head}{number:0{min(int(width), 9)}}{tail}" for number in numbers]
