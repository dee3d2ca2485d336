"""Trains every case of sharding_cases on all ranks and on this very process alone.

usage: sharding.py RESULT.json
"""

import copy
import itertools
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from only_cases import is_asked
from placed_parameters import placed
from sharding_cases import BATCH, CASES, INPUTS, OUTPUTS, Mlp, layouts, scattered_linear
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    Layout,
    MicroBatchInterleaved,
    ParallelPlan,
    WithLoss,
    get_rank,
    init,
    release,
    shard,
)
from msrun.runtime.capture.assignment import LAYOUT, STRATEGY, LayoutConstraint, layout_constraint, strategy_of
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.execute.placement import find_placement
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.parallel.compilation.build_call import build_compiled_call
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.partition import partition
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.strategies import OperatorStrategy

STEPS = 3


def batch(dtype, number, rows=BATCH):
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, OUTPUTS, (rows,), generator=generator)


def build(case, dtype):
    torch.manual_seed(3)
    torch.set_default_dtype(dtype)
    return case.build()


def part(tensor, dataset, rank):
    """Return what a rank passes."""
    if dataset == "full_batch":
        return tensor
    parts, index = (6, rank) if dataset == "data_parallel" else (2, rank // 3)
    return tensor.chunk(parts)[index]


def train(step, parameters, case, dtype, rank=None):
    """Return the losses of a few steps and what the last one moved; rank None = all data."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses, moved = [], None
    for number in range(STEPS):
        traffic.reset()
        values = batch(dtype, number)
        loss = step(*(values if rank is None else [part(v, case.dataset, rank) for v in values]))
        loss.backward()
        moved = {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, moved


def run(case, dtype, rank):
    alone = build(case, dtype)
    right, _ = train(WithLoss(alone, F.cross_entropy), [p for p in alone.parameters() if p.requires_grad], case, dtype)
    network = build(case, dtype)
    whole = WithLoss(network, F.cross_entropy)
    if case.copies > 1:
        whole = MicroBatchInterleaved(whole, case.copies)
    step = AutoParallel(whole).dataset_strategy(case.dataset)
    if case.hsdp:
        step.hsdp(**case.hsdp)
    if case.strict:
        step.strict()
    losses, moved = train(step, [p for p in network.parameters() if p.requires_grad], case, dtype, rank)
    plan = step.plan
    worst = 0.0
    for mine, other in zip(network.parameters(), alone.parameters(), strict=True):
        shape, layout, mesh = find_placement(mine)
        wanted = other.detach()[layout.slices(mesh, shape, rank)]
        assert local(mine).shape == wanted.shape
        worst = max(worst, float((local(mine) - wanted).abs().max() / other.detach().abs().max()))
    return {
        "right": right,
        "losses": losses,
        "difference": worst,
        "traffic": moved,
        "plan": plan.to_json(),
        "explain": plan.explain(),
        "round_trip": ParallelPlan.from_json(json.dumps(plan.to_json())) == plan,
        "mesh": list(plan.mesh),
    }


def out_strategies(rank):
    """Run a linear layer with every strategy and every layout of its result; return how many, and what is wrong."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    network = nn.Sequential(shard(nn.Linear(INPUTS, OUTPUTS), ((1, 1), (1, 1)), ((1, 1),)))
    images, gradient = batch(torch.float64, 0)[0].requires_grad_(), torch.randn(BATCH, OUTPUTS)
    right = network(images)
    right.backward(gradient)
    whole = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    captured = capture(
        find_target(network),
        [images],
        {},
        input_shapes=[tuple(images.shape)],
        parameter_shapes={},
        strategies=strategies_of(network),
    )
    (product,) = [node for node in captured.graph.nodes if strategy_of(node)]
    (mark,) = [node for node in captured.graph.nodes if layout_constraint(node)]
    mesh, numbers, wrong, runs = build_mesh(6), (1, 2, 3, 6), [], 0
    for a, b, c, x, y in itertools.product(numbers, repeat=5):
        if 6 % (a * b * c) or 6 % (x * y):
            continue
        product.meta[STRATEGY] = OperatorStrategy(((a, b), (c, b), (c,)))
        mark.meta[LAYOUT] = LayoutConstraint((x, y), "0", leaves=True)
        program = partition(
            captured,
            mesh,
            input_layouts=[TensorLayout.replicated(2)],
            strategies={},
            output_batch_axes=(),
            differentiable_inputs=frozenset({0}),
        )
        stored = {
            name: placed(
                name,
                nn.Parameter(whole[name][use.layout.slices(mesh, use.shape, rank)].clone()),
                use.shape,
                use.layout,
                mesh=mesh,
                rank=rank,
            )
            for name, use in program.parameters.items()
        }
        compiled = build_compiled_call(captured, program, stored, {}, mesh=mesh, rank=rank)
        mine = images.detach().clone().requires_grad_()
        output = compiled.run([mine])[0]
        output.backward(gradient)
        found = [(output, right), (mine.grad, images.grad)]
        for name, item in stored.items():
            grad = network.get_parameter(name).grad
            found.append((item.parameter.grad, grad[item.placement.slices]))
        runs += 1
        if not all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in found):
            wrong.append(f"rank {rank}: in {((a, b), (c, b))} out {(x, y)}")
    return {"runs": runs, "wrong": wrong}


def other_strategies():
    """Return losses of a network that was placed for other strategies, beside those of one process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    network = scattered_linear()
    right = copy.deepcopy(network)
    whole = WithLoss(network, F.cross_entropy)
    AutoParallel(whole).dataset_strategy("full_batch")(*batch(torch.float64, 0))
    shard(network.fc1, ((6, 1), (1, 1)))
    shard(network.fc2, ((1, 1), (6, 1)))
    again = AutoParallel(whole).dataset_strategy("full_batch")
    found = []
    for number in range(2):
        values = batch(torch.float64, number, 2 * BATCH)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        loss = again(*values)
        loss.backward()
        optimizer.step()
        alone = F.cross_entropy(right(values[0]), values[1])
        for parameter, grad in zip(right.parameters(), torch.autograd.grad(alone, right.parameters()), strict=True):
            parameter.data -= 0.5 * grad
        found.append([float(loss.detach()), float(alone.detach())])
    assert any("gather" in text for o in again.plan.operators for text in o.collectives)
    return found


def refusals():
    """Return the messages of what must be refused."""

    def message(network, dataset="full_batch", strict=True):
        torch.set_default_dtype(torch.float64)
        step = AutoParallel(WithLoss(network, F.cross_entropy)).dataset_strategy(dataset)
        if strict:
            step.strict()
        images, labels = batch(torch.float64, 0)
        try:
            step(images, labels)
        except StrategyError as error:
            return str(error)
        return "accepted"

    def change():
        net = Mlp()
        shard(net.fc1, ((1, 1), (6, 1)))
        return net

    def late():
        net = Mlp()
        step = AutoParallel(WithLoss(net, F.cross_entropy)).dataset_strategy("full_batch")
        step(*batch(torch.float64, 0))
        layout = Layout((2, 3), ("dp", "mp"))
        shard(net.fc1, (layout("dp", "None"), layout("None", "None")))
        try:
            step(*batch(torch.float64, 0, 2 * BATCH))
        except StrategyError as error:
            return str(error)
        return "accepted"

    def contradiction():
        net = layouts(Layout((2, 3), ("dp", "mp")))()
        other = Layout((3, 2), ("a", "b"))
        shard(net.fc2, (other("a", "b"), other("None", "b")))
        return net

    def several():
        return shard(Mlp(), ((1, 1), (6, 1)))

    def unknown_name():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard(Mlp(), parameter_plan={"fc3.weight": (6, 1)}, in_strategy=((1, 1),))
        return str(caught[0].message)

    def small_matrix():
        layout = Layout((2, 2), ("dp", "mp"))
        net = Mlp()
        shard(net.fc1, (layout("dp", "None"), layout("mp", "None")))
        return net

    return {
        "strict": message(change()),
        "strict-input": message(nn.Sequential(shard(nn.Linear(INPUTS, OUTPUTS), ((1, 6), (1, 6)))), "data_parallel"),
        "lenient": message(change(), strict=False),
        "late": late(),
        "contradiction": message(contradiction(), strict=False),
        "several": message(several(), strict=False),
        "unknown-name": unknown_name(),
        "small-matrix": message(small_matrix(), strict=False),
        "results": message(shard(Mlp(), out_strategy=((6, 1), (1, 1))), strict=False),
    }


def main():
    init(timeout_s=120)
    rank = get_rank()
    results = {}
    for case in CASES:
        for name in filter(lambda name: is_asked(f"{case.name}/{name}"), case.dtypes):
            everyone = [None] * 6
            try:
                mine = run(case, getattr(torch, name), rank)
            except Exception as error:
                mine = {"error": f"{type(error).__name__}: {error}"}
            dist.all_gather_object(everyone, mine)
            results[f"{case.name}/{name}"] = everyone
    if is_asked("refusals"):
        results["refusals"] = refusals()
    if is_asked("other-strategies"):
        results["other-strategies"] = other_strategies()
    if is_asked("out-strategies"):
        results["out-strategies"] = [None] * 6
        dist.all_gather_object(results["out-strategies"], out_strategies(rank))
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
