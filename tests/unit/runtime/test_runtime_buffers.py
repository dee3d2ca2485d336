"""Buffers and other tensors that a network writes into."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from placed_parameters import placed
from torch import Tensor, fx, nn

from msrun.errors import CaptureError
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.compilation.build_call import build_compiled_call
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.segments import BufferPlan, cut_segments, may_take_gradient, may_take_source, plan_buffers
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Mesh, TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import apply_collective


class Averaging(nn.Module):
    """Keeps an average of what `update` says."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.average: Tensor
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def in_place(self: Averaging, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.average.mul_(0.9).add_(self.layer(x).mean(0), alpha=0.1)
        self.calls += 1
    return self.layer(x) - self.average


def assigned(self: Averaging, x: Tensor) -> Tensor:
    self.average = 0.9 * self.average + 0.1 * self.layer(x).detach().mean(0)
    self.calls = self.calls + 1
    return self.layer(x) - self.average


def copied(self: Averaging, x: Tensor) -> Tensor:
    before = self.average * 2
    self.average.copy_((0.9 * self.average + 0.1 * self.layer(x).mean(0)).detach())
    self.calls.fill_(7)
    return self.layer(x) - self.average + before.clone()


def reset(self: Averaging, x: Tensor) -> Tensor:
    y = self.layer(x) - self.average
    self.average.zero_()
    self.calls.add_(1).mul_(2)
    return y


def late_reader(self: Averaging, x: Tensor) -> Tensor:
    before = self.average.clone()
    self.average.mul_(0.5)
    return self.layer(x) * before + self.average


def in_part(self: Averaging, x: Tensor) -> Tensor:
    self.average[0] = x.mean()
    view = self.average.view(2, 2)
    view[1] += self.average[0]
    return self.layer(x) - view.flatten()


def kept(self: Averaging, x: Tensor) -> Tensor:
    """The backward pass needs the value from before."""
    y = self.layer(x) * self.average
    self.average = self.average * 0.5
    return y


FORMS = [kept, in_place, assigned, copied, reset, late_reader, in_part]


def captured(network: nn.Module, x: Tensor) -> CapturedGraph:
    return capture(find_target(network), [x], {}, input_shapes=[tuple(x.shape)], parameter_shapes={})


def partitioned(graph: CapturedGraph, mesh: Mesh, ndim: int = 2) -> LocalProgram:
    layout = TensorLayout((mesh.axes, *((),) * (ndim - 1)))
    return partition(graph, mesh, input_layouts=[layout], strategies={}, output_batch_axes=mesh.axes)


def compiled(network: nn.Module, x: Tensor, copies: int) -> CompiledCall:
    graph = captured(network, x[: len(x) // copies])
    program = partitioned(graph, build_mesh(1))
    stored = {name: placed(name, parameter) for name, parameter in network.named_parameters()}
    buffers = dict(network.named_buffers())
    parts = BatchParts((("copies", copies),))
    return build_compiled_call(graph, program, stored, buffers, mesh=build_mesh(1), rank=0, parts=parts)


@pytest.mark.parametrize("form", every_third_fast(FORMS), ids=lambda form: form.__name__)
@pytest.mark.parametrize("copies", [1, 2])
def test_buffers_and_results_are_those_of_copies_run_one_after_the_other(
    form: Callable[[Any, Tensor], Tensor], copies: int
) -> None:
    torch.manual_seed(0)
    network, serial = Averaging(form).double(), Averaging(form).double()
    serial.load_state_dict(network.state_dict())
    network.average.fill_(3.0)
    serial.average.fill_(3.0)
    held = network.average
    x = torch.randn(4, 4, dtype=torch.float64)
    call = compiled(network, x, copies)
    for _ in range(3):
        result = call.run([x])[0]
        right = torch.cat([serial(part) for part in x.chunk(copies)])
        torch.testing.assert_close(result, right)
        result.sum().backward()
        right.sum().backward()
        for name, value in serial.named_buffers():
            torch.testing.assert_close(dict(network.named_buffers())[name], value)
    for (name, mine), theirs in zip(network.named_parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    assert network.average is held


def test_evaluation_changes_no_buffer() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    assert captured(network, torch.ones(2, 4)).buffer_updates == {}


def test_batch_norm_that_is_called_twice_counts_twice() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), norm := nn.BatchNorm1d(4), nn.ReLU(), norm).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    call = compiled(network, x, 1)
    call.run([x])
    assert int(norm.num_batches_tracked) == 2
    mine = norm.running_mean.clone()
    norm.reset_running_stats()
    network(x)
    torch.testing.assert_close(mine, norm.running_mean)


def test_result_of_a_first_norm_may_be_read_after_the_second() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.norm(x)
            return self.norm(first) + first

    assert set(captured(Residual(), torch.ones(2, 4)).buffer_updates) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_value_with_a_gradient_is_refused() -> None:
    def attached(self: Averaging, x: Tensor) -> Tensor:
        self.average = self.average + self.layer(x).mean(0)
        return self.layer(x) - self.average

    network = Averaging(attached)
    call = compiled(network, torch.ones(2, 4), 1)
    with pytest.raises(CaptureError, match=r"buffer average is set to a value that gradients flow through.*detach\(\)"):
        call.run([torch.ones(2, 4)])
    assert network.average.tolist() == [0.0] * 4
    with torch.no_grad():
        call.run([torch.ones(2, 4)])
    assert network.average.tolist() != [0.0] * 4


def test_buffer_keeps_its_shape_and_type() -> None:
    def grown(self: Averaging, x: Tensor) -> Tensor:
        self.average = torch.cat([self.average, x[0]])
        return self.layer(x)

    network = Averaging(grown)
    with pytest.raises(CaptureError, match=r"buffer average is torch.float32 of shape \(4,\) before .* \(8,\) after"):
        captured(network, torch.ones(2, 4))
    assert network.average.shape == (4,)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda s, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (s.layer(x),)), "cond"),
    ],
)
def test_regions_of_other_kinds_are_refused_by_name(call: Callable[[Any, Tensor], Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=f"{name} holds operators that .*data_parallel") as caught:
        captured(Averaging(call), torch.ones(2, 4))
    assert "\n" not in str(caught.value)


def test_no_gradient_flows_out_of_a_region_without_gradients() -> None:
    def forward(self: Averaging, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).amax()
            with torch.enable_grad():
                y = self.layer(x)
        return y / scale

    network, serial = Averaging(forward).double(), Averaging(forward).double()
    serial.load_state_dict(network.state_dict())
    x = torch.randn(2, 4, dtype=torch.float64)
    compiled(network, x, 1).run([x])[0].sum().backward()
    serial(x).sum().backward()
    torch.testing.assert_close(network.layer.weight.grad, serial.layer.weight.grad)


# -- when buffers are written -------------------------------------------------------------------------------------


def buffer_plan(network: nn.Module, x: Tensor) -> BufferPlan:
    program = partitioned(captured(network, x), build_mesh(4), x.dim())
    segments = cut_segments(program, {})
    plan = plan_buffers(program, segments)
    assert [index for span in plan.spans for index in span] == list(range(len(segments)))
    return plan


def test_copies_of_batch_norm_take_turns_in_every_segment() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    plan = buffer_plan(network, torch.ones(4, 3, 2, 2))
    assert len(plan.spans) > 2
    assert all(len(span) == 1 for span in plan.spans)
    assert len(plan.written) == 6


def test_segments_between_the_first_read_and_the_write_of_a_buffer_are_one_span() -> None:
    def forward(self: Averaging, x: Tensor) -> Tensor:
        y = self.layer(x) - self.average
        self.average.copy_(F.relu(y).detach().mean(0))
        return F.cross_entropy(y, y.detach().softmax(1))

    plan = buffer_plan(Averaging(forward), torch.ones(4, 4))
    (last,) = plan.updates
    assert last > 0, "the mean over the batch needs a collective"
    assert plan.spans[0] == range(last + 1)
    assert all(len(span) == 1 for span in plan.spans[1:])


def test_network_without_changed_buffers_has_no_span_of_several_segments() -> None:
    plan = buffer_plan(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.ones(4, 4))
    assert all(len(span) == 1 for span in plan.spans)
    assert plan.written == []


aten = torch.ops.aten
SUM, ENTER = Collective("all_reduce", (0,)), Collective("enter", (0,))


class Graph:
    """x and w, and what is done with them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.w = self.graph.placeholder("x"), self.graph.placeholder("w")

    def call(self, target: object, *args: fx.Node) -> fx.Node:
        return self.graph.call_function(target, args)  # type: ignore[arg-type]

    def move(self, value: fx.Node, collective: Collective) -> fx.Node:
        return self.graph.call_function(apply_collective, (value,), {"collective": collective})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("target", "may"),
    [
        (aten.linear.default, True),
        (aten.mm.default, True),
        (aten.bmm.default, True),
        (aten.matmul.default, True),
        (aten.add.Tensor, False),  # may be read again by who made it: only products are known to keep factors alone
        (aten.sigmoid.default, False),  # its backward pass reads its result
        (aten.view.default, False),  # another's memory
        (operator.getitem, False),
    ],
)
def test_sum_takes_the_memory_of_a_product_that_nobody_else_reads(target: object, may: bool) -> None:
    graph = Graph()
    total = graph.move(graph.call(target, graph.x, graph.w), SUM)
    assert may_take_source(total, SUM, set()) is may


def test_product_that_somebody_else_reads_stays_as_it_is() -> None:
    graph = Graph()
    product = graph.call(aten.linear.default, graph.x, graph.w)
    total = graph.move(product, SUM)
    assert not may_take_source(total, SUM, {product}), "a result of the network"
    graph.call(aten.relu.default, product)
    assert not may_take_source(total, SUM, set()), "an operator"


def test_gathers_and_inputs_stay_as_they_are() -> None:
    graph = Graph()
    gather = Collective("gather", (0,), 0)
    assert not may_take_source(graph.move(graph.call(aten.linear.default, graph.x, graph.w), gather), gather, set())
    assert not may_take_source(graph.move(graph.x, SUM), SUM, set())


def test_gradient_of_what_only_products_read_may_be_taken() -> None:
    graph = Graph()
    entered = graph.move(graph.x, ENTER)
    graph.call(aten.linear.default, entered, graph.w)
    graph.call(aten.linear.default, entered, graph.w)
    assert may_take_gradient(entered, ENTER, set())
    assert not may_take_gradient(entered, ENTER, {entered}), "the caller's gradient comes in there"


@pytest.mark.parametrize("reader", ["nobody", "a sum", "a bias"])
def test_gradient_that_may_be_anothers_stays_as_it_is(reader: str) -> None:
    graph = Graph()
    entered = graph.move(graph.x, ENTER)
    if reader == "a sum":
        graph.call(aten.linear.default, entered, graph.w)
        graph.call(aten.add.Tensor, entered, graph.w)
    elif reader == "a bias":
        graph.call(aten.linear.default, graph.x, graph.w, entered)
    assert not may_take_gradient(entered, ENTER, set())
