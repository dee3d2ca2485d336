"""What a collective costs: the alpha-beta model of its steps, over the slowest link that it crosses.

The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), sections 4.1 to 4.5, without the cost of the additions: alpha is the latency of a step, beta the seconds
of a byte, p the ranks and n the bytes of the input of one rank (of an all-gather, the part).

    all_gather      ring                   (p - 1) alpha + (p - 1) n beta
    reduce_scatter  ring                   (p - 1) alpha + (p - 1) / p n beta
    all_reduce      ring                   2 (p - 1) alpha + 2 (p - 1) / p n beta
                    recursive doubling     log2 p (alpha + n beta)
    broadcast       binomial tree          log2 p (alpha + n beta)
                    scatter and all-gather (log2 p + p - 1) alpha + 2 (p - 1) / p n beta
    all_to_all      pairwise               (p - 1) alpha + (p - 1) / p n beta

Where two are named the faster one counts, as libraries choose.
"""

from __future__ import annotations

import math

from msrun.runtime.cost.devices import DeviceProfile, Link
from msrun.runtime.sharding.layout import Axes, Mesh


def link_of(mesh: Mesh, axes: Axes, device: DeviceProfile) -> Link:
    """Return the slowest class of links that a group along these axes of a mesh crosses.

    Ranks fill the hosts one after the other; the group is that of the mesh's first rank.
    """
    first = mesh.first_rank
    last = first + sum((mesh.shape[axis] - 1) * mesh.stride(axis) for axis in axes)
    is_inside = first // device.devices_per_host == last // device.devices_per_host
    return device.in_host if is_inside else device.between_hosts


def collective_seconds(operation: str, nbytes: float, ranks: int, link: Link) -> float:
    """Return how long one collective takes; nothing by one rank.

    Args:
        operation: a word of the run-time counter: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, halo,
            send, receive.
        nbytes: of the input on this rank; of a halo, what the rank sends.

    Raises:
        ValueError: another operation.
    """
    if ranks <= 1 and operation not in ("send", "receive"):
        return 0.0
    tree = math.ceil(math.log2(ranks)) if ranks > 1 else 1
    passed = nbytes * (ranks - 1) / max(ranks, 1)
    steps = ranks - 1
    match operation:
        case "all_gather":
            seconds = _seconds(steps, nbytes * steps, link)
        case "reduce_scatter" | "all_to_all":
            seconds = _seconds(steps, passed, link)
        case "all_reduce":
            seconds = min(_seconds(2 * steps, 2 * passed, link), _seconds(tree, tree * nbytes, link))
        case "broadcast":
            seconds = min(_seconds(tree, tree * nbytes, link), _seconds(tree + steps, 2 * passed, link))
        case "halo":  # with the neighbours on both sides
            seconds = _seconds(min(steps, 2), nbytes, link)
        case "send" | "receive":
            seconds = _seconds(1, nbytes, link)
        case _:
            raise ValueError(f"unknown collective {operation!r}")
    return link.start_s + seconds


def copy_seconds(nbytes: float, link: Link) -> float:
    """Return how long a copy between device and host takes."""
    return _seconds(1, nbytes, link)


def _seconds(steps: int, nbytes: float, link: Link) -> float:
    return steps * link.alpha_s + nbytes / link.bytes_per_s
