"""The overlap law, on a virtual clock: the real executor, with collectives that take their time on one link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from asked_cases import one_fast
from placed_parameters import placed
from torch import Tensor, nn

from msrun.runtime import shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.execute import executor, segment_runner
from msrun.runtime.execute.segment_runner import SegmentRunner
from msrun.runtime.execute.transfers import TensorFuture
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.compilation.build_call import build_compiled_call
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.partition import partition
from msrun.runtime.schedule import deferred_weights
from msrun.runtime.schedule.segments import Segment
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Mesh, TensorLayout, build_mesh

DEPTH, WIDTH, BATCH, RANKS = 8, 8, 4, 2


class Network(nn.Module):
    """Megatron's pairs: columns, then rows; one sum forward and one backward for each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(shard(nn.Linear(WIDTH, WIDTH, bias=False), ((1, 1), (RANKS, 1))) for _ in range(DEPTH))
        self.down = nn.ModuleList(
            shard(nn.Linear(WIDTH, WIDTH, bias=False), ((1, RANKS), (1, RANKS))) for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
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

    def compute(self, duration: float) -> None:
        self.now += duration
        self.computed += duration

    def send(self, value: Tensor, share: float) -> TensorFuture:
        self.link_free = max(self.now, self.link_free) + self.message * share
        self.moved += self.message * share
        arrival = self.link_free

        def arrive(result: Tensor) -> Tensor:
            self.now = max(self.now, arrival)
            return result

        return TensorFuture(value, None, arrive)


def compile_on_one_rank(copies: int, *, overlaps_weights: bool = False) -> CompiledCall:
    network = Network()
    rows = BATCH // copies
    whole = torch.ones(rows, WIDTH)
    captured = capture(find_target(network), [whole], {}, input_shapes=[(rows, WIDTH)], parameter_shapes={})
    mesh = build_mesh(RANKS)
    program = partition(
        captured,
        mesh,
        input_layouts=[TensorLayout.replicated(2)],
        strategies=strategies_of(network),
        output_batch_axes=(),
    )
    stored = {}
    for name, parameter in network.named_parameters():
        use = program.parameters[name]
        part = nn.Parameter(parameter.detach()[use.layout.slices(mesh, parameter.shape, 0)].clone())
        stored[name] = placed(name, part, tuple(parameter.shape), use.layout, mesh=mesh)
    parts, settings = BatchParts((("copies", copies),)), ParallelSettings(overlaps_weights=overlaps_weights)
    return build_compiled_call(captured, program, stored, {}, mesh=mesh, rank=0, parts=parts, settings=settings)


def products(segment: Segment, *targets: object) -> int:
    return sum(node.target in targets for node in segment.module.graph.nodes)


AT_ONCE, LATE = torch.ops.aten.linear.default, deferred_weights.deferring_linear


@pytest.fixture
def step_time(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """Run one training step and return the clock: a product takes 1 forward and 2 backward, for the whole batch."""

    def run(copies: int, message: float, *, overlaps_weights: bool = False) -> Clock:
        clock = Clock(message)
        run_forward, run_backward = SegmentRunner.run, SegmentRunner.run_backward

        def forward(self, step, copy, index, needs_grad):  # type: ignore[no-untyped-def]
            segment = self.segments[index]
            for name in segment.reads:
                self.read(step, copy, name)
            clock.compute(products(segment, AT_ONCE, LATE) / copies)
            run_forward(self, step, copy, index, needs_grad)

        def backward(self, step, copy, index):  # type: ignore[no-untyped-def]
            segment = self.segments[index]
            for name in segment.writes:
                copy.gradients[name] = [
                    part.wait() if isinstance(part, TensorFuture) else part for part in copy.gradients.get(name, [])
                ]
            clock.compute((2 * products(segment, AT_ONCE) + products(segment, LATE)) / copies)
            run_backward(self, step, copy, index)

        def compute_late() -> None:
            clock.compute(len(deferred_weights._left) / copies)
            deferred_weights.compute_deferred_weights()

        def start_forward(collective: Collective, value: Tensor, _mesh: Mesh, _rank: int, **_: bool) -> TensorFuture:
            if collective.kind == "slice":
                return TensorFuture(value[: value.shape[0] // RANKS])
            if collective.kind == "reduce_scatter":
                return clock.send(value[: value.shape[0] // RANKS], 1 / copies)
            is_big = collective.kind == "all_reduce" and value.dim() > 0
            return clock.send(value, 1 / copies) if is_big else TensorFuture(value)

        def start_backward(collective: Collective, grad: Tensor, _mesh: Mesh, _rank: int, **_: bool) -> TensorFuture:
            if collective.kind in ("slice", "reduce_scatter"):
                return TensorFuture(torch.cat([grad] * RANKS))
            return clock.send(grad, 1 / copies) if collective.kind == "enter" else TensorFuture(grad)

        with monkeypatch.context() as patch:
            patch.setattr(SegmentRunner, "run", forward)
            patch.setattr(SegmentRunner, "run_backward", backward)
            patch.setattr(segment_runner, "start_forward", start_forward)
            patch.setattr(segment_runner, "start_backward", start_backward)
            patch.setattr(executor, "compute_deferred_weights", compute_late)
            compile_on_one_rank(copies, overlaps_weights=overlaps_weights).run([torch.ones(BATCH, WIDTH)])[0].backward()
        return clock

    return run


def test_one_copy_takes_computing_and_communicating_one_after_the_other(
    step_time: Callable[..., Clock],
) -> None:
    clock = step_time(1, 2.0)
    assert clock.computed == 3 * 2 * DEPTH
    assert clock.now == pytest.approx(clock.computed + clock.moved)


@pytest.mark.parametrize("message", one_fast(2.0, 0.5, 1.0, 3.0, 6.0))
def test_two_copies_take_little_more_than_the_longer_of_the_two_in_each_direction(
    step_time: Callable[..., Clock], message: float
) -> None:
    """Forward: DEPTH messages beside 2 DEPTH units of computing; backward: beside 4 DEPTH, the first needs no sum."""
    clock = step_time(2, message)
    forward = max(2 * DEPTH, message * DEPTH)
    backward = max(4 * DEPTH, message * (clock.moved / message - DEPTH))
    edges = 2 * (2.0 + message)  # the first computing and the last message of each direction hide behind nothing
    assert clock.now <= forward + backward + edges
    assert clock.now >= forward + backward - 1e-9


@pytest.mark.slow
def test_where_both_are_about_equal_two_copies_are_at_least_1_4_times_as_fast(
    step_time: Callable[..., Clock],
) -> None:
    one, two = step_time(1, 2.5), step_time(2, 2.5)
    assert one.now / two.now >= 1.4
    assert two.now <= 1.2 * max(two.computed, two.moved)




def test_deferred_weights_hide_messages_of_the_way_back_even_with_one_copy(step_time: Callable[..., Clock]) -> None:
    """Two products' weights per message: one as long as they are costs nothing on the way back, the edge apart."""
    at_once, late = step_time(1, 2.0), step_time(1, 2.0, overlaps_weights=True)
    assert (late.computed, late.moved) == (at_once.computed, at_once.moved)
    forward = 2 * DEPTH + 2.0 * DEPTH
    assert late.now == pytest.approx(forward + 4 * DEPTH)
    assert at_once.now == pytest.approx(late.now + 2.0 * (DEPTH - 1))


@pytest.mark.parametrize("message", one_fast(2.5, 1.0, 4.0))
def test_deferred_weights_slow_two_copies_down_in_no_case(step_time: Callable[..., Clock], message: float) -> None:
    assert step_time(2, message, overlaps_weights=True).now <= step_time(2, message).now
