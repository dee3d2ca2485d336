"""Interleaving: how far one copy of the batch goes before the next copy is issued.

A slot is a run of segments that one copy issues without a break. It ends where the next segment would wait for data
that this very slot has put on the wire: then the other copies compute while it travels. It also ends where parameters
are gathered or given back, so that all copies use them before the next ones come, and where something is recomputed.
Collectives that move nothing end no slot, and what moves on the way forward may stand still on the way back; the two
directions have slots of their own.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

from msrun.runtime.schedule.segments import Name, Segment


def forward_slots(segments: Sequence[Segment], gathered: Set[int]) -> list[list[int]]:
    """Return the segments' indexes, in order, in slots.

    Args:
        gathered: fusion groups of parameters that travel before they are used.
    """
    slots: list[list[int]] = []
    flying: set[Name] = set()
    for index, segment in enumerate(segments):
        waits = flying & {*segment.reads, *(crossing.source for crossing in segment.crossings)}
        if not slots or waits or gathered & set(segment.new_groups):
            slots.append([])
            flying = set()
        slots[-1].append(index)
        flying |= {crossing.result for crossing in segment.crossings if not crossing.collective.is_local}
    return slots


def way_back(segments: Sequence[Segment]) -> list[int]:
    """Return the segments' indexes in the order of the backward pass: the last one first.

    Of two segments of one level the host's comes first, as on the way forward; but in order where they are recomputed.
    """
    order = list(reversed(range(len(segments))))
    for place, (index, before) in enumerate(pairwise(order)):
        one, host = segments[index], segments[before]
        is_beside = host.on_host and not one.on_host and host.level == one.level
        if is_beside and one.region is None and host.region is None:
            order[place], order[place + 1] = before, index
    return order


def backward_slots(segments: Sequence[Segment], gathered: Set[int], replayed: Set[int]) -> list[list[int]]:
    """Return the segments' indexes, last one first, in slots.

    The way back of a segment is followed at once by that of the collectives of the next one, which may have to wait for
    other collectives' gradients.

    Args:
        replayed: last segments of recomputed regions, which all copies compute again before any goes on.
    """
    slots: list[list[int]] = []
    flying: set[Name] = set()
    gives_back = True
    order = way_back(segments)
    for place, index in enumerate(order):
        before = segments[order[place + 1]].crossings if place + 1 < len(order) else []
        waits = flying & {*segments[index].writes, *(crossing.result for crossing in before)}
        if gives_back or waits or index in replayed:
            slots.append([])
            flying = set()
        slots[-1].append(index)
        flying |= {crossing.source for crossing in before if crossing.collective.moves_backward}
        gives_back = bool(gathered & set(segments[index].new_groups))
    return slots


def join_slots(slots: Sequence[Sequence[int]], spans: Sequence[range]) -> list[list[int]]:
    """Return slots of which none ends inside a span: segments that a copy runs without a break."""
    span_of = {index: span for span in spans for index in span}
    joined: list[list[int]] = []
    for slot in slots:
        if joined and slot[0] in span_of and span_of[slot[0]].start < slot[0]:
            joined[-1] += slot
        else:
            joined.append(list(slot))
    return joined
