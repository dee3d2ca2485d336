"""Orders of a pipeline, turns of interleaved copies, and the overlap law on a virtual clock.
Local programs cut at collectives: what segments read and send, what is run again, sizes that differ by call."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from placed_parameters import placed
from small_capture import captured, layouts_of, partitioned
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, recompute, shard
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.execute import executor, segment_runner
from msrun.runtime.execute.segment_runner import SegmentRunner
from msrun.runtime.execute.transfers import TensorFuture
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.compilation.compiled import build_compiled_call
from msrun.runtime.parallel.pipeline.schedule import (
    WORDS,
    build_schedule,
    choose_schedule,
    default_chunks,
    receive_early,
    render_svg,
    render_text,
)
from msrun.runtime.parallel.recomputation import recomputed_in
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.borders import place_operators
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.events import Operators, tell
from msrun.runtime.partition.partition import lower
from msrun.runtime.partition.price import StepSpec, price
from msrun.runtime.partition.stages import assign_stages, cut_stages
from msrun.runtime.schedule import deferred_weights
from msrun.runtime.schedule.replay import (
    RecomputeSpec,
    Region,
    SavedResults,
    backward_slots,
    estimate_activations,
    find_regions,
    forgetting,
    forward_slots,
    join_slots,
    parameters_of,
    plan_replays,
)
from msrun.runtime.schedule.segments import Crossing, Segment, cut_segments, plan_buffers
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import find_module
from msrun.runtime.sharding.sizes import settle

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


of_all = pytest.mark.parametrize("name", dict.fromkeys(NAMES))


def schedules(name):
    return [(made(name, ranks, chunks, size), chunks, ranks, size) for n, chunks, ranks, size in CASES if n == name]


@of_all
def test_bubble_is_the_formula(name):
    """Narayanan et al. 2021: (P-1)/(m+P-1), interleaved (P-1)/(V m+P-1). Qi et al. 2023, ZB-H1 (torch's ZB1P): P-1
    units of idle time where F = I = W = 1: (P-1)/(3 V m + P-1). ZBV and DualPipeV likewise from 2 P micro batches."""
    for schedule, chunks, ranks, micro_size in schedules(name):
        work = chunks * micro_size * (3 if name in SPLIT else 1)
        expected = Fraction(ranks - 1, work + ranks - 1)
        assert schedule.bubble == pytest.approx(float(expected), abs=1e-12), (chunks, ranks, micro_size)


@of_all
def test_every_micro_batch_goes_once_forward_and_once_back_through_every_stage(name):
    for given in schedules(name):
        assert_each_goes_once(name, *given)


def assert_each_goes_once(name, schedule, chunks, ranks, micro_size):
    places = {(stage, micro) for stage in range(ranks * chunks) for micro in range(micro_size)}
    for rank, row in enumerate(schedule.actions):
        assert {action.stage for action in row} == set(schedule.stages_of(rank))
    done = Counter((a.kind, a.stage, a.micro_batch) for row in schedule.actions for a in row)
    assert set(done.values()) == {1}
    of_kind = {kind: {(s, m) for k, s, m in done if k == kind} for kind in ("F", "B", "I", "W")}
    assert of_kind["F"] == of_kind["B"] | of_kind["I"] == places
    assert not of_kind["B"] & of_kind["I"] and of_kind["I"] == of_kind["W"]
    assert bool(of_kind["W"]) == (name in SPLIT)


@of_all
def test_two_ranks_have_their_messages_to_each_other_in_one_order(name):
    """In both directions together: a backend without tags, such as NCCL, runs them one after the other."""
    for schedule, *_, micro_size in schedules(name):
        assert_one_order(schedule, micro_size)


def assert_one_order(schedule, micro_size):
    orders = {}
    for rank, row in enumerate(schedule.actions):
        for action in (action for action in row if not action.computes):
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


@pytest.mark.parametrize(
    ("name", "held"),
    [("gpipe", 8), ("1f1b", 4), ("eager_1f1b", 7), ("interleaved", 11), ("zero_bubble", 4), ("zbv", 8)],
)
def test_fullest_rank_holds_the_forward_passes_that_the_schedule_is_known_for(name, held):
    """4 ranks, 8 micro batches: gpipe all of them, 1f1b P, eager 2 P - 1, interleaved V P + P - 1, ZBV 2 P halves."""
    assert build_schedule(name, 4, default_chunks(name, interleave=False), 8).most_held == held


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
def test_number_that_torch_would_refuse_is_refused_in_words(name, ranks, chunks, micro_size, message):
    with pytest.raises(StrategyError, match=message) as caught:
        build_schedule(name, ranks, chunks, micro_size)
    if "nearest" in message:
        build_schedule(name, ranks, chunks, int(str(caught.value).rpartition(" ")[2]))


def test_words_of_the_setter_choose_the_schedule():
    for scheduler, interleave, name, chunks in (
        ("1f1b", False, "1f1b", 1),
        ("1f1b", True, "interleaved", 2),
        ("zero_bubble", False, "zero_bubble", 1),
        ("zero_bubble", True, "zero_bubble", 2),
        ("zbv", False, "zbv", 2),
        ("dualpipev", True, "dualpipev", 2),
    ):
        assert (choose_schedule(scheduler, interleave), default_chunks(name, interleave)) == (name, chunks)
    with pytest.raises(StrategyError, match=r"scheduler='1f1'\) \(did you mean 1f1b\?\): must be one of gpipe, 1f1b"):
        choose_schedule("1f1", interleave=False)
    for scheduler in ("gpipe", "eager_1f1b"):
        with pytest.raises(StrategyError, match='use "1f1b" or "zero_bubble" with it'):
            choose_schedule(scheduler, interleave=True)


def test_text_shows_every_action_at_its_time():
    assert render_text(build_schedule("1f1b", 2, 1, 3)) == (
        "1f1b: 2 stages, 3 micro batches, bubble 25.0 %, at most 2 forward passes held\n"
        "pp rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -\n"
        "pp rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  ."
    )
    assert "0F0 0F1 0F2 3F0 3I0 3W0" in render_text(build_schedule("zbv", 2, 2, 4))


@pytest.mark.parametrize(("name", "chunks"), list(zip(NAMES, CHUNKS, strict=True)))
def test_picture_has_a_cell_for_every_action_and_nothing_outside(name, chunks):
    schedule = build_schedule(name, 3, chunks, 6)
    root, space = ET.fromstring(render_svg(schedule)), {"s": "http://www.w3.org/2000/svg"}
    done = [a for row in schedule.actions for a in row if a.computes]
    found = Counter(title.text for title in root.findall("s:g/s:title", space))
    assert found == Counter(f"{a.kind}{a.micro_batch} of stage {a.stage}" for a in done)
    texts = root.findall("s:text", space)
    words = {text.text for text in texts}
    assert f"bubble {100 * schedule.bubble:.1f} %" in (texts[0].text or "")
    assert {"pp rank 0", "pp rank 1", "pp rank 2", "idle"} | {WORDS[a.kind] for a in done} <= words
    ends = [float(r.attrib["x"]) + float(r.attrib["width"]) for r in root.findall("s:g/s:rect", space)]
    ends += [float(t.attrib["x"]) + len(t.text or "") * float(t.attrib["font-size"]) / 2 for t in texts]
    assert max(ends) < float(root.attrib["viewBox"].split()[2])


def rows(name, ranks, micro_size):
    return build_schedule(name, ranks, default_chunks(name, interleave=False), micro_size).actions


def is_receive(action):
    return action.kind.startswith("RECV")


def computed_between(row, receive):
    """Return how many actions are computed between a receive and the action that reads it."""
    begin = row.index(receive)
    readers = ("F",) if receive.kind == "RECV_F" else ("B", "I")
    here = (receive.stage, receive.micro_batch)
    end = next(i for i, a in enumerate(row) if a.kind in readers and (a.stage, a.micro_batch) == here)
    assert begin < end
    return sum(action.computes for action in row[begin:end])


@of_all
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_receives_alone_move_so_many_computing_actions_ahead_unless_another_one_does(name, ahead):
    sizes = [(ranks, ranks * times) for ranks in (2, 3, 4) for times in (2, 3)]
    for row in [row for ranks, micro_size in sizes for row in rows(name, ranks, micro_size)]:
        early = receive_early(row, ahead)
        assert [a for a in early if not is_receive(a)] == [a for a in row if not is_receive(a)]
        assert [a for a in early if is_receive(a)] == [a for a in row if is_receive(a)]
        gained = [computed_between(early, r) - computed_between(row, r) for r in filter(is_receive, row)]
        assert all(0 <= more <= ahead for more in gained)
        for before, here in itertools.pairwise(i for i, a in enumerate(early) if is_receive(a)):
            distance = sum(action.computes for action in early[before:here])
            assert distance == 0 or computed_between(early, early[here]) >= ahead


def test_a_pair_of_ranks_asks_for_what_will_be_sent_at_the_beginning():
    (first, second) = rows("eager_1f1b", 2, 8)
    assert " ".join(a.kind for a in receive_early(first)[:4]) == "RECV_B RECV_B F SEND_F"
    assert [a.micro_batch for a in itertools.takewhile(is_receive, receive_early(second))] == [0, 1, 2, 3]


def segment(reads="", writes="", crossings=(), new_groups=()):
    module = fx.GraphModule(nn.Module(), fx.Graph())
    made = [Crossing(source, result, Collective(kind, (0,))) for source, kind, result in crossings]
    return Segment(module, reads.split(), writes.split(), made, list(new_groups), list(new_groups))


MEGATRON = [
    segment("x", "norm", [("norm", "enter", "entered")]),
    segment("entered", "part", [("part", "all_reduce", "whole")]),
    segment("whole", "norm2", [("norm2", "enter", "entered2")]),
    segment("entered2", "part2", [("part2", "all_reduce", "whole2")]),
    segment("whole2", "loss"),
]
"""Two halves of a Megatron block: partial sums move forward, entered values' gradients move back."""
CHAIN = [segment("x", "a", [("a", "reduce_scatter", "b")]), segment("", "", [("b", "gather", "c")]), segment("c", "d")]
FAR = [segment("x", "a b", [("a", "all_reduce", "far")]), segment("b", "c"), segment("c far", "d")]
TWO = [
    segment("x", "a b", [("a", "all_reduce", "A"), ("b", "all_reduce", "B")]),
    segment("A", "c"),
    segment("B c", "d"),
]
LAYERS = [segment("x", "a", new_groups=[0]), segment("a", "b", new_groups=[1]), segment("b", "c")]


@pytest.mark.parametrize(
    ("segments", "gathered", "recomputed", "forward", "backward"),
    [
        # Segment 2 writes norm2, whose gradient is summed; the way back of `whole` moves nothing.
        (MEGATRON, set(), set(), [[0, 1], [2, 3], [4]], [[4, 3], [2, 1], [0]]),
        (MEGATRON, set(), {3}, [[0, 1], [2, 3], [4]], [[4], [3], [2, 1], [0]]),
        (CHAIN, set(), set(), [[0], [1], [2]], [[2, 1], [0]]),
        (FAR, set(), set(), [[0, 1], [2]], None),
        (TWO, set(), set(), [[0], [1, 2]], None),  # other copies had their turn since the one that B was sent in
        (LAYERS, {0, 1}, set(), [[0], [1, 2]], [[2, 1], [0]]),
        (LAYERS, set(), set(), [[0, 1, 2]], [[2, 1, 0]]),  # stored as they are used
        ([], set(), set(), [], []),
    ],
    ids=["sums", "recomputed", "chain", "late", "two", "gathered", "stored", "nothing"],
)
def test_turns_end_where_something_is_waited_for(segments, gathered, recomputed, forward, backward):
    assert forward_slots(segments, gathered) == forward
    if backward is not None:
        assert backward_slots(segments, gathered, recomputed) == backward


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
def test_no_turn_ends_inside_a_span(slots, spans, joined):
    assert join_slots(slots, spans) == joined


DEPTH, PAIR_WIDTH, BATCH, RANKS = 4, 8, 4, 2


class Pairs(nn.Module):
    """Megatron's pairs: columns, then rows; one sum forward and one backward for each."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList(
            shard(nn.Linear(PAIR_WIDTH, PAIR_WIDTH, bias=False), ((1, 1), (RANKS, 1))) for _ in range(DEPTH)
        )
        self.down = nn.ModuleList(
            shard(nn.Linear(PAIR_WIDTH, PAIR_WIDTH, bias=False), ((1, RANKS), (1, RANKS))) for _ in range(DEPTH)
        )

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = down(torch.relu(up(x)))
        return x.pow(2).mean()


@dataclass
class Clock:
    """Virtual time of one rank and of its link, which carries one message after the other."""

    message: float
    now: float = 0.0
    link_free: float = 0.0
    computed: float = 0.0
    moved: float = 0.0

    def compute(self, duration):
        self.now += duration
        self.computed += duration

    def send(self, value, share):
        self.link_free = max(self.now, self.link_free) + self.message * share
        self.moved += self.message * share
        arrival = self.link_free

        def arrive(result):
            self.now = max(self.now, arrival)
            return result

        return TensorFuture(value, None, arrive)


@cache
def captured_pairs(copies):
    network = Pairs()
    return network, captured(network, torch.ones(BATCH // copies, PAIR_WIDTH))


def compile_on_one_rank(copies, *, overlaps_weights=False):
    (network, graph), mesh = captured_pairs(copies), build_mesh(RANKS)
    program = partitioned(graph, RANKS)
    stored = {}
    for name, parameter in network.named_parameters():
        use = program.parameters[name]
        part = nn.Parameter(parameter.detach()[use.layout.slices(mesh, parameter.shape, 0)].clone())
        stored[name] = placed(name, part, tuple(parameter.shape), use.layout, mesh=mesh)
    parts, settings = BatchParts((("copies", copies),)), ParallelSettings(overlaps_weights=overlaps_weights)
    return build_compiled_call(graph, program, stored, {}, mesh=mesh, rank=0, parts=parts, settings=settings)


def products(segment, *targets):
    return sum(node.target in targets for node in segment.module.graph.nodes)


AT_ONCE, LATE = torch.ops.aten.linear.default, deferred_weights.deferring_linear


@pytest.fixture
def step_time(monkeypatch):
    """Run one training step and return the clock: a product takes 1 forward and 2 backward, for the whole batch."""

    def run(copies, message, *, overlaps_weights=False):
        clock = Clock(message)
        run_forward, run_backward = SegmentRunner.run, SegmentRunner.run_backward

        def forward(self, step, copy, index, needs_grad):
            segment = self.segments[index]
            for name in segment.reads:
                self.read(step, copy, name)
            clock.compute(products(segment, AT_ONCE, LATE) / copies)
            run_forward(self, step, copy, index, needs_grad)

        def backward(self, step, copy, index):
            segment = self.segments[index]
            for name in segment.writes:
                copy.gradients[name] = [
                    part.wait() if isinstance(part, TensorFuture) else part for part in copy.gradients.get(name, [])
                ]
            clock.compute((2 * products(segment, AT_ONCE) + products(segment, LATE)) / copies)
            run_backward(self, step, copy, index)

        def compute_late():
            clock.compute(len(deferred_weights._left) / copies)
            deferred_weights.compute_deferred_weights()

        def start_forward(collective, value, _mesh, _rank, **_):
            if collective.kind == "slice":
                return TensorFuture(value[: value.shape[0] // RANKS])
            if collective.kind == "reduce_scatter":
                return clock.send(value[: value.shape[0] // RANKS], 1 / copies)
            is_big = collective.kind == "all_reduce" and value.dim() > 0
            return clock.send(value, 1 / copies) if is_big else TensorFuture(value)

        def start_backward(collective, grad, _mesh, _rank, **_):
            if collective.kind in ("slice", "reduce_scatter"):
                return TensorFuture(torch.cat([grad] * RANKS))
            return clock.send(grad, 1 / copies) if collective.kind == "enter" else TensorFuture(grad)

        with monkeypatch.context() as patch:
            patch.setattr(SegmentRunner, "run", forward)
            patch.setattr(SegmentRunner, "run_backward", backward)
            patch.setattr(segment_runner, "start_forward", start_forward)
            patch.setattr(segment_runner, "start_backward", start_backward)
            patch.setattr(executor, "compute_deferred_weights", compute_late)
            compile_on_one_rank(copies, overlaps_weights=overlaps_weights).run([torch.ones(BATCH, PAIR_WIDTH)])[
                0
            ].backward()
        return clock

    return run


def test_one_copy_takes_computing_and_communicating_one_after_the_other(step_time):
    clock = step_time(1, 2.0)
    assert clock.computed == 3 * 2 * DEPTH
    assert clock.now == pytest.approx(clock.computed + clock.moved)


@pytest.mark.parametrize("message", one_fast(2.0, 0.5, 1.0, 3.0, 6.0))
def test_two_copies_take_little_more_than_the_longer_of_the_two_in_each_direction(step_time, message):
    """Forward: DEPTH messages beside 2 DEPTH units of computing; backward: beside 4 DEPTH, the first needs no sum."""
    clock = step_time(2, message)
    forward = max(2 * DEPTH, message * DEPTH)
    backward = max(4 * DEPTH, message * (clock.moved / message - DEPTH))
    edges = 2 * (2.0 + message)  # the first computing and the last message of each direction hide behind nothing
    assert clock.now <= forward + backward + edges
    assert clock.now >= forward + backward - 1e-9


def test_deferred_weights_hide_messages_of_the_way_back_even_with_one_copy(step_time):
    """Two products' weights per message: one as long as they are costs nothing on the way back, the edge apart."""
    at_once, late = step_time(1, 2.0), step_time(1, 2.0, overlaps_weights=True)
    assert (late.computed, late.moved) == (at_once.computed, at_once.moved)
    forward = 2 * DEPTH + 2.0 * DEPTH
    assert late.now == pytest.approx(forward + 4 * DEPTH)
    assert at_once.now == pytest.approx(late.now + 2.0 * (DEPTH - 1))


@pytest.mark.slow
@pytest.mark.parametrize("message", [2.5, 1.0, 4.0])
def test_deferred_weights_slow_two_copies_down_in_no_case(step_time, message):
    assert step_time(2, message, overlaps_weights=True).now <= step_time(2, message).now


def program_of(network, ranks=4, rows=4, width=8):
    """Return the program of ranks that are given whole inputs."""
    return partitioned(captured(network, torch.ones(rows, width)), ranks, differentiable_inputs=frozenset({0}))


def test_view_of_a_parameter_holds_its_group_to_the_last_reader():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            turned, doubled = self.first.weight.t(), self.first.weight * 2
            x = self.middle(self.first(x))
            return x @ turned.reshape(2, 2, 4).flatten(0, 1), x @ doubled

    alone = program_of(Late(), 1, 4, 4)
    first, middle = (alone.parameters[name].node.name for name in ("first.weight", "middle.weight"))
    memory_of = tell(alone).parameter_memory
    assert set(memory_of.values()) == {first, middle}
    views = [node for node in alone.graph.nodes if node.op == "call_function" and node.name in memory_of]
    assert {str(node.target) for node in views} == {"aten.t.default", "aten.reshape.default"}
    segments = cut_segments(alone, {first: 0, middle: 1}, memory_of=memory_of)
    assert [segment.groups for segment in segments] == [[0], [0, 1]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, *, shared=False):
        super().__init__()
        self.first = Block()
        self.second = self.first if shared else Block()

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).pow(2).mean()


def test_results_that_are_kept_are_taken_when_a_region_runs_again():
    (segment,) = cut_segments(program_of(Block(), 1), {})
    saved, counts = SavedResults(lambda target: target is torch.ops.aten.linear.default), Counter[str]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    inputs = [torch.randn(shape) for shape in ((4, 8), (16, 8), (16,), (8, 16))]
    with forgetting():
        (right,) = saved.run(segment.module, inputs, again=False)
    with Watch():
        (again,) = saved.run(segment.module, inputs, again=True)
    assert torch.equal(again, right)
    assert counts == {"aten.t.default": 2, "aten.tanh.default": 1, "aten.add.Tensor": 1}


def test_two_calls_of_one_module_are_two_regions_and_what_the_executor_gives_divides_none():
    shared, drawing = Blocks(shared=True), Blocks()
    drawing.first.up = nn.Sequential(drawing.first.up, nn.Dropout(0.1))
    for network, right in ((shared, ["first", "first"]), (drawing, ["first"])):
        recompute(network.first)
        program = program_of(network)
        assert [region.path for region in find_regions(program, recomputed_in(network))] == right
    (nothing,) = plan_replays(CHAIN, [Region("idle", RecomputeSpec())], [])
    assert (nothing.segments, nothing.crossings, nothing.dropped) == ((), {}, frozenset())


@pytest.mark.parametrize(("path", "right"), [("a.b.c", "a.b"), ("a", None), ("a.bc", None), (None, None), ("d", "d")])
def test_operator_belongs_to_the_recomputed_module_around_it(path, right):
    assert find_module(path, {"a.b": RecomputeSpec(), "d": RecomputeSpec()}) == right
    assert path is None or find_module(path, {"": RecomputeSpec()}) == ""


def test_parent_and_child_cannot_both_be_recomputed():
    network = Blocks()
    recompute(network.first.up)
    with pytest.raises(StrategyError, match=r"\(Block\): Linear up in it is recomputed already; configure one"):
        recompute(network.first)
    with pytest.raises(StrategyError, match=r"recompute\(Linear\): it is recomputed already"):
        recompute(network.first.up)
    recompute(network.second)
    network.second.up.__dict__["_msrun_recompute"] = RecomputeSpec()
    with pytest.raises(StrategyError, match=r"second.up lies in second, which is recomputed already"):
        recomputed_in(network)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        *((lambda s=s: recompute(Block(), save=s), "function of one") for s in (["linear"], [torch.relu], 3)),
        (lambda: recompute(torch.relu), "a torch module is expected"),
        *(
            (lambda mb=limit: AutoParallel(Blocks()).recompute("auto", memory_limit_mb=mb), "a number of MB above 0")
            for limit in (0, -1, "1", True, None, float("nan"))
        ),
        (lambda: AutoParallel(Blocks()).recompute("full", memory_limit_mb=1), 'must be "auto"; for one module use'),
    ],
)
def test_wrong_words_of_recompute_are_refused(ask, text):
    with pytest.raises(StrategyError, match=text):
        ask()


def test_without_capture_a_module_runs_under_torchs_checkpointing_where_there_are_gradients():
    module, calls = recompute(Block()), list[int]()
    module.up.register_forward_hook(lambda *_: calls.append(1))
    network = nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 1))
    AutoParallel(network)(torch.ones(4, 8)).sum().backward()
    assert len(calls) == 2
    assert "forward" not in vars(module)
    assert module.up.weight.grad is not None
    with torch.no_grad():
        AutoParallel(network)(torch.ones(4, 8))
    assert len(calls) == 3


def test_what_was_forgotten_cannot_be_used_for_a_gradient():
    weight = torch.ones(2, requires_grad=True)
    with forgetting():
        loss = (weight * weight).sum()
    with pytest.raises(RuntimeError, match="before it was run again"):
        loss.backward()


pytestmark = pytest.mark.filterwarnings("ignore:Raw Sym")
ROWS, TOKENS, WIDTH = 4, 6, 8


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        rows, tokens, _ = x.shape
        halves = self.layer(x).view(rows, tokens, 2, WIDTH).transpose(1, 2).reshape(rows, 2 * tokens, WIDTH)
        return F.softmax(halves, 1).sum() / tokens**0.5


@cache
def sized():
    """Return a network and its graph for any number of rows and tokens."""
    network, x = Halves(), torch.ones(ROWS, TOKENS, WIDTH)
    return network, captured(network, x, free=((0, 0), (0, 1)), keeps_sizes=True)


def test_a_plan_asks_of_a_size_only_that_its_parts_are_equal():
    (_, graph), mesh = sized(), build_mesh(2)
    decide(graph, mesh, Constraints(layouts_of(graph, mesh, is_cut=True)))
    assert [sizes.why_not([(ROWS + 2, TOKENS + 5, WIDTH)]) for sizes in graph.sizes] == ["", ""]
    assert "Mod(size[0][0], 2)" in graph.sizes[-1].why_not([(ROWS + 1, TOKENS, WIDTH)])
    assert graph.sizes[-1].is_free


def test_a_size_of_one_is_another_program():
    assert sized()[1].sizes[0].why_not([(ROWS, 1, WIDTH)])


@pytest.mark.parametrize(("rows", "tokens"), [(ROWS, TOKENS), (6, 3), (2, 9)])
def test_a_program_for_any_size_computes_what_the_network_does(rows, tokens):
    network, graph = sized()
    program = lower(graph, decide(graph, build_mesh(1), Constraints([TensorLayout.replicated(3)])))
    settle(program.graph)
    (segment,) = cut_segments(program, {})
    segment.use(graph.sizes[-1].find([(rows, tokens, WIDTH)]))
    x = torch.randn(rows, tokens, WIDTH)
    given = {"input_0": x, "p_layer_weight": network.layer.weight, "p_layer_bias": network.layer.bias}
    (result,) = segment.run(*(given[name] for name in segment.reads))
    torch.testing.assert_close(result, network(x))


class Everything(nn.Module):
    """Parts that are cut and run again, random numbers, statistics, and a loss with a weight for each class."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 5)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.weight = nn.Buffer(torch.ones(5))

    def forward(self, x, labels):
        x = self.drop(self.norm(self.first(x)))
        return F.cross_entropy(self.head(self.second(x)), labels, self.weight) + self.second.down.weight.sum(), x


def test_how_a_program_is_decided_cut_issued_and_priced_is_as_it_is_frozen(golden):
    network, mesh = Everything(), build_mesh(4)
    operators = Operators(mesh)
    for block in (network.first, network.second):
        shard(block.up, ((1, 1), (4, 1), (4,)))
    shard(network.first.down, ((1, 4), (1, 4)))
    recompute(network.first)
    recompute(network.second, save=(torch.ops.aten.tanh,), mp_comm_recompute=False)
    graph = captured(network, torch.ones(8, 8), torch.zeros(8, dtype=torch.int64))
    decisions = decide(graph, mesh, Constraints(layouts_of(graph, mesh, is_cut=True)))
    program, whole = lower(graph, decisions), lower(graph, decisions)
    assigned = assign_stages(graph, 2, {}, "")
    lines = [*program.operators, *program.redistributions, *program.notes, *program.output_layouts, assigned]
    for stage in cut_stages(whole, assigned.stage_of, 2, tell(whole, operators).values, whole.outputs[0]):
        parts = stage.user_inputs, stage.reads, stage.received, stage.sent, stage.results, stage.made
        lines += [*parts, *stage.program.graph.nodes, stage.program.buffers, stage.program.buffer_updates]
    place_operators(program, stored={}, moved={o.name for o in program.operators if o.module_path == "head"})
    events, regions = tell(program, operators), find_regions(program, recomputed_in(network))
    numbers = {use.node.name: int("first" not in name) for name, use in program.parameters.items()}
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    segments = cut_segments(program, numbers, region_of, events.parameter_memory)
    for each in segments:
        kinds = each.level, each.region, each.on_host, each.groups, each.new_groups, each.reads, each.writes
        lines += [*kinds, *each.crossings, *each.module.graph.nodes]
    replays, plan = plan_replays(segments, regions, program.outputs), plan_buffers(program, segments)
    lines += [(r.segments, r.crossings, sorted(r.dropped)) for r in replays]
    groups = [SimpleNamespace(shard_axes=(0,), regathers=True), SimpleNamespace(shard_axes=(), regathers=False)]
    sums = [SimpleNamespace(placeholders=[name for name in numbers if numbers[name] == n]) for n in (0, 1)]
    last = {replay.last for replay in replays if replay.segments}
    lines += [plan, *vars(executor.plan_issue_order(segments, groups, sums, last, plan.spans)).items()]
    cut = {"second.up.weight": (0, 1), "second.down.weight": (0,)}
    step = StepSpec(cut, regathers=True, bucket_bytes=80, alone_bytes=160)
    costs = price(graph, decisions, PROFILES["h100"], step, events=events)
    lines += price(graph, decisions, PROFILES["h100"], replace(step, regathers=False), events=events).gathers
    lines += [estimate_activations(events, segments, replays, 2), costs.summary, costs.forward_s, costs.activations]
    lines += [*costs.operators, *costs.gathers, *costs.sums, sorted(parameters_of(program, regions))]
    for everywhere in (False, True):  # where messages wait for it; but not of the host, nor where results are chosen
        dimensions = {use.node.name: len(use.shape) for use in program.parameters.values()}
        deferred_weights.defer_weights(segments, dimensions, regions, everywhere=everywhere)
        lines += map(deferred_weights.deferred_in, segments)
    numbered = re.sub(r"\d+\.\d+(e-\d+)?", lambda found: f"{float(found[0]):.6g}", "\n".join(map(repr, lines)))
    golden("plan_of_everything.txt", f"{numbered}\n")
