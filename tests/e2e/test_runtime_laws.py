"""The strategy law and the redistribution law: however an operator is cut, its result and gradients are the same."""

import importlib
import itertools
import math

import operator_cases
import operator_cases_conv
import operator_cases_transformer
import pytest
import torch
import torch.distributed as dist
from asked_cases import slow_but
from drawn_layouts import all_layouts
from law_graphs import MODULES, WORLDS, give, graph_of, runs_of
from on_ranks import on_ranks
from placed_parameters import placed

from msrun.runtime.execute.transfers import start_all_reduce, start_backward, start_forward, traffic
from msrun.runtime.parallel.compilation.compiled import build_compiled_call
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import lower
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Move, TensorLayout, build_mesh, plan_redistribution

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def difference(mine, right):
    """Return the largest difference relative to the largest value; infinite when the shapes differ."""
    if mine is None or mine.shape != right.shape:
        return math.inf
    if not right.numel():
        return 0.0
    return float((mine - right).abs().max() / right.abs().max().clamp_min(1.0))


class Serial:
    """One process: the result and every gradient."""

    def __init__(self, case, dtype):
        self.values = case.values(dtype)
        self.leaves = [
            value.clone().requires_grad_(case.is_differentiable(index)) for index, value in enumerate(self.values)
        ]
        self.output = case.call(*self.leaves)
        generator = torch.Generator().manual_seed(7)
        self.output_gradient = torch.randn(self.output.shape, generator=generator, dtype=torch.float64).to(dtype)
        self.output.backward(self.output_gradient)
        for leaf in self.leaves:
            leaf.grad = leaf.grad if leaf.grad is None else leaf.grad.to_dense()


def run_case(case, dtype, mesh, rank, strategy, arrangement, case_values):
    """Run one strategy with one arrangement of the inputs; return what is wrong, or nothing."""
    serial, captured, given = case_values
    give(captured.graph.nodes, strategy)
    wanted = frozenset(n for n, index in enumerate(given) if case.is_differentiable(index))
    program = lower(captured, decide(captured, mesh, Constraints(arrangement, differentiable_inputs=wanted)))
    stored = {}
    for name, use in program.parameters.items():
        whole = serial.values[int(name[1:])]
        part = whole[use.layout.slices(mesh, whole.shape, rank)].clone()
        parameter = torch.nn.Parameter(part, requires_grad=case.is_differentiable(int(name[1:])))
        stored[name] = placed(name, parameter, tuple(whole.shape), use.layout, mesh=mesh, rank=rank)
    compiled = build_compiled_call(captured, program, stored, {}, mesh=mesh, rank=rank)
    tensors = []
    for index, layout in zip(given, arrangement, strict=True):
        whole = serial.values[index]
        part = whole[layout.slices(mesh, whole.shape, rank)].clone()
        tensors.append(part.requires_grad_(case.is_differentiable(index)))
    output = compiled.run(tensors)[0]
    wrong = []
    if (found := difference(output.detach(), serial.output.detach())) > TOLERANCE[dtype]:
        wrong.append(f"output by {found:.1e}")
    output.backward(serial.output_gradient)
    for index, tensor, layout in zip(given, tensors, arrangement, strict=True):
        if case.is_differentiable(index):
            right = serial.leaves[index].grad
            found = difference(tensor.grad, right[layout.slices(mesh, right.shape, rank)])
            if found > TOLERANCE[dtype]:
                wrong.append(f"gradient of input {index} by {found:.1e}")
    for name, item in stored.items():
        right = serial.leaves[int(name[1:])].grad
        if right is not None:
            found = difference(item.parameter.grad.to_dense(), right[item.placement.slices])
            if found > TOLERANCE[dtype]:
                wrong.append(f"gradient of parameter {name} by {found:.1e}")
    return wrong


def arrangements(case, mesh, given):
    """Yield how the arguments arrive: whole everywhere, and cut along dimension 0."""
    shapes = [case.shapes[index] for index in given]
    whole = [TensorLayout.replicated(len(shape)) for shape in shapes]
    yield whole
    cut = [
        TensorLayout((mesh.axes, *((),) * (len(shape) - 1))) if shape and shape[0] % mesh.size == 0 else layout
        for shape, layout in zip(shapes, whole, strict=True)
    ]
    if cut != whole:
        yield cut


RUNS = [(size, *run) for size in WORLDS for run in runs_of(size)]
FAST = ["4/operator_cases_conv/max-pool2d-overlapping"]
"""It has halos beside other collectives; what one process can say of all is in test_runtime_shard.py."""


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "key", "case", "follows", "dtypes"), slow_but(FAST, RUNS, lambda *run: run[1]), indirect=["ranks"]
)
def test_every_legal_strategy_gives_the_result_and_gradients_of_one_process(ranks, key, case, follows, dtypes):
    """Of an operator that follows its input: every layout of that input."""
    mesh, wrong = build_mesh(ranks.size), []
    for dtype in dtypes:
        serial = Serial(case, dtype)
        given = [index for index in range(len(case.shapes)) if index not in case.parameters]
        captured = graph_of(case, dtype=dtype)
        if follows:
            plans = [(None, [layout]) for layout in all_layouts(mesh, case.shapes[0])]
        else:
            plans = [(s, list(a)) for s in case.legal(mesh.size) for a in arrangements(case, mesh, given)]
        assert plans
        for strategy, arrangement in plans:
            where = f"{dtype}, {strategy} {[layout.split for layout in arrangement]}"
            found = run_case(case, dtype, mesh, ranks.rank, strategy, arrangement, (serial, captured, given))
            wrong += [f"{where}: {text}" for text in found]
    assert wrong == []


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_every_layout_can_be_moved_to_every_other_and_its_gradient_back(ranks):
    """With real collectives."""
    mesh, rank = build_mesh(ranks.size), ranks.rank
    whole = torch.arange(4 * 4 * 8, dtype=torch.float64).reshape(4, 4, 8)
    gradient = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layouts = all_layouts(mesh, whole.shape)
    pairs = list(itertools.product(layouts, repeat=2))
    wrong = []
    for source, target in pairs:
        steps = plan_redistribution(Move(mesh, source, target, tuple(whole.shape)))
        moves = [Collective(s.kind, s.axes, s.dim, s.from_dim) for s in steps]
        value = whole[source.slices(mesh, whole.shape, rank)]
        for move in moves:
            value = start_forward(move, value, mesh, rank).wait()
        if not torch.equal(value, whole[target.slices(mesh, whole.shape, rank)]):
            wrong.append(f"{source.split} -> {target.split}")
        back = gradient[target.slices(mesh, whole.shape, rank)]
        for move in reversed(moves):
            back = start_backward(move, back, mesh, rank).wait()
        if not torch.equal(back, gradient[source.slices(mesh, whole.shape, rank)]):
            wrong.append(f"gradient of {source.split} -> {target.split}")
    assert wrong == []
    assert len(pairs) == {2: 16, 4: 361}[ranks.size]


COUNTS = [
    (operator_cases, {"linear": 10, "linear-3d-bias": 14, "no-rule": 1}),
    (operator_cases_conv, {"batch-norm-2d": 13, "conv2d": 19, "conv2d-depthwise": 9, "max-pool2d-overlapping": 9}),
    (
        operator_cases_transformer,
        {"embedding": 10, "attention": 14, "attention-causal": 13, "embedding-by-frequency": 3},
    ),
]


@pytest.mark.parametrize(("module", "legal"), COUNTS, ids=[module.__name__ for module, _ in COUNTS])
def test_cases_try_many_strategies(module, legal):
    """Guards the guard: a mistake in the table of cases must not empty the law."""
    counts = {case.name: len(case.legal(4)) for case in module.BINARY}
    assert {name: counts[name] for name in legal} == legal
    assert sum(counts.values()) > 330


def test_every_case_runs_in_a_world():
    keys = {key for _, key, *_ in RUNS}
    modules = [importlib.import_module(name) for name in MODULES]
    everything = {f"{m.__name__}/{case.name}" for m in modules for case in [*m.BINARY, *m.UNARY]}
    assert {key.partition("/")[2] for key in keys} == everything
    assert any(key.startswith("8/") for key in keys)
    assert {f"4/operator_cases_transformer/{name}" for name in operator_cases_transformer.ON_FOUR} <= keys


@on_ranks(2)
def test_a_sum_leaves_what_was_given_alone_unless_it_may_take_it(ranks):
    numbers = torch.arange(6.0).view(2, 3)
    for in_place, whole in itertools.product((False, True), (numbers, numbers.t())):
        own = whole * (1 + ranks.rank)
        given, before = own.clone(), traffic.bytes["all_reduce"]
        assert torch.equal(start_all_reduce(own, dist.group.WORLD, in_place=in_place).wait(), whole * 3)
        assert in_place or torch.equal(own, given)
        assert traffic.bytes["all_reduce"] - before == 24
