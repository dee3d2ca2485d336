"""Turns: how far one copy of the batch goes before the next copy has its turn.

A turn is a run of segments. It ends where the next segment would wait for data that this very turn has put on the wire:
then the other copies compute while it travels. It also ends where parameters are gathered or given back, so that all
copies use them before the next ones come, and where something is recomputed. Collectives that move nothing end no turn,
and what moves on the way forward may stand still on the way back; the two directions have turns of their own.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

from msrun.runtime.schedule.segments import Name, Segment


def forward_turns(segments: Sequence[Segment], gathered: Set[int]) -> list[list[int]]:
    """Return the segments' indexes, in order, in turns.

    Args:
        gathered: fusion groups of parameters that travel before they are used.
    """
    turns: list[list[int]] = []
    flying: set[Name] = set()
    for index, segment in enumerate(segments):
        waits = flying & {*segment.reads, *(crossing.source for crossing in segment.crossings)}
        if not turns or waits or gathered & set(segment.new_groups):
            turns.append([])
            flying = set()
        turns[-1].append(index)
        flying |= {crossing.result for crossing in segment.crossings if not crossing.collective.is_local}
    return turns


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


def backward_turns(segments: Sequence[Segment], gathered: Set[int], replayed: Set[int]) -> list[list[int]]:
    """Return the segments' indexes, last one first, in turns.

    The way back of a segment is followed at once by that of the collectives of the next one, which may have to wait for
    other collectives' gradients.

    Args:
        replayed: last segments of recomputed regions, which all copies compute again before any has its turn.
    """
    turns: list[list[int]] = []
    flying: set[Name] = set()
    gives_back = True
    order = way_back(segments)
    for place, index in enumerate(order):
        before = segments[order[place + 1]].crossings if place + 1 < len(order) else []
        waits = flying & {*segments[index].writes, *(crossing.result for crossing in before)}
        if gives_back or waits or index in replayed:
            turns.append([])
            flying = set()
        turns[-1].append(index)
        flying |= {crossing.source for crossing in before if crossing.collective.moves_backward}
        gives_back = bool(gathered & set(segments[index].new_groups))
    return turns


def join_turns(turns: Sequence[Sequence[int]], spans: Sequence[range]) -> list[list[int]]:
    """Return turns of which none ends inside a span: segments that a copy runs without a break."""
    span_of = {index: span for span in spans for index in span}
    joined: list[list[int]] = []
    for turn in turns:
        if joined and turn[0] in span_of and span_of[turn[0]].start < turn[0]:
            joined[-1] += turn
        else:
            joined.append(list(turn))
    return joined
