"""Compiled calls in one process: buffers that a network writes into, memory that is taken over, and torch.compile."""

import copy
import functools
import operator
import shutil

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from placed_parameters import placed
from small_capture import captured, partitioned
from torch import Tensor, fx, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.compilation.compiled import build_compiled_call
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.schedule.deferred_weights import CompileSpec
from msrun.runtime.schedule.replay import RecomputeSpec
from msrun.runtime.schedule.segments import cut_segments, may_take_gradient, may_take_source, plan_buffers
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import build_mesh
from msrun.runtime.sharding.operators.rule import apply_collective


class Averaging(nn.Module):
    """Keeps an average of what `update` says."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.average: Tensor
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def in_place(self, x):
    with torch.no_grad():
        self.average.mul_(0.9).add_(self.layer(x).mean(0), alpha=0.1)
        self.calls += 1
    return self.layer(x) - self.average


def assigned(self, x):
    self.average = 0.9 * self.average + 0.1 * self.layer(x).detach().mean(0)
    self.calls = self.calls + 1
    return self.layer(x) - self.average


def written_between_reads(self, x):
    before = self.average * 2
    self.average.copy_((0.9 * self.average + 0.1 * self.layer(x).mean(0)).detach())
    self.calls.fill_(7)
    y = self.layer(x) - self.average + before.clone()
    self.calls.add_(1).mul_(2)
    return y


def in_part(self, x):
    self.average[0] = x.mean()
    view = self.average.view(2, 2)
    view[1] += self.average[0]
    return self.layer(x) - view.flatten()


def kept(self, x):
    """The backward pass needs the value from before."""
    y = self.layer(x) * self.average
    self.average = self.average * 0.5
    return y


FORMS = [
    kept,
    written_between_reads,
    in_part,
    *(pytest.param(form, marks=pytest.mark.slow) for form in (in_place, assigned)),
]


def compiled(network, x, copies=1, **more):
    return compiled_of(captured(network, x[: len(x) // copies]), network, copies, **more)


def compiled_of(graph, network, copies, **more):
    program = partitioned(graph, 1)
    stored = {name: placed(name, parameter) for name, parameter in network.named_parameters()}
    more |= {"mesh": build_mesh(1), "rank": 0, "parts": BatchParts((("copies", copies),))}
    return build_compiled_call(graph, program, stored, dict(network.named_buffers()), **more), program


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("copies", one_fast(2, 1))
def test_buffers_and_results_are_those_of_copies_in_turn(form, copies):
    torch.manual_seed(0)
    network = Averaging(form).double()
    network.average.fill_(3.0)
    serial, held = copy.deepcopy(network), network.average
    x = torch.randn(4, 4, dtype=torch.float64)
    call, _ = compiled(network, x, copies)
    for _ in range(3):
        result = call.run([x])[0]
        right = torch.cat([serial(part) for part in x.chunk(copies)])
        torch.testing.assert_close(result, right)
        result.sum().backward()
        right.sum().backward()
        torch.testing.assert_close([*network.buffers()], [*serial.buffers()])
    torch.testing.assert_close([p.grad for p in network.parameters()], [p.grad for p in serial.parameters()])
    assert network.average is held


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        first = self.norm(x)
        return self.norm(first) + first


def test_batch_norm_that_is_called_twice_counts_twice_and_in_evaluation_not_at_all():
    torch.manual_seed(0)
    network = Residual().double()
    serial, x = copy.deepcopy(network), torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(compiled(network, x)[0].run([x])[0], serial(x))
    assert int(network.norm.num_batches_tracked) == 2
    torch.testing.assert_close([*network.buffers()], [*serial.buffers()])
    assert captured(network.eval(), x).buffer_updates == {}


def test_value_with_a_gradient_is_refused():
    def attached(self, x):
        self.average = self.average + self.layer(x).mean(0)
        return self.layer(x) - self.average

    network = Averaging(attached)
    call, _ = compiled(network, torch.ones(2, 4))
    with pytest.raises(CaptureError, match=r"buffer average is set to a value that gradients flow through.*detach\(\)"):
        call.run([torch.ones(2, 4)])
    assert network.average.tolist() == [0.0] * 4
    with torch.no_grad():
        call.run([torch.ones(2, 4)])
    assert network.average.tolist() != [0.0] * 4


def test_buffer_keeps_its_shape_and_type():
    def grown(self, x):
        self.average = torch.cat([self.average, x[0]])
        return self.layer(x)

    network = Averaging(grown)
    with pytest.raises(CaptureError, match=r"buffer average is torch.float32 of shape \(4,\) before .* \(8,\) after"):
        captured(network, torch.ones(2, 4))
    assert network.average.shape == (4,)


def test_no_gradient_flows_out_of_a_region_without_gradients():
    def forward(self, x):
        with torch.no_grad():
            scale = self.layer(x).amax()
            with torch.enable_grad():
                y = self.layer(x)
        return y / scale

    network = Averaging(forward).double()
    serial, x = copy.deepcopy(network), torch.randn(2, 4, dtype=torch.float64)
    compiled(network, x)[0].run([x])[0].sum().backward()
    serial(x).sum().backward()
    torch.testing.assert_close(network.layer.weight.grad, serial.layer.weight.grad)


def buffer_plan(network, x):
    program = partitioned(captured(network, x), is_cut=True)
    segments = cut_segments(program, {})
    plan = plan_buffers(program, segments)
    assert [index for span in plan.spans for index in span] == list(range(len(segments)))
    return plan


@pytest.mark.parametrize(
    ("network", "x", "written"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
            torch.ones(4, 3, 2, 2),
            6,
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.ones(4, 4), 0),
    ],
    ids=["batch norms", "none"],
)
def test_copies_of_batch_norm_take_turns_in_every_segment(network, x, written):
    plan = buffer_plan(network, x)
    assert len(plan.spans) > (2 if written else 0)
    assert all(len(span) == 1 for span in plan.spans)
    assert len(plan.written) == written


def test_segments_between_the_first_read_and_the_write_of_a_buffer_are_one_span():
    def forward(self, x):
        y = self.layer(x) - self.average
        self.average.copy_(F.relu(y).detach().mean(0))
        return F.cross_entropy(y, y.detach().softmax(1))

    plan = buffer_plan(Averaging(forward), torch.ones(4, 4))
    (last,) = plan.updates
    assert last > 0, "the mean over the batch needs a collective"
    assert plan.spans[0] == range(last + 1)
    assert all(len(span) == 1 for span in plan.spans[1:])


aten = torch.ops.aten
SUM, ENTER = Collective("all_reduce", (0,)), Collective("enter", (0,))


class Graph:
    """x and w, and what is done with them."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x, self.w = self.graph.placeholder("x"), self.graph.placeholder("w")

    def call(self, target, *args):
        return self.graph.call_function(target, args)

    def move(self, value, collective):
        return self.graph.call_function(apply_collective, (value,), {"collective": collective})


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
def test_sum_takes_the_memory_of_a_product_that_nobody_else_reads(target, may):
    graph, gather = Graph(), Collective("gather", (0,), 0)
    product = graph.call(target, graph.x, graph.w)
    total = graph.move(product, SUM)
    assert may_take_source(total, SUM, set()) is may
    assert not may_take_source(total, SUM, {product}), "a result of the network"
    assert not may_take_source(graph.move(graph.call(target, graph.x, graph.w), gather), gather, set())
    graph.call(aten.relu.default, product)
    assert not may_take_source(total, SUM, set()), "an operator reads it"
    assert not may_take_source(graph.move(graph.x, SUM), SUM, set()), "an input"


@pytest.mark.parametrize(
    ("readers", "may"), [(["linear", "linear"], True), ([], False), (["linear", "sum"], False), (["bias"], False)]
)
def test_gradient_of_what_only_products_read_may_be_taken(readers, may):
    graph = Graph()
    entered = graph.move(graph.x, ENTER)
    for reader in readers:
        graph.call(
            aten.add.Tensor if reader == "sum" else aten.linear.default, *[graph.x] * (2 * (reader == "bias")), entered
        )
    assert may_take_gradient(entered, ENTER, set()) is may
    assert not may_take_gradient(entered, ENTER, {entered}), "the caller's gradient comes in there"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.double()

    def forward(self, x):
        return self.b(self.norm(self.a(x)).relu())


@functools.cache
def graph_of_net(rows):
    return captured(Net(), torch.ones(rows, 6, dtype=torch.float64))


def results(compiler, copies=1, **more):
    """Return results, gradients and buffers after two steps, and the notes of the plan."""
    network, x = Net(), torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    call, program = compiled_of(
        graph_of_net(8 // copies), network, copies, settings=ParallelSettings(compiler=compiler), **more
    )
    found = []
    for _ in range(2):
        found.append(call.run([x])[0])
        found[-1].square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert len(gradients) == 6
    return [*(value.detach() for value in found), *gradients, *network.buffers()], program.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # compiles the backward pass too
        pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")),
    ],
)
def test_code_of_backends_gives_the_same(backend):
    torch.testing.assert_close(results(CompileSpec(backend))[0], results(None)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("copies", one_fast(2, 1))
def test_what_is_compiled_gives_the_same(copies):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    found, notes = results(CompileSpec(backend), copies)
    torch.testing.assert_close(found, results(None, copies)[0], rtol=1e-12, atol=1e-12)
    assert "torch.compile (backend) of 1 of 1 segments" in notes
    assert torch.ops.aten.linear.default in {node.target for graph in graphs for node in graph.graph.nodes}


def test_recomputed_modules_run_as_they_are():
    again = {"a": RecomputeSpec()}
    found, notes = results(CompileSpec("eager"), recompute=again)
    torch.testing.assert_close(found, results(None, recompute=again)[0], rtol=1e-12, atol=1e-12)
    assert "torch.compile (eager) of 2 of 3 segments" in notes


def test_backend_that_fails_is_one_line():
    def backend(graph, inputs):
        raise RuntimeError("no compiler here\nand more")

    with pytest.raises(CaptureError, match=r"compile\(\): .*no compiler here.*; leave compile\(\) out, or choose"):
        results(CompileSpec(backend))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"backend": "inducter"}, r"compile\(backend='inducter'\) \(did you mean inductor\?\): must be a function or"),
        ({"mode": "reduce-overhead"}, r"compile\(mode='reduce-overhead'\).*CUDA graphs would write over"),
        ({"backend": "eager", "mode": "default"}, "of inductor"),
    ],
)
def test_wrong_backends_and_modes_are_refused(words, reason):
    with pytest.raises(StrategyError, match=reason):
        AutoParallel(Net()).compile(**words)
    with pytest.raises(StrategyError, match="needs a captured graph"):
        AutoParallel(Net(), parallel_mode="data_parallel").compile()
