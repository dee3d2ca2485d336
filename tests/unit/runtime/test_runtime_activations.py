"""Bytes that a rank keeps between a forward and a backward pass: counted on fake tensors, as autograd keeps them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from msrun.runtime import recompute
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.recomputation import recomputed_in
from msrun.runtime.partition.partition import partition
from msrun.runtime.schedule.activations import ActivationEstimate, estimate_activations
from msrun.runtime.schedule.replay import find_regions, plan_replays
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

FLOAT = 4
ROWS, WIDE, NARROW = 4, 16, 8


class Block(nn.Module):
    """Autograd keeps the result of tanh, which is what `down` reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, NARROW)
        self.register_buffer("shift", torch.ones(WIDE))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.shift)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).exp()


def estimate(network: nn.Module, *, ranks: int = 1, copies: int = 1) -> ActivationEstimate:
    x = torch.ones(ROWS, NARROW)
    graph = capture(find_target(network), [x], {}, input_shapes=[tuple(x.shape)], parameter_shapes={})
    mesh = build_mesh(ranks)
    layout = TensorLayout((mesh.axes, ()))
    program = partition(graph, mesh, input_layouts=[layout], strategies={}, output_batch_axes=mesh.axes)
    regions = find_regions(program, recomputed_in(network))
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    segments = cut_segments(program, {use.node.name: 0 for use in program.parameters.values()}, region_of)
    replays = plan_replays(segments, regions, program.outputs)
    buffers = {node.name: dict(network.named_buffers())[name] for name, node in program.buffers.items()}
    trainable = frozenset(name for name, _ in network.named_parameters())
    return estimate_activations(graph, program, segments, replays, buffers, trainable, copies)


def kept_by_autograd(network: nn.Module) -> int:
    """Return the bytes of storages that autograd keeps of one pass, beside parameters, buffers and the batch."""
    x = torch.ones(ROWS, NARROW)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers(), x)}
    kept: dict[int, int] = {}
    holds: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        holds.append(tensor)
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = network(x)
    kept[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
    return sum(size for pointer, size in kept.items() if pointer not in given)


def test_what_is_kept_is_what_autograd_keeps() -> None:
    network = Network()
    found = estimate(network)
    assert found.kept_bytes == kept_by_autograd(network)
    assert found.again_bytes == 0


def test_part_of_a_rank_is_counted() -> None:
    assert estimate(Network(), ranks=2).kept_bytes * 2 == estimate(Network()).kept_bytes


def test_recomputed_block_keeps_its_ends_alone_and_is_counted_while_it_runs_again() -> None:
    network = Network()
    recompute(network.second)
    whole, found = estimate(Network()), estimate(network)
    hidden = 2 * ROWS * WIDE * FLOAT  # of tanh and of the product
    result = ROWS * NARROW * FLOAT  # stands between the block and what reads it
    assert found.kept_bytes == whole.kept_bytes - hidden + result
    assert found.again_bytes >= hidden


def test_greatest_region_counts_while_it_runs_again() -> None:
    both, one = Network(), Network()
    for network in (both, one):
        recompute(network.second)
    recompute(both.first)
    assert estimate(both).kept_bytes < estimate(one).kept_bytes
    assert estimate(both).again_bytes == estimate(one).again_bytes


def test_results_that_the_user_wants_kept_are_kept() -> None:
    network, all_again = Network(), Network()
    recompute(network.second, save=[torch.ops.aten.tanh])
    recompute(all_again.second)
    assert estimate(network).kept_bytes == estimate(all_again).kept_bytes + ROWS * WIDE * FLOAT


@pytest.mark.parametrize(
    ("copies", "text"),
    [
        (1, "activations 3.00 MB: 2.00 MB kept and 1.00 MB computed again"),
        (2, "activations 6.00 MB: 2.00 MB kept and 1.00 MB computed again for each of 2 copies"),
    ],
)
def test_peak_is_that_of_all_copies(copies: int, text: str) -> None:
    assert str(ActivationEstimate(2 << 20, 1 << 20, copies)) == text


def test_copies_are_those_of_the_micro_batch() -> None:
    found = estimate(Network(), copies=3)
    assert found.peak_bytes == 3 * found.kept_bytes
