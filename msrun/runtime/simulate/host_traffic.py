"""What hosts send each other in a step: the messages of one rank of each class, for all ranks that do the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.simulate.job import RankClass, SimulatedJob

MOST_ROWS = 16
"""Of the matrix: more hosts are taken together."""
Ranks = npt.NDArray[np.int64]
_IN_RING = {
    "all_gather": lambda count: count - 1.0,
    "reduce_scatter": lambda count: (count - 1) / count,
    "all_reduce": lambda count: 2 * (count - 1) / count,
    "broadcast": lambda count: 2 * (count - 1) / count,
}
"""What a rank hands on in a ring, in units of its input."""


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that hosts send each other."""

    nbytes: npt.NDArray[np.float64]
    """(rows, rows): from, to; the diagonal stays in the hosts"""
    hosts_per_row: int


def count_host_traffic(job: SimulatedJob, local_worker_num: int) -> HostTraffic:
    """Return what goes from host to host in one step; ranks fill the hosts one after the other.

    A ring of p ranks hands (p - 1) parts of a gather or a reduce-scatter on, and twice as many parts of an all-reduce
    or a broadcast, each a p-th of the whole; in an all-to-all each rank sends every other one a p-th of its input.
    """
    hosts = -(-job.world_size // local_worker_num)
    per_row = -(-hosts // MOST_ROWS)
    found = np.zeros((-(-hosts // per_row),) * 2)
    row_of: Ranks = np.arange(job.world_size) // local_worker_num // per_row
    for alike in job.classes:
        moved: Counter[tuple[str, Sequence[int]]] = Counter()
        for span in alike.record.recording.spans if alike.record is not None else ():
            if span.is_message and span.name != "receive":
                moved[span.name, span.ranks] += span.nbytes
        for (operation, ranks), nbytes in moved.items():
            if len(ranks) > 1:
                _add(found, row_of, alike, operation, ranks, nbytes)
    return HostTraffic(found, per_row)


def _add(
    found: npt.NDArray[np.float64], row_of: Ranks, alike: RankClass, operation: str, ranks: Sequence[int], nbytes: int
) -> None:
    """Add one kind of message for every rank of a class: the groups of the others are shifted copies of this one."""
    senders: Ranks = np.arange(alike.ranks.start, alike.ranks.stop)
    count, place = len(ranks), ranks.index(alike.rank)
    if ranks[0] not in alike.ranks or ranks[-1] not in alike.ranks:  # between stages
        step = ranks[(place + 1) % count] - alike.rank
        sent = nbytes if operation == "send" else nbytes * _IN_RING[operation](count)
        np.add.at(found, (row_of[senders], row_of[senders + step]), sent)
        return
    offsets: Ranks = np.asarray(ranks) - min(ranks)
    own = _offset_in_group(alike, senders, set(offsets.tolist()))
    if operation == "all_to_all":
        groups = np.unique(senders - own, return_inverse=True)[1]
        members = np.zeros((groups.max() + 1, len(found)))
        np.add.at(members, (groups, row_of[senders]), 1)
        pairs = members.T @ members - np.diag(members.sum(axis=0))  # nobody sends to itself
        found += pairs * nbytes / count
        return
    order = np.argsort(offsets)
    index = order[np.searchsorted(offsets[order], own)]
    receivers = senders - own + offsets[(index + 1) % count]
    np.add.at(found, (row_of[senders], row_of[receivers]), nbytes * _IN_RING[operation](count))


def _offset_in_group(alike: RankClass, senders: Ranks, offsets: set[int]) -> Ranks:
    """Return how far every rank is from the first one of its group: the mesh axes of the group are those at whose
    stride it has a member."""
    mesh = Mesh(alike.plan.mesh, alike.ranks.start)
    total: Ranks = np.zeros_like(senders)
    for axis in mesh.axes:
        stride = mesh.stride(axis)
        if stride in offsets:
            total += (senders - mesh.first_rank) // stride % mesh.shape[axis] * stride
    return total
