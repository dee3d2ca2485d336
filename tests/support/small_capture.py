"""Captures and divides one network when it is imported: what torch builds the first time, forked ranks have already.

A fork server imports it for the ranks of a test. No test may need it: what a rank captures afterwards is the same.
"""

import contextlib

import torch
from torch import nn

from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import lower
from msrun.runtime.sharding.layout import TensorLayout, build_mesh


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layers(x), labels)


def _divide_once():
    shapes, mesh = [(2, 4), (2,)], build_mesh(2)
    batch = [torch.ones(2, 4), torch.zeros(2, dtype=torch.long)]
    graph = capture(find_target(_Network()), batch, {}, input_shapes=shapes, parameter_shapes={})
    layouts = [TensorLayout((mesh.axes, *((),) * (len(shape) - 1))) for shape in shapes]
    lower(graph, decide(graph, mesh, Constraints(layouts, {})))


with contextlib.suppress(ImportError):  # where it is installed, torch shows progress with it
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # no thread of its own: a fork copies none
with torch.random.fork_rng(devices=()):
    _divide_once()
torch.compiler.reset()
