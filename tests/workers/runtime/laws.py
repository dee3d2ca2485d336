"""Every legal strategy of every operator case, and every redistribution, in one process group.

usage: laws.py RESULT.json; the file holds, per case and type, how many strategies ran and which went wrong.
law_graphs says which cases run in a world of this size.
"""

import itertools
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from law_graphs import graph_of, runs_of
from only_cases import is_asked
from placed_parameters import placed

from msrun.runtime import get_group_size, get_rank, init, release
from msrun.runtime.execute.transfers import start_backward, start_forward
from msrun.runtime.parallel.compilation.build_call import build_compiled_call
from msrun.runtime.partition.partition import partition
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.redistribution import Move, plan_redistribution
from msrun.runtime.sharding.strategies import OperatorStrategy

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def all_layouts(mesh, shape):
    """Return every layout of a tensor: each axis cuts one dimension or none, in every order."""
    found = set()
    for places in itertools.product(range(-1, len(shape)), repeat=len(mesh.axes)):
        for order in itertools.permutations(mesh.axes):
            split = tuple(tuple(axis for axis in order if places[axis] == dim) for dim in range(len(shape)))
            layout = TensorLayout(split)
            if layout.fits(mesh, shape):
                found.add(layout)
    return sorted(found, key=lambda layout: layout.split)


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


def run_case(case, dtype, mesh, rank, strategy, arrangement, case_values):
    """Run one strategy with one arrangement of the inputs; return what is wrong, or nothing."""
    serial, captured, given = case_values
    program = partition(
        captured,
        mesh,
        input_layouts=arrangement,
        strategies={"op": OperatorStrategy(strategy)} if strategy else {},
        output_batch_axes=(),
        differentiable_inputs=frozenset(n for n, index in enumerate(given) if case.is_differentiable(index)),
    )
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
            found = difference(item.parameter.grad, right[item.placement.slices])
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


def law_of(case, mesh, rank, dtypes, *, follows):
    """Return {"runs": number, "wrong": texts} for every type.

    follows: try every layout of the one input instead of every strategy.
    """
    outcome = {}
    for dtype in dtypes:
        serial = Serial(case, dtype)
        given = [index for index in range(len(case.shapes)) if index not in case.parameters]
        captured = graph_of(case, dtype)
        if follows:
            plans = [(None, [layout]) for layout in all_layouts(mesh, case.shapes[0])]
        else:
            plans = [(s, list(a)) for s in case.legal(mesh.size) for a in arrangements(case, mesh, given)]
        wrong = []
        for strategy, arrangement in plans:
            where = f"{strategy} {[layout.split for layout in arrangement]}"
            try:
                found = run_case(case, dtype, mesh, rank, strategy, arrangement, (serial, captured, given))
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            wrong += [f"rank {rank}, {where}: {text}" for text in found]
        outcome[str(dtype).removeprefix("torch.")] = {"runs": len(plans), "wrong": wrong}
    return outcome


def redistributions(mesh, rank):
    """Move a tensor from every layout to every other one and its gradient back, with real collectives."""
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
            wrong.append(f"rank {rank}: {source.split} -> {target.split}")
        back = gradient[target.slices(mesh, whole.shape, rank)]
        for move in reversed(moves):
            back = start_backward(move, back, mesh, rank).wait()
        if not torch.equal(back, gradient[source.slices(mesh, whole.shape, rank)]):
            wrong.append(f"rank {rank}: gradient of {source.split} -> {target.split}")
    return {"runs": len(pairs), "wrong": wrong}


def main():
    init(timeout_s=120)
    mesh, rank = build_mesh(get_group_size()), get_rank()
    results = {}
    for key, case, follows, dtypes in runs_of(mesh.size):
        if is_asked(key):
            results[key] = law_of(case, mesh, rank, dtypes, follows=follows)
    if is_asked(key := f"{mesh.size}/redistribution"):
        results[key] = {"float64": redistributions(mesh, rank)}
    gathered = [None] * mesh.size
    dist.all_gather_object(gathered, results)
    if rank == 0:
        for name, outcome in results.items():
            for dtype, part in outcome.items():
                part["wrong"] = [text for other in gathered for text in other[name][dtype]["wrong"]]
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
