"""The price of operators, and the activations that a step keeps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import recompute
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.cost.devices import PROFILES, DeviceProfile, Link, find_profile
from msrun.runtime.cost.operators import (
    NOTHING,
    TensorSpec,
    Work,
    backward_work,
    collective_seconds,
    forward_work,
    link_of,
    measured_collective_seconds,
    message_seconds,
    operator_seconds,
)
from msrun.runtime.parallel.recomputation import recomputed_in
from msrun.runtime.partition.local_work import LocalWork
from msrun.runtime.partition.partition import partition
from msrun.runtime.schedule.activations import ActivationEstimate, estimate_activations
from msrun.runtime.schedule.replay import find_regions, plan_replays
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.simulate.measured_times import added_s

aten = torch.ops.aten
LINK = Link(1.0, 10.0)


def specs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[TensorSpec]:
    return [TensorSpec(shape, dtype) for shape in shapes]


def test_a_call_like_a_measured_one_takes_what_was_measured_and_another_is_scaled_by_the_model() -> None:
    points = {"aten.mm.default float32": [(2e9, 1e6, 0.5), (2e6, 1e4, 0.01)]}
    device = replace(PROFILES["cpu"], operators=points, overhead_s=0.125)
    assert operator_seconds("aten.mm.default float32", Work(2e9, 6e5, 4e5), device) == 0.625
    assert operator_seconds("aten.mm.default float32", Work(4e9, 1.2e6, 8e5), device) == pytest.approx(1.125)
    assert operator_seconds("aten.mm.default float32", Work(2e6, 5e3, 5e3), device) == pytest.approx(0.135)
    other = Work(2e9, 6e5, 4e5)
    assert operator_seconds("aten.bmm.default float32", other, device) == other.seconds(device) + 0.125


def test_messages_take_at_the_least_the_processor_time_of_all_ranks_on_the_cores_that_they_share() -> None:
    def more(elapsed_s: float) -> list[tuple[float, float]]:
        return [(elapsed_s, 0.5), (elapsed_s, 0.5), (elapsed_s, 0.5), (9.0, 0.5)]

    fewer = [(3.0, 0.1)] * 4
    assert added_s(more(3.1), fewer, ranks_per_core=4.0) == pytest.approx(1.6)
    assert added_s(more(3.1), fewer, ranks_per_core=0.25) == pytest.approx(0.4)
    assert added_s(more(5.0), fewer, ranks_per_core=4.0) == pytest.approx(2.0)


def test_a_collective_inside_a_host_is_scaled_from_the_nearest_measured_one() -> None:
    device = replace(PROFILES["cpu"], collectives={"all_gather": [(2, 1000.0, 0.5), (2, 8e6, 2.0)]})
    inside = collective_seconds("all_gather", 1e7, 4, device.in_host)
    nearest = collective_seconds("all_gather", 8e6, 2, device.in_host)
    assert measured_collective_seconds("all_gather", 8e6, 2, device.in_host, device) == 2.0
    assert measured_collective_seconds("all_gather", 1e7, 4, device.in_host, device) == 2.0 * inside / nearest
    outside = collective_seconds("all_gather", 8e6, 2, device.between_hosts)
    assert measured_collective_seconds("all_gather", 8e6, 2, device.between_hosts, device) == outside


def test_priced_strategies_know_the_measured_seconds_of_a_message_and_what_a_step_waits_for_it() -> None:
    device = replace(PROFILES["cpu"], collectives={"all_reduce": [(4, 8e6, 2.0)]}, wait_s=0.25, overhead_s=0.5)
    assert message_seconds("all_reduce", 8e6, build_mesh(4), (0, 1), device) == 2.25
    assert message_seconds("all_reduce", 8e6, build_mesh(4), (), device) == 0.0
    assert message_seconds("to_host", 0, build_mesh(4), (), device) == device.to_host.alpha_s
    work = LocalWork(forward=(Work(1.0, 0.0, 0.0), NOTHING), backward=(Work(1.0, 0.0, 0.0, launches=2),))
    forward_s, backward_s = work.compute_seconds(device)
    assert forward_s == pytest.approx(0.5, rel=1e-4) and backward_s == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("operation", "ranks", "steps", "nbytes"),
    [
        ("all_gather", 4, 3, 3 * 40),
        ("reduce_scatter", 4, 3, 30),
        ("all_to_all", 4, 3, 30),
        ("all_reduce", 2, 1, 40),  # recursive doubling: one step of all bytes; the ring takes two of half
        ("broadcast", 2, 1, 40),
        ("halo", 4, 2, 40),
        ("send", 2, 1, 40),
    ],
)
def test_a_collective_takes_the_steps_and_bytes_of_its_formula(
    operation: str, ranks: int, steps: int, nbytes: float
) -> None:
    assert collective_seconds(operation, 40, ranks, LINK) == pytest.approx(steps * 1.0 + nbytes / 10.0)


def test_a_long_all_reduce_goes_round_the_ring_and_a_short_one_up_the_tree() -> None:
    assert collective_seconds("all_reduce", 8000, 8, LINK) == pytest.approx(14 + 2 * 7000 / 10)
    assert collective_seconds("all_reduce", 1, 8, LINK) == pytest.approx(3 + 3 * 0.1)


def test_a_collective_of_one_rank_is_free_and_an_unknown_one_is_refused() -> None:
    assert collective_seconds("all_reduce", 1000, 1, LINK) == 0.0
    with pytest.raises(ValueError, match="unknown collective 'gossip'"):
        collective_seconds("gossip", 1000, 2, LINK)


def test_a_group_that_leaves_its_host_pays_the_link_between_hosts() -> None:
    mesh, device = build_mesh(16), PROFILES["h100"]
    assert link_of(mesh, (1, 2, 3), device) is device.in_host
    assert link_of(mesh, (0,), device) is device.between_hosts
    assert message_seconds("to_host", 64e9, mesh, (), device) == pytest.approx(1.0, rel=1e-3)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "halo", "send"]),
    st.integers(1, 2**30),
    st.integers(1, 64),
    st.floats(1.0, 4.0),
)
def test_more_bandwidth_never_makes_a_collective_slower(operation: str, nbytes: int, ranks: int, factor: float) -> None:
    link = PROFILES["a100"].between_hosts
    faster = replace(link, bytes_per_s=link.bytes_per_s * factor)
    assert collective_seconds(operation, nbytes, ranks, faster) <= collective_seconds(operation, nbytes, ranks, link)


def test_an_operator_takes_the_longer_of_computing_and_moving_and_at_least_a_launch() -> None:
    device = replace(PROFILES["cpu"], peak_flops={"float32": 1e9}, memory_bandwidth=1e8, launch_s=1e-3)
    product = forward_work(aten.linear.default, specs((1000, 1000), (1000, 1000)), specs((1000, 1000)))
    assert product.seconds(device) == pytest.approx(2.0)
    addition = forward_work(aten.add.Tensor, specs((1000, 1000), (1000, 1000)), specs((1000, 1000)))
    assert addition.seconds(device) == pytest.approx(12e6 / 1e8)
    assert forward_work(aten.add.Tensor, specs((2,), (2,)), specs((2,))).seconds(device) == 1e-3


def test_a_view_costs_nothing_and_a_lookup_reads_its_rows_alone() -> None:
    assert forward_work(aten.transpose.int, specs((8, 4)), specs((4, 8))) is NOTHING
    table = [TensorSpec((10**6, 4), torch.float32), TensorSpec((3,), torch.int64)]
    assert forward_work(aten.embedding.default, table, specs((3, 4))).read_bytes == 3 * 4 * 4 + 3 * 8


def test_the_way_back_of_a_product_is_one_product_for_each_gradient() -> None:
    inputs, results = specs((8, 16), (32, 16), (32,)), specs((8, 32))
    forward = forward_work(aten.linear.default, inputs, results)
    assert forward.operations == 2 * 8 * 16 * 32
    assert backward_work(aten.linear.default, inputs, results, [0, 1, 2]).operations == 2 * forward.operations
    assert backward_work(aten.linear.default, inputs, results, [1, 2]).operations == forward.operations
    assert backward_work(aten.linear.default, inputs, results, []) is NOTHING


def test_a_profile_comes_back_from_json_and_from_a_file(tmp_path: Path) -> None:
    device = PROFILES["ascend910b"]
    assert DeviceProfile.from_json(json.dumps(device.to_json())) == device
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(device.to_json()))
    assert find_profile(path) == find_profile("Ascend910B") == find_profile(device) == device


def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"device 'a10'.*must be one of ascend910a, ascend910b, a100"):
        find_profile("a10")
    with pytest.raises(StrategyError, match="cannot be read: No such file"):
        find_profile(tmp_path / "none.json")
    with pytest.raises(StrategyError, match=r"device profile: KeyError: 'in_host'; its fields are name, peak_flops"):
        DeviceProfile.from_json("{}")
    with pytest.raises(StrategyError, match=r"memory_bandwidth = 0; give numbers above 0"):
        replace(PROFILES["cpu"], memory_bandwidth=0)


def test_every_named_profile_computes_faster_in_the_types_of_its_matrix_units() -> None:
    for device in PROFILES.values():
        assert math.isfinite(device.flops(torch.int8))
        assert device.name == "cpu" or device.flops(torch.float16) > device.flops(torch.float32)


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
