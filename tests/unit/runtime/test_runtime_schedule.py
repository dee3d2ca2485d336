"""Orders of a pipeline: schedules, interleaving, receives that come early, and the order that ranks agree on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from xml.etree import ElementTree as ET

import pytest
from torch import fx, nn
from torch.distributed.pipelining import schedules as torch_schedules

from msrun.errors import StrategyError
from msrun.runtime.parallel.pipeline.plan import WORDS, render_svg, render_text
from msrun.runtime.parallel.pipeline.schedule import (
    Action,
    Schedule,
    build_schedule,
    choose_schedule,
    default_chunks,
    eager_order,
    receive_early,
)
from msrun.runtime.parallel.pipeline.torch_schedules import _stand_in
from msrun.runtime.schedule.interleaving import backward_slots, forward_slots, join_slots
from msrun.runtime.schedule.segments import Crossing, Segment
from msrun.runtime.sharding.collective import Collective, Kind

made = cache(build_schedule)
NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble", "zero_bubble", "zbv", "dualpipev")
CHUNKS = (1, 1, 1, 2, 1, 2, 2, 2)
SPLIT = ("zero_bubble", "zbv", "dualpipev")
"""Their bubble is (P - 1) of a third of a micro batch; the others' (P - 1) of a whole one."""
CASES = [
    (name, chunks, ranks, ranks * times)
    for name, chunks in zip(NAMES, CHUNKS, strict=True)
    for ranks in (1, 2, 3, 4)
    for times in (1, 2, 3)
    if times > 1 or name not in ("zbv", "dualpipev")
]


@pytest.mark.parametrize(("name", "chunks", "ranks", "micro_size"), CASES)
def test_bubble_is_the_formula(name: str, chunks: int, ranks: int, micro_size: int) -> None:
    """Narayanan et al. 2021: (P-1)/(m+P-1), interleaved (P-1)/(V m+P-1). Qi et al. 2023, ZB-H1 (torch's ZB1P): P-1
    units of idle time where F = I = W = 1: (P-1)/(3 V m + P-1). ZBV and DualPipeV likewise from 2 P micro batches."""
    work = chunks * micro_size * (3 if name in SPLIT else 1)
    expected = Fraction(ranks - 1, work + ranks - 1)
    assert made(name, ranks, chunks, micro_size).bubble == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(("name", "chunks", "ranks", "micro_size"), CASES)
def test_every_micro_batch_goes_once_forward_and_once_back_through_every_stage(
    name: str, chunks: int, ranks: int, micro_size: int
) -> None:
    schedule = made(name, ranks, chunks, micro_size)
    places = {(stage, micro) for stage in range(ranks * chunks) for micro in range(micro_size)}
    for rank, row in enumerate(schedule.actions):
        assert {action.stage for action in row} == set(schedule.stages_of(rank))
    done = Counter((a.kind, a.stage, a.micro_batch) for row in schedule.actions for a in row)
    assert set(done.values()) == {1}
    of_kind = {kind: {(s, m) for k, s, m in done if k == kind} for kind in ("F", "B", "I", "W")}
    assert of_kind["F"] == places
    assert of_kind["B"] | of_kind["I"] == places
    assert not of_kind["B"] & of_kind["I"]
    assert of_kind["I"] == of_kind["W"]
    assert bool(of_kind["W"]) == (name in SPLIT)


@pytest.mark.parametrize(("name", "chunks", "ranks", "micro_size"), CASES)
def test_two_ranks_have_their_messages_to_each_other_in_one_order(
    name: str, chunks: int, ranks: int, micro_size: int
) -> None:
    """In both directions together: a backend without tags, such as NCCL, runs them one after the other."""
    schedule = made(name, ranks, chunks, micro_size)
    orders: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.computes:
                continue
            way = 1 if action.kind.endswith("F") else -1
            sender = action.stage if action.kind.startswith("SEND") else action.stage - way
            other = action.stage + way if action.kind.startswith("SEND") else sender
            message = (action.kind[-1], sender, action.micro_batch)
            orders.setdefault((rank, schedule.holder[other]), []).append(message)
    for (rank, other), order in orders.items():
        assert rank != other
        assert order == orders[other, rank]
    borders = sum(a != b for a, b in zip(schedule.holder, schedule.holder[1:], strict=False))
    assert sum(map(len, orders.values())) == 2 * 2 * borders * micro_size


def test_value_is_sent_after_it_is_made_and_received_before_it_is_read() -> None:
    for name, chunks in zip(NAMES, CHUNKS, strict=True):
        for row in build_schedule(name, 4, chunks, 8).actions:
            seen = set()
            for action in row:
                here = (action.stage, action.micro_batch)
                if action.kind.startswith("SEND"):
                    assert ("F", *here) in seen if action.kind == "SEND_F" else {("B", *here), ("I", *here)} & seen
                assert action.kind != "RECV_F" or ("F", *here) not in seen
                assert action.kind != "RECV_B" or not {("B", *here), ("I", *here)} & seen
                seen.add((action.kind, *here))


@pytest.mark.parametrize(
    ("name", "held"),
    [("gpipe", 8), ("1f1b", 4), ("eager_1f1b", 7), ("interleaved", 11), ("zero_bubble", 4), ("zbv", 8)],
)
def test_fullest_rank_holds_the_forward_passes_that_the_schedule_is_known_for(name: str, held: int) -> None:
    """4 ranks, 8 micro batches: gpipe all of them, 1f1b P, eager 2 P - 1, interleaved V P + P - 1, ZBV 2 P halves."""
    assert build_schedule(name, 4, default_chunks(name, interleave=False), 8).most_held == held


@pytest.mark.parametrize("is_v", [False, True])
def test_stages_are_dealt_out_in_rounds_or_down_and_up(is_v: bool) -> None:
    name = "zbv" if is_v else "interleaved"
    assert build_schedule(name, 3, 2, 6).holder == ((0, 1, 2, 2, 1, 0) if is_v else (0, 1, 2, 0, 1, 2))


def test_torch_still_numbers_the_forwards_of_the_last_rank_wrongly() -> None:
    """When this fails torch has mended it: take _number_forwards out of torch_schedules."""
    order = torch_schedules.Schedule1F1B(_stand_in(2, 2, 0), 4)._get_pipeline_order()
    assert order is not None
    forwards = [a.microbatch_index for a in order[1] if a and a.computation_type is torch_schedules.FORWARD]
    assert forwards == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_size", "message"),
    [
        ("1f1b", 4, 1, 3, r"Pipeline\(micro_size=3\): 1f1b with 4 stages needs at least 4 micro batches"),
        ("dualpipev", 2, 2, 3, r"Pipeline\(micro_size=3\): dualpipev with 4 stages needs at least 4 micro batches"),
        ("interleaved", 2, 2, 5, r"goes in 2 rounds, which must divide .*; the nearest legal number is 6"),
        ("zero_bubble", 4, 1, 9, r"goes in 2 rounds, which must divide .*; the nearest legal number is 10"),
        ("interleaved", 4, 2, 23, r"goes in 5 rounds, which must divide .*; the nearest legal number is 24"),
        ("zbv", 2, 3, 4, r"zbv: 3 stages per rank; it needs exactly 2, so 4 stages in all"),
        ("gpipe", 2, 2, 4, r"gpipe: 4 stages for 2 pipeline ranks; it needs one stage per rank, or interleave=True"),
    ],
)
def test_number_that_torch_would_refuse_is_refused_in_words(
    name: str, ranks: int, chunks: int, micro_size: int, message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        build_schedule(name, ranks, chunks, micro_size)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"])
def test_what_is_accepted_is_what_torch_accepts(name: str) -> None:
    """Nothing that passes the check may fail in torch, and the nearest legal number is legal."""
    chunks = default_chunks(name, interleave=False)
    for ranks in (1, 2, 3, 4):
        for micro_size in range(1, 14):
            try:
                build_schedule(name, ranks, chunks, micro_size)
            except StrategyError as error:
                if "nearest" in str(error):
                    build_schedule(name, ranks, chunks, int(str(error).rpartition(" ")[2]))


@pytest.mark.parametrize(
    ("scheduler", "interleave", "name", "chunks"),
    [
        ("1f1b", False, "1f1b", 1),
        ("1f1b", True, "interleaved", 2),
        ("eager_1f1b", False, "eager_1f1b", 1),
        ("zero_bubble", False, "zero_bubble", 1),
        ("zero_bubble", True, "zero_bubble", 2),
        ("zbv", False, "zbv", 2),
        ("dualpipev", True, "dualpipev", 2),
    ],
)
def test_words_of_the_setter_choose_the_schedule(scheduler: str, interleave: bool, name: str, chunks: int) -> None:
    assert choose_schedule(scheduler, interleave) == name
    assert default_chunks(name, interleave) == chunks


def test_unknown_word_and_interleaving_where_there_is_none_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"scheduler='1f1'\) \(did you mean 1f1b\?\): must be one of gpipe, 1f1b"):
        choose_schedule("1f1", interleave=False)
    for scheduler in ("gpipe", "eager_1f1b"):
        with pytest.raises(StrategyError, match='use "1f1b" or "zero_bubble" with it'):
            choose_schedule(scheduler, interleave=True)


def test_text_shows_every_action_at_its_time() -> None:
    assert render_text(build_schedule("1f1b", 2, 1, 3)) == (
        "1f1b: 2 stages, 3 micro batches, bubble 25.0 %, at most 2 forward passes held\n"
        "pp rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -\n"
        "pp rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  ."
    )
    assert "0F0 0F1 0F2 3F0 3I0 3W0" in render_text(build_schedule("zbv", 2, 2, 4))


def cells(schedule: Schedule) -> Counter[str]:
    return Counter(f"{a.kind}{a.micro_batch} of stage {a.stage}" for row in schedule.actions for a in row if a.computes)


def kinds_of(schedule: Schedule) -> set[str]:
    return {cell.action.kind for row in schedule.timeline for cell in row}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "chunks"), list(zip(NAMES, CHUNKS, strict=True)))
def test_picture_has_a_cell_for_every_action_and_the_bubble_as_text(name: str, chunks: int, ranks: int) -> None:
    schedule = build_schedule(name, ranks, chunks, 6)
    root = ET.fromstring(render_svg(schedule))
    space = {"s": "http://www.w3.org/2000/svg"}
    found = Counter(title.text for title in root.findall("s:g/s:title", space))
    assert found == cells(schedule)
    texts = [text.text for text in root.findall("s:text", space)]
    assert f"bubble {100 * schedule.bubble:.1f} %" in (texts[0] or "")
    heads = [text for text in texts if text and text.startswith("pp")]
    assert heads == [f"pp rank {rank}" for rank in range(ranks)]
    width = float(root.attrib["viewBox"].split()[2])
    ends = [float(r.attrib["x"]) + float(r.attrib["width"]) for r in root.findall("s:g/s:rect", space)]
    assert max(ends) < width
    letters = [
        (float(text.attrib["x"]), len(text.text or ""), float(text.attrib["font-size"]))
        for text in root.findall("s:text", space)
    ]
    assert max(x + count * size / 2 for x, count, size in letters) < width  # nothing is clipped
    ticks = [int(text.text or "") for text in root.findall("s:text[@class='tick']", space)]
    assert ticks[0] == 0 and schedule.length - ticks[-1] < ticks[1]
    legend = {text.text for text in root.findall("s:text[@class='legend']", space)}
    assert {WORDS[kind] for kind in kinds_of(schedule)} | {"idle"} < legend


SCHEDULES = [
    (name, ranks, ranks * times)
    for name in ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
    for ranks in (2, 3, 4)
    for times in (2, 3)
]


def rows(name: str, ranks: int, micro_size: int) -> tuple[tuple[Action, ...], ...]:
    return build_schedule(name, ranks, default_chunks(name, interleave=False), micro_size).actions


def is_receive(action: Action) -> bool:
    return action.kind.startswith("RECV")


def computed_between(row: tuple[Action, ...], receive: Action) -> int:
    """Return how many actions are computed between a receive and the action that reads it."""
    begin = row.index(receive)
    readers = ("F",) if receive.kind == "RECV_F" else ("B", "I")
    here = (receive.stage, receive.micro_batch)
    end = next(i for i, a in enumerate(row) if a.kind in readers and (a.stage, a.micro_batch) == here)
    assert begin < end
    return sum(action.computes for action in row[begin:end])


@pytest.mark.parametrize(("name", "ranks", "micro_size"), SCHEDULES)
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_only_receives_move_and_only_forward_in_time(name: str, ranks: int, micro_size: int, ahead: int) -> None:
    for row in rows(name, ranks, micro_size):
        early = receive_early(row, ahead)
        assert [a for a in early if not is_receive(a)] == [a for a in row if not is_receive(a)]
        assert [a for a in early if is_receive(a)] == [a for a in row if is_receive(a)]
        for receive in filter(is_receive, row):
            assert computed_between(early, receive) >= computed_between(row, receive)


@pytest.mark.parametrize(("name", "ranks", "micro_size"), SCHEDULES)
def test_receive_stands_so_many_computing_actions_ahead_unless_another_one_does(
    name: str, ranks: int, micro_size: int
) -> None:
    for row in rows(name, ranks, micro_size):
        early = receive_early(row, 4)
        gained = [computed_between(early, r) - computed_between(row, r) for r in filter(is_receive, row)]
        assert all(0 <= more <= 4 for more in gained)
        for before, here in itertools.pairwise(i for i, a in enumerate(early) if is_receive(a)):
            distance = sum(action.computes for action in early[before:here])
            assert distance == 0 or computed_between(early, early[here]) >= 4


def test_a_pair_of_ranks_asks_for_what_will_be_sent_at_the_beginning() -> None:
    (first, second) = rows("eager_1f1b", 2, 8)
    assert " ".join(a.kind for a in receive_early(first)[:4]) == "RECV_B RECV_B F SEND_F"
    assert [a.micro_batch for a in itertools.takewhile(is_receive, receive_early(second))] == [0, 1, 2, 3]


SIZES = [(ranks, micro_size) for ranks in (2, 3, 4, 8) for micro_size in (2 * ranks, 3 * ranks + 1, 5 * ranks)]


def slack_of_forwards(schedule: Schedule) -> int:
    """Return the least time between the end of a forward pass and the next stage's beginning with its result.

    Without those that every rank begins with, one after the other.
    """
    cells = {(c.action.kind, c.action.stage, c.action.micro_batch): c for row in schedule.timeline for c in row}
    return min(
        cells["F", stage + 1, micro].begin - cell.end
        for (kind, stage, micro), cell in cells.items()
        if kind == "F" and stage + 1 < schedule.stages and micro >= 2 * schedule.ranks - 1
    )


@pytest.mark.parametrize(("ranks", "micro_size"), SIZES)
def test_forwards_arrive_before_they_are_read(ranks: int, micro_size: int) -> None:
    assert slack_of_forwards(build_schedule("1f1b", ranks, 1, micro_size)) == 0
    assert slack_of_forwards(build_schedule("eager_1f1b", ranks, 1, micro_size)) >= 1


@pytest.mark.parametrize(("ranks", "micro_size"), SIZES)
def test_rank_r_begins_with_twice_its_distance_from_the_end(ranks: int, micro_size: int) -> None:
    for rank, row in enumerate(eager_order(ranks, micro_size)):
        kinds = "".join(kind for kind, _, _ in row)
        ahead = 2 * (ranks - rank) - 1
        assert kinds == "F" * ahead + "BF" * (micro_size - ahead) + "B" * ahead


def test_few_micro_batches_all_go_forward_first() -> None:
    assert [kind for kind, _, _ in eager_order(4, 2)[0]] == ["F", "F", "B", "B"]
    assert build_schedule("eager_1f1b", 4, 1, 2).bubble == pytest.approx(3 / 5)


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
