"""IssueOrder: when an executor gathers, frees and sends off parameters, and how copies are interleaved. Made once."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from msrun.runtime.execute.gradients import GradientGroup, plan_departures
from msrun.runtime.execute.parameters import ParameterGroup
from msrun.runtime.schedule.interleaving import backward_slots, forward_slots, join_slots, way_back
from msrun.runtime.schedule.segments import Segment

AHEAD = 2
"""Groups gathered ahead of their use when gathered parts are freed again (level3)."""


@dataclass(frozen=True)
class IssueOrder:
    """What happens at which segment; groups and segments by their numbers."""

    forward: list[list[int]]
    """Slots of segments: what one copy issues before the next one."""
    backward: list[list[int]]
    gathered_before: list[list[int]]
    """Segment -> groups to gather before it; one entry more, for the end."""
    gathered_again: list[list[int]]
    """Segment -> groups to gather before its way back."""
    freed_after: list[list[int]]
    """Segment -> groups that no later segment reads and that are gathered again for the way back."""
    way_back: list[int]
    """All segments in the order of the backward pass."""
    next_back: dict[int, int]
    """Segment -> the one whose way back follows, if any."""
    departures: dict[int, list[int]]
    """Segment -> gradient groups that are complete after its way back."""


def plan_issue_order(
    segments: Sequence[Segment],
    groups: Sequence[ParameterGroup],
    gradient_groups: Sequence[GradientGroup],
    replayed: Set[int],
    spans: Sequence[range] = (),
) -> IssueOrder:
    """Return the order.

    Args:
        replayed: last segments of recomputed regions.
        spans: segments that a copy runs forward without a break.
    """
    gathered = {number for number, group in enumerate(groups) if group.shard_axes}
    freed = {number for number, group in enumerate(groups) if group.regathers}
    last_reader = {group: index for index, segment in enumerate(segments) for group in segment.groups}
    order = way_back(segments)
    return IssueOrder(
        forward=join_slots(forward_slots(segments, gathered), spans),
        backward=backward_slots(segments, gathered, replayed),
        gathered_before=[_upcoming(segments, index, gathered, bool(freed)) for index in range(len(segments) + 1)],
        gathered_again=[_following(segments, order[order.index(i) :], freed) for i in range(len(segments))],
        freed_after=[[g for g in freed if last_reader.get(g) == index] for index in range(len(segments))],
        way_back=order,
        next_back=dict(pairwise(order)),
        departures=plan_departures(segments, gradient_groups),
    )


def _upcoming(segments: Sequence[Segment], index: int, gathered: Set[int], is_few: bool) -> list[int]:
    """Return the next groups: all of them at the start, or a few at a time when gathered parts are freed again."""
    upcoming = [group for segment in segments[index:] for group in segment.new_groups if group in gathered]
    if is_few:
        return upcoming[:AHEAD]
    return [] if index else upcoming


def _following(segments: Sequence[Segment], rest: Sequence[int], freed: Set[int]) -> list[int]:
    """Return the next groups of the way back."""
    upcoming = (group for index in rest for group in segments[index].groups)
    return list(dict.fromkeys(group for group in upcoming if group in freed))[:AHEAD]
