"""Graphs of small networks and their programs on a rank, which are made without ranks.

One network is captured and divided when this is imported: what torch builds the first time, forked ranks have already.
A fork server imports it for the ranks of a test. No test may need that: what a rank captures afterwards is the same.
"""

import contextlib

import torch
from torch import Tensor, nn

from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import lower
from msrun.runtime.sharding.layout import TensorLayout, build_mesh


def captured(network, *values, named=None, **more):
    """Return the graph of a call of a network, or of a function that uses one, with its strategies.

    Args:
        values, named: the arguments.
        more: other arguments of `capture`; by default shapes are those of the values.
    """
    target, shapes = find_target(network), [tuple(value.shape) for value in values if isinstance(value, Tensor)]
    given = {"input_shapes": shapes, "parameter_shapes": {}, "strategies": strategies_of(target.root)}
    return capture(target, values, named or {}, **given | more)


def layouts_of(graph, mesh, *, is_cut=False):
    """Return layouts of a graph's inputs: whole, or cut by their first dimension."""
    dims = [node.meta["val"].dim() for node in graph.graph.nodes if node.name in graph.inputs]
    return [TensorLayout((mesh.axes if is_cut else (), *((),) * count)[:count]) for count in dims]


def partitioned(graph, ranks=4, *, is_cut=False, **more):
    """Return the program of a graph on ranks that get whole inputs and give whole results, or rows of the batch.

    Args:
        more: other constraints.
    """
    mesh = build_mesh(ranks)
    given = {"input_layouts": layouts_of(graph, mesh, is_cut=is_cut), "output_batch_axes": mesh.axes if is_cut else ()}
    return lower(graph, decide(graph, mesh, Constraints(**given | more)))


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layers(x), labels)


with contextlib.suppress(ImportError):  # where it is installed, torch shows progress with it
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # no thread of its own: a fork copies none
with torch.random.fork_rng(devices=()):
    partitioned(captured(_Network(), torch.ones(2, 4), torch.zeros(2, dtype=torch.long)), 2, is_cut=True)
torch.compiler.reset()
