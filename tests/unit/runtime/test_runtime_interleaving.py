"""Turns: how far one copy goes before the next one has its turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import fx, nn

from msrun.runtime.schedule.interleaving import backward_slots, forward_slots, join_slots
from msrun.runtime.schedule.segments import Crossing, Segment
from msrun.runtime.sharding.collective import Collective, Kind

AXES = (0,)


def segment(
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    crossings: Sequence[tuple[str, Kind, str]] = (),
    new_groups: Sequence[int] = (),
) -> Segment:
    module = fx.GraphModule(nn.Module(), fx.Graph())
    made = [Crossing(source, result, Collective(kind, AXES)) for source, kind, result in crossings]
    return Segment(module, list(reads), list(writes), made, list(new_groups), list(new_groups))


MEGATRON = [
    segment(["x"], ["norm"], [("norm", "enter", "entered")]),
    segment(["entered"], ["part"], [("part", "all_reduce", "whole")]),
    segment(["whole"], ["norm2"], [("norm2", "enter", "entered2")]),
    segment(["entered2"], ["part2"], [("part2", "all_reduce", "whole2")]),
    segment(["whole2"], ["loss"]),
]
"""Two halves of a Megatron block: partial sums move forward, entered values' gradients move back."""


def test_forward_turns_end_where_sums_are_waited_for_and_not_where_nothing_moves() -> None:
    assert forward_slots(MEGATRON, set()) == [[0, 1], [2, 3], [4]]


def test_backward_turns_end_where_gradients_of_entered_values_are_waited_for() -> None:
    """Segment 2 writes norm2, whose gradient is summed; the way back of `whole` moves nothing."""
    assert backward_slots(MEGATRON, set(), set()) == [[4, 3], [2, 1], [0]]


def test_a_collective_that_reads_anothers_result_begins_a_turn() -> None:
    chain = [
        segment(["x"], ["a"], [("a", "reduce_scatter", "b")]),
        segment([], [], [("b", "gather", "c")]),
        segment(["c"], ["d"]),
    ]
    assert forward_slots(chain, set()) == [[0], [1], [2]]
    assert backward_slots(chain, set(), set()) == [[2, 1], [0]]


def test_data_that_nobody_waits_for_yet_ends_no_turn() -> None:
    late = [
        segment(["x"], ["a", "b"], [("a", "all_reduce", "far")]),
        segment(["b"], ["c"]),
        segment(["c", "far"], ["d"]),
    ]
    assert forward_slots(late, set()) == [[0, 1], [2]]


def test_other_copies_had_their_turn_since_an_earlier_turn_so_its_data_ends_none() -> None:
    two = [
        segment(["x"], ["a", "b"], [("a", "all_reduce", "A"), ("b", "all_reduce", "B")]),
        segment(["A"], ["c"]),
        segment(["B", "c"], ["d"]),
    ]
    assert forward_slots(two, set()) == [[0], [1, 2]]


def test_gathered_groups_are_used_by_all_copies_before_the_next_ones_come() -> None:
    layers = [segment(["x"], ["a"], new_groups=[0]), segment(["a"], ["b"], new_groups=[1]), segment(["b"], ["c"])]
    assert forward_slots(layers, {0, 1}) == [[0], [1, 2]]
    assert backward_slots(layers, {0, 1}, set()) == [[2, 1], [0]]
    assert forward_slots(layers, set()) == [[0, 1, 2]], "parameters that are stored as they are used end no turn"
    assert backward_slots(layers, set(), set()) == [[2, 1, 0]]


def test_a_recomputed_region_begins_a_turn_on_the_way_back() -> None:
    assert backward_slots(MEGATRON, set(), {3}) == [[4], [3], [2, 1], [0]]


def test_a_program_of_nothing_has_no_turns() -> None:
    assert forward_slots([], set()) == []
    assert backward_slots([], set(), set()) == []


@pytest.mark.parametrize(
    ("slots", "spans", "joined"),
    [
        ([[0], [1], [2]], [range(3)], [[0, 1, 2]]),
        ([[0], [1], [2]], [range(1), range(1, 3)], [[0], [1, 2]]),
        ([[0, 1], [2], [3]], [range(1), range(1, 3), range(3, 4)], [[0, 1, 2], [3]]),
        ([[0], [1], [2]], [range(1), range(1, 2), range(2, 3)], [[0], [1], [2]]),
        ([[0], [1]], [], [[0], [1]]),
    ],
)
def test_no_turn_ends_inside_a_span(slots: list[list[int]], spans: list[range], joined: list[list[int]]) -> None:
    assert join_slots(slots, spans) == joined
