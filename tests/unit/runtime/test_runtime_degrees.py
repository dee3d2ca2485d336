"""Degrees of parallelism that are searched for together: their prices, the limit of memory, the limit of time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import Degrees, GradAccumulation, search_degrees
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.parallel.degrees import divisions
from msrun.runtime.parallel.degrees.divisions import DividedGraph, PartPrices
from msrun.runtime.partition.decide import Constraints
from msrun.runtime.partition.price import StepSpec
from msrun.runtime.search.search import SearchSpec, search
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

H100 = PROFILES["h100"]
ROWS, WIDTH, BLOCKS = 512, 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Equal blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack(rows: int = ROWS) -> tuple[Stack, Tensor]:
    with torch.device("meta"):
        return Stack(), torch.empty(rows, WIDTH)


def prices_of(stages: int, rows: int) -> tuple[PartPrices, float, int]:
    """Return the prices of a part of the batch on one rank a stage, and seconds and bytes of it without stages."""
    network, batch = stack()
    search_of = divisions._Search(network, [batch], stages, divisions.SearchSettings("exact", H100), 60.0)
    captured, mesh = search_of._capture(ROWS // rows), build_mesh(1)
    spec = SearchSpec("dynamic_programming", H100)
    plan = search(captured, mesh, Constraints([TensorLayout.replicated(2)]), spec, lambda _, *, shards_all: StepSpec())
    graph = DividedGraph(captured, stages, search_of._paths(ROWS // rows))
    return PartPrices(graph, plan.plan), plan.plan.price.seconds, plan.plan.price.memory_bytes


def test_an_undivided_step_has_the_price_of_its_strategies() -> None:
    prices, seconds, nbytes = prices_of(1, ROWS)
    step = prices.step(Degrees(), H100)
    assert step.seconds == pytest.approx(seconds) and step.memory_bytes == nbytes


def test_a_pipeline_of_equal_stages_has_the_bubble_of_1f1b_and_a_stage_its_part_of_the_memory() -> None:
    micro_batches, stages = 8, 2
    (alone, *_), (line, *_) = prices_of(1, ROWS // micro_batches), prices_of(stages, ROWS // micro_batches)
    whole = alone.step(Degrees(1, micro_batches), H100)
    divided = line.step(Degrees(stages, micro_batches), H100)
    least = whole.seconds / stages * (micro_batches + stages - 1) / micro_batches
    assert 0.95 * least < divided.seconds < 1.15 * least, "messages take the rest, and the loss in the last stage"
    assert whole.memory_bytes / stages <= divided.memory_bytes < whole.memory_bytes * 0.75


def test_recomputed_blocks_take_their_forward_pass_again_and_keep_what_they_read() -> None:
    prices, *_ = prices_of(1, ROWS)
    plain, again = (prices.step(Degrees(recomputes=recomputes), H100) for recomputes in (False, True))
    assert 1.1 * plain.seconds < again.seconds < 1.4 * plain.seconds
    block_bytes = ROWS * WIDTH * 4 * 5  # hidden values and the result
    assert plain.memory_bytes - again.memory_bytes == pytest.approx((BLOCKS - 1) * block_bytes, rel=0.3)


@pytest.mark.slow
def test_memory_is_never_exceeded_and_more_of_it_never_takes_longer() -> None:
    network, batch = stack(4)
    free = search_degrees(network, batch, worker_num=4, device="h100")
    sizes_mb = sorted(each.memory_bytes / 2**20 for each in free.priced)
    before, refused, kinds = math.inf, 0, set[Degrees]()
    for limit_mb in (sizes_mb[0] / 2, sizes_mb[0], free.step.memory_bytes / 2**20):
        try:
            found = search_degrees(network, batch, worker_num=4, device="h100", memory_limit_mb=limit_mb)
        except StrategyError as error:
            assert f"fits into {limit_mb:.1f} MB: the smallest step found needs" in str(error)
            refused += 1
            continue
        fitting = [each.seconds for each in found.priced if each.memory_bytes <= limit_mb * 2**20]
        assert found.step.memory_bytes <= limit_mb * 2**20
        assert found.step.seconds == min(fitting) <= before
        before = found.step.seconds
        kinds.add(found.degrees)
    assert refused == 1 and len(kinds) > 1


def test_a_search_ends_at_its_limit_of_time_with_the_undivided_step(monkeypatch: pytest.MonkeyPatch) -> None:
    network, batch = stack()
    found = search_degrees(network, batch, worker_num=2, device="h100", time_limit_s=1e-9)
    assert {(each.degrees.stages, each.degrees.parts) for each in found.priced} == {(1, 1)}
    assert "the time limit came" in str(found)


def test_networks_that_divide_their_batch_and_numbers_out_of_range_are_refused() -> None:
    network, batch = stack()
    with pytest.raises(StrategyError, match=r"search_degrees\(GradAccumulation\): give it the network with its loss"):
        search_degrees(GradAccumulation(network, 2), batch)
    with pytest.raises(StrategyError, match=r"worker_num=0\): must be a whole number above 0"):
        search_degrees(network, batch, worker_num=0)
    with pytest.raises(StrategyError, match=r"time_limit_s=-1\): must be a number of seconds above 0"):
        search_degrees(network, batch, time_limit_s=-1)
    found = search_degrees(network, batch, worker_num=2, device="h100", time_limit_s=1e-9)
    with pytest.raises(StrategyError, match="was for 2 ranks, and there are 1"):
        found.apply(network)
    with pytest.raises(StrategyError, match="was not priced"):
        found.apply(network, Degrees(64))


def test_batch_statistics_keep_the_batch_in_one_part() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x).square().mean()

    found = search_degrees(Loss(), torch.randn(16, 8), worker_num=4, device="h100")
    assert {(each.degrees.stages, each.degrees.parts) for each in found.priced} == {(1, 1)}
    assert "changes buffers" in str(found)
