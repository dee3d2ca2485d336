"""What hosts send each other in a step: the messages of one rank of each class, for all ranks that do the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msrun.runtime.simulate.job import SimulatedJob

MOST_ROWS = 16
"""Of the matrix: more hosts are taken together."""


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that hosts send each other."""

    nbytes: npt.NDArray[np.float64]
    """(rows, rows): from, to; the diagonal stays in the hosts"""
    hosts_per_row: int


def count_host_traffic(job: SimulatedJob, local_worker_num: int) -> HostTraffic:
    """Return what goes from host to host in one step.

    A ring of p ranks hands (p - 1) parts of a gather or a reduce-scatter on, and twice as many parts of an all-reduce,
    each a p-th of the whole; in an all-to-all each rank sends each other one a p-th of its input.
    """
    hosts = -(-job.world_size // local_worker_num)
    per_row = -(-hosts // MOST_ROWS)
    rows = -(-hosts // per_row)
    found = np.zeros((rows, rows))
    row_of = np.arange(job.world_size) // local_worker_num // per_row
    for alike in job.classes:
        if alike.record is None:
            continue
        moved: Counter[tuple[str, tuple[int, ...] | range]] = Counter()
        for span in alike.record.recording.spans:
            if span.is_message and span.name != "receive":
                moved[span.name, span.ranks] += span.nbytes
        for (operation, ranks), nbytes in moved.items():
            _add(found, row_of, alike.ranks, alike.rank, operation, np.asarray(ranks), nbytes)
    return HostTraffic(found, per_row)


def _add(
    found: npt.NDArray[np.float64],
    row_of: npt.NDArray[np.int64],
    alike: range,
    own: int,
    operation: str,
    ranks: npt.NDArray[np.int64],
    nbytes: int,
) -> None:
    """Add one kind of message for every rank of a class; the groups of the others are shifted copies of this one."""
    count = len(ranks)
    senders = np.arange(alike.start, alike.stop)
    place = int(np.flatnonzero(ranks == own)[0])
    if operation in ("send", "receive") and count > 1:  # to the neighbouring stages, of which a line has two at most
        neighbours = [place + 1] if place + 1 < count else [place - 1]
        for other in neighbours:
            _count(found, row_of, senders, senders + (ranks[other] - own), nbytes / len(neighbours))
        return
    if count < 2:
        return
    if operation == "all_to_all":
        per_rank = nbytes / count
        steps = np.concatenate([ranks[:place], ranks[place + 1 :]]) - own
        for step in steps[:64]:
            _count(found, row_of, senders, _wrapped(senders, step, alike), per_rank * len(steps) / min(len(steps), 64))
        return
    parts = {"all_gather": count - 1.0, "reduce_scatter": (count - 1) / count, "all_reduce": 2 * (count - 1) / count}
    sent = nbytes * parts.get(operation, (count - 1) / count)
    step = int(ranks[1] - ranks[0])
    last = senders // (step * count) != (senders + step) // (step * count) if _is_even(ranks) else None
    following = senders + step
    if last is not None:
        following = np.where(last, senders - step * (count - 1), following)
    _count(found, row_of, senders, _wrapped(following, 0, alike), sent)


def _is_even(ranks: npt.NDArray[np.int64]) -> bool:
    return bool((np.diff(ranks) == ranks[1] - ranks[0]).all())


def _wrapped(ranks: npt.NDArray[np.int64], step: int, alike: range) -> npt.NDArray[np.int64]:
    return (ranks + step - alike.start) % len(alike) + alike.start


def _count(
    found: npt.NDArray[np.float64],
    row_of: npt.NDArray[np.int64],
    senders: npt.NDArray[np.int64],
    receivers: npt.NDArray[np.int64],
    nbytes: float,
) -> None:
    receivers = receivers % len(row_of)
    np.add.at(found, (row_of[senders], row_of[receivers]), nbytes)
