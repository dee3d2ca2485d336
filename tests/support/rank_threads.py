"""Ranks as threads of one process that run a local program; what a collective does is written down apart from ours."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch

from msrun.runtime.nn.random_stream import DrawKey
from msrun.runtime.sharding import collective as halo
from msrun.runtime.sharding.operators import rows
from msrun.runtime.sharding.operators.rule import DRAW, PLACE, apply_collective

BACK = {
    "all_reduce": "enter",
    "enter": "all_reduce",
    "gather": "slice",
    "gather_enter": "reduce_scatter",
    "slice": "gather",
    "reduce_scatter": "gather",
}
"""What happens to the gradient of a collective's result."""


class _Rank(torch.fx.Interpreter):
    def __init__(self, program, number, slots, barrier):
        super().__init__(torch.fx.GraphModule(torch.nn.Module(), program.graph))
        self._mesh, self._number, self._slots, self._barrier = program.mesh, number, slots, barrier
        self._turn = 0

    def call_function(self, target, args, kwargs):
        if target is apply_collective:
            return _Collective.apply(args[0], self, kwargs["collective"])
        return super().call_function(target, args, kwargs)

    def exchange(self, pieces, axes):
        """Send a piece to each rank of a group; return what came."""
        self._turn = 1 - self._turn  # what came with the last turn is still being read
        self._slots[self._turn][self._number] = pieces
        self._barrier.wait(30)
        own = self._mesh.index(self._number, axes)
        return [self._slots[self._turn][member][own] for member in self._mesh.members(self._number, axes)]

    def move(self, way, value):
        count, own = self._mesh.extent(way.axes), self._mesh.index(self._number, way.axes)
        match way.kind:
            case "enter":
                return value
            case "slice":
                return value.chunk(count, way.dim)[own]
            case "all_reduce":
                return sum(self.exchange([value] * count, way.axes))
            case "reduce_scatter":
                return sum(self.exchange(value.chunk(count, way.dim), way.axes))
            case "gather" | "gather_enter":
                return torch.cat(self.exchange([value] * count, way.axes), way.dim)
            case "exchange":
                return torch.cat(self.exchange(value.chunk(count, way.dim), way.axes), way.from_dim)
        place = way.dim, way.window, own, count
        return halo.join_window(value, self._pieces(halo.window_message(value, *place), way.axes), *place)

    def move_back(self, way, gradient):
        if way.kind == "exchange":
            return self.move(replace(way, dim=way.from_dim, from_dim=way.dim), gradient)
        if way.kind in BACK:
            return self.move(replace(way, kind=BACK[way.kind]), gradient)
        place = way.dim, way.window, self._mesh.index(self._number, way.axes), self._mesh.extent(way.axes)
        return halo.add_gradients(gradient, self._pieces(halo.gradient_message(gradient, *place), way.axes), *place)

    def _pieces(self, message, axes):
        return message.pieces(torch.cat(self.exchange(message.flat.split(message.send_sizes), axes)))


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, rank, way):
        ctx.way = rank, way
        return rank.move(way, value).clone()

    @staticmethod
    def backward(ctx, gradient):
        rank, way = ctx.way
        return rank.move_back(way, gradient), None, None


class _Carrier(threading.local):
    """Rows that operators send while they compute; they arrive at once."""

    def start(self, values, sent, received, mesh, axes, what):
        arrived = self.rank.exchange(values.split([*sent]), axes)
        assert [len(each) for each in arrived] == [*received], what
        joined = torch.cat(arrived)
        return SimpleNamespace(wait=lambda: joined)

    def count(self, what, nbytes):
        """Leave that to tests of real ranks."""


def run_on_threads(program, given):
    """Return, of every rank, its results and the gradients of what is given, of the sum of weighted results.

    Args:
        given: placeholder -> whole value and its layout.
    """
    mesh, carrier = program.mesh, _Carrier()
    slots, barrier = ([None] * mesh.size, [None] * mesh.size), threading.Barrier(mesh.size)
    names = [node.target for node in program.graph.nodes if node.op == "placeholder"]

    def part_of(rank, value, layout):
        return value.detach()[layout.slices(mesh, value.shape, rank)].clone().requires_grad_(value.requires_grad)

    def run(number):
        carrier.rank = _Rank(program, number, slots, barrier)
        parts = {name: part_of(number, *way) for name, way in given.items()}
        constants = {node.target: value for node, value in program.constants.values()}
        values = {**parts, **constants, PLACE: torch.tensor(number), DRAW: DrawKey(7, 0).to_tensor()}
        try:
            results = carrier.rank.run(*map(values.get, names))
            sum(map(weighted, results)).backward()
        except BaseException:
            barrier.abort()
            raise
        return [result.detach() for result in results], {name: part.grad for name, part in parts.items()}

    with mock.patch.object(rows, "carrier", carrier, create=True), ThreadPoolExecutor(mesh.size) as threads:
        return [*threads.map(run, range(mesh.size))]


def weighted(result):
    """Return the sum of a result, each number with another weight."""
    return (result * torch.linspace(0.5, 2, result.numel(), dtype=result.dtype).view(result.shape)).sum()


def assert_is_that_of_one_process(program, right, inputs, parameters):
    """Compare results and gradients of the ranks of a program with those of one process.

    Args:
        right: the results of one process, made of these inputs and parameters, by name.
    """
    sum(map(weighted, right)).backward()
    read = [*zip(program.inputs, inputs, program.input_layouts, [()] * len(inputs), strict=True)]
    read += [(use.node, parameters[name], use.layout, use.partial_axes) for name, use in program.parameters.items()]
    found = run_on_threads(program, {node.target: (value, layout) for node, value, layout, _ in read})
    for rank, (results, _) in enumerate(found):
        for result, of_one in zip(results, right, strict=True):
            torch.testing.assert_close(result, of_one.detach())
        for node, value, layout, partial in read:
            if value.grad is not None:
                members = program.mesh.members(rank, partial)
                sums = sum(found[member][1][node.target].to_dense() for member in members)
                part = value.grad.to_dense()[layout.slices(program.mesh, value.shape, rank)]
                torch.testing.assert_close(sums, part)
