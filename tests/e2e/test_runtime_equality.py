"""The equality law: however the work is divided, training gives the numbers of one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import difference, local
from on_ranks import Ranks, on_ranks
from torch import nn

from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    WithLoss,
    get_rank,
    no_init_parameters,
    optim,
    set_comm_fusion,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

RANKS = 8
STEPS = 4
GLOBAL_BATCH = 32
SIZES = (196, 128, 128, 10)
"""Widths of the three layers. In float32 the first two weights have 98 KB and exactly 64 KB, the last one 5 KB."""

COLUMNS = ((1, 1), (8, 1), (8,))
ROWS = ((1, 8), (1, 8))
MEGATRON = {"layer1": COLUMNS, "layer2": ROWS}
MIXED = {"layer1": ((2, 1), (4, 1), (4,)), "layer2": ((2, 4), (1, 4)), "layer3": ((4, 2), (1, 2))}
HALF_BATCH = {"layer1": ((2, 1), (1, 1), (1,)), "layer2": ((4, 1), (2, 1), (2,)), "layer3": ((1, 2), (1, 2), (1,))}


@dataclass(frozen=True)
class Scenario:
    """One way."""

    name: str
    hsdp: Mapping[str, Any] | None = None
    strategies: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    compat: Literal["torch", "mindspore"] = "torch"
    dataset: Any = "data_parallel"
    form: Literal["module", "step"] = "module"
    """A module in a torch loop, or a step function with value_and_grad."""
    optimizer: str = "momentum"
    fusion: Mapping[str, int] = field(default_factory=dict)
    """layer -> fusion id"""
    deferred: bool = False
    weights_late: bool = False
    """transformer_opt's grad_matmul_communication_overlap."""
    traffic: Mapping[str, int] | None = None
    """Collectives of one step; None: not known by hand."""
    dtype: str = "float64"


def _hsdp(level: str = "level1", shard_size: int = -1, threshold: int = 64) -> dict[str, Any]:
    return {"optimizer_level": level, "shard_size": shard_size, "threshold": threshold}


LOSS = 2
"""Messages of a cross-entropy: the number of labels that count, which leaves first, and the sum."""
ONE_MESSAGE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1 + LOSS}
"""hsdp: the cut weights in one message each way, the whole parameters in one, and the loss."""

TENSOR_PARALLEL = {"all_reduce": 1 + LOSS, "reduce_scatter": 1, "all_gather": 1}
"""layer2's partial sums are scattered, for layer3 is data-parallel; gathered on the way back; loss and gradients."""

SCENARIOS = [
    Scenario("plain", traffic={"all_reduce": 1 + LOSS}),
    Scenario("plain-float32", traffic={"all_reduce": 1 + LOSS}, dtype="float32"),
    Scenario("plain-step-function", form="step", traffic={"all_reduce": 1 + LOSS}),
    Scenario("batch-cut-in-four", dataset=((4, 1), (4,))),
    Scenario("hsdp-level1", _hsdp(), traffic=ONE_MESSAGE),
    Scenario("hsdp-level2", _hsdp("level2"), traffic=ONE_MESSAGE),
    Scenario("hsdp-level3", _hsdp("level3"), traffic={**ONE_MESSAGE, "all_gather": 2}),
    Scenario("hsdp-level3-float32", _hsdp("level3"), traffic={**ONE_MESSAGE, "all_gather": 2}, dtype="float32"),
    Scenario("hsdp-shard-size-2", _hsdp(shard_size=2), traffic={**ONE_MESSAGE, "all_reduce": 2 + LOSS}),
    Scenario("hsdp-shard-size-4", _hsdp(shard_size=4), traffic={**ONE_MESSAGE, "all_reduce": 2 + LOSS}),
    Scenario("hsdp-full-batch", _hsdp(), dataset="full_batch", traffic=ONE_MESSAGE),
    Scenario("hsdp-level3-step-function", _hsdp("level3"), form="step", traffic={**ONE_MESSAGE, "all_gather": 2}),
    Scenario("hsdp-adam", _hsdp(), optimizer="adam", traffic=ONE_MESSAGE),
    Scenario("hsdp-deferred-torch-adamw", _hsdp(), optimizer="torch-adamw", deferred=True, traffic=ONE_MESSAGE),
    Scenario(
        "fusion-never",
        _hsdp(),
        fusion={"layer1": 0, "layer2": 0, "layer3": 0},
        traffic={"all_gather": 2, "reduce_scatter": 2, "all_reduce": 4 + LOSS},
    ),
    Scenario(
        "fusion-two-messages",
        _hsdp(),
        fusion={"layer1": 1, "layer2": 2, "layer3": 2},
        traffic={"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2 + LOSS},
    ),
    Scenario("four-copies", copies=4, traffic={"all_reduce": 1 + 4 * LOSS}),
    Scenario("two-copies-sum", copies=2, compat="mindspore", traffic={"all_reduce": 1 + 2 * LOSS}),
    Scenario("two-copies-hsdp", _hsdp(), copies=2, traffic={**ONE_MESSAGE, "all_reduce": 1 + 2 * LOSS}),
    Scenario("two-copies-hsdp-level3-sum", _hsdp("level3"), copies=2, compat="mindspore"),
    Scenario("tensor-parallel", strategies=MEGATRON, dataset="full_batch", traffic=TENSOR_PARALLEL),
    Scenario(
        "tensor-parallel-two-copies",
        strategies=MEGATRON,
        dataset="full_batch",
        copies=2,
        traffic={"all_reduce": 1 + 2 * LOSS, "reduce_scatter": 2, "all_gather": 2},
    ),
    Scenario(
        "tensor-parallel-weights-late",
        strategies=MEGATRON,
        dataset="full_batch",
        weights_late=True,
        traffic=TENSOR_PARALLEL,
    ),
    Scenario("mixed-strategies-hsdp-level3-weights-late", _hsdp("level3", threshold=0), MIXED, 2, weights_late=True),
    Scenario("half-batch-hsdp-shard-size-2", _hsdp("level2", 2, 0), HALF_BATCH, form="step"),
    Scenario("everything", _hsdp("level3", 2, 0), MIXED, 2, "mindspore", form="step", optimizer="adam", deferred=True),
]


OPTIMIZERS = {
    "momentum": lambda p: optim.Momentum(p, 0.05, 0.9),
    "adam": lambda p: optim.Adam(p, lr=1e-3),
    "torch-adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(SIZES[0], SIZES[1])
        self.layer2 = nn.Linear(SIZES[1], SIZES[2])
        self.layer3 = nn.Linear(SIZES[2], SIZES[3])

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


def make_network(dtype):
    torch.manual_seed(1)
    torch.set_default_dtype(dtype)
    return Network()


@functools.cache
def batches(steps, dtype):
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(steps):
        images = torch.randn(GLOBAL_BATCH, SIZES[0], generator=generator, dtype=torch.float64).to(dtype)
        found.append((images, torch.randint(0, SIZES[-1], (GLOBAL_BATCH,), generator=generator)))
    return found


@functools.cache
def serial(optimizer_name, factor, steps, dtype):
    """Return losses and weights of one process, whose loss is `factor` times the mean."""
    network = make_network(dtype)
    optimizer = OPTIMIZERS[optimizer_name](network.parameters())
    losses = []
    for images, labels in batches(steps, dtype):
        loss = F.cross_entropy(network(images), labels) * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(network.named_parameters())


def rows_of(tensor, scenario, rank):
    """Return what a rank passes."""
    if scenario.dataset == "full_batch":
        return tensor
    parts, index = RANKS, rank
    if scenario.dataset != "data_parallel":
        parts = scenario.dataset[0][0]
        index = rank * parts // RANKS
    return tensor.chunk(parts)[index]


def parallel(scenario, dtype, rank):
    """Return losses, the network, its AutoParallel, its optimizer, and the collectives of the last step."""
    with no_init_parameters() if scenario.deferred else nullcontext():
        network = make_network(dtype)
        optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    for name, strategy in scenario.strategies.items():
        shard(getattr(network, name), strategy)
    for name, number in scenario.fusion.items():
        set_comm_fusion(getattr(network, name), number)
    whole = WithLoss(network, F.cross_entropy)
    if scenario.copies > 1:
        whole = MicroBatchInterleaved(whole, scenario.copies)
    gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

    def train(images, labels):
        loss, gradients = gradients_of(images, labels)
        optimizer(gradients)
        return loss

    step = AutoParallel(whole if scenario.form == "module" else train, compat=scenario.compat)
    step.dataset_strategy(scenario.dataset)
    if scenario.weights_late:
        step.transformer_opt({"grad_matmul_communication_overlap": True})
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    losses = []
    for images, labels in batches(STEPS, dtype):
        traffic.reset()
        loss = step(rows_of(images, scenario, rank), rows_of(labels, scenario, rank))
        if scenario.form == "module":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, network, step, optimizer, {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}


def state_bytes(optimizer):
    return {
        index: sum(local(v).nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
        for index, state in enumerate(optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    }


class MatMul(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


@pytest.mark.slow
@on_ranks(RANKS)
def test_second_loss_of_functional_train_is_the_one_that_mindspore_publishes() -> None:
    first, second = MatMul(torch.full((32, 8), 0.03)), MatMul(torch.full((8, 16), 0.04))
    network = nn.Sequential(first, nn.ReLU(), second)
    shard(first, ((2, 4), (4, 1)))
    shard(second, ((2, 4), (4, 1)))
    optimizer = optim.Momentum(network.parameters(), learning_rate=0.3, momentum=0.1)
    gradients_of = value_and_grad(lambda x, y: F.mse_loss(network(x), y), None, list(network.parameters()))

    def train(x, y):
        loss, gradients = gradients_of(x, y)
        optimizer(gradients)
        return loss

    step = AutoParallel(train).dataset_strategy("full_batch").hsdp(threshold=0)
    losses = [float(step(torch.full((16, 32), 0.1), torch.full((16, 16), 0.1))) for _ in range(3)]
    assert losses[1] == pytest.approx(0.0047495714, abs=1e-5)
    assert losses == pytest.approx([0.0047997204, 0.0047495700, 0.0046943463], abs=1e-8)
    strategies = [o["strategy"] for o in step.plan.to_json()["operators"] if o["origin"] == "user"]
    assert strategies == [((2, 4), (4, 1))] * 2


in_eight_ranks = on_ranks(RANKS)
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
OF_WEIGHTS = {"float64": 1e-10, "float32": 3e-5}
"""Sums in another order move a weight near 0 by more than the loss."""
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
BIG = SIZES[0] * SIZES[1], SIZES[1] * SIZES[2]
SMALL = SIZES[1], SIZES[2], SIZES[2] * SIZES[3], SIZES[3]


@functools.cache
def trained(name: str) -> dict[str, Any]:
    """Train in one way, check the law, and return what else there is to see."""
    scenario = BY_NAME[name]
    factor = scenario.copies if scenario.compat == "mindspore" else 1  # copies are added up
    right, weights = serial(scenario.optimizer, factor, STEPS, getattr(torch, scenario.dtype))
    losses, network, step, optimizer, moved = parallel(scenario, getattr(torch, scenario.dtype), get_rank())
    assert losses == pytest.approx(right, rel=TOLERANCE[scenario.dtype], abs=0)
    assert right[-1] != right[0]
    assert max(difference(p, weights[n]) for n, p in network.named_parameters()) <= OF_WEIGHTS[scenario.dtype]
    return {"losses": losses, "traffic": moved, "plan": step.plan, "state": state_bytes(optimizer)}


@in_eight_ranks
@pytest.mark.parametrize("scenario", slow_but(["everything"], SCENARIOS))
def test_losses_and_weights_are_those_of_one_process_and_the_plan_tells_the_traffic(
    ranks: Ranks, scenario: Scenario
) -> None:
    found = trained(scenario.name)
    assert ranks.gather(found["losses"]) == [found["losses"]] * RANKS
    assert scenario.traffic is None or found["traffic"]["calls"] == scenario.traffic
    assert found["plan"].to_json()["traffic"] == found["traffic"]
    text, adds_up = found["plan"].explain(), scenario.compat == "mindspore"
    assert ("added up" in text, "means over the global batch" in text) == (adds_up, not adds_up)


@pytest.mark.slow
@in_eight_ranks
@pytest.mark.parametrize("name", ["hsdp-level1", "hsdp-level2", "two-copies-hsdp", "fusion-never"])
def test_bytes_of_optimizer_parallel_are_the_closed_form(name: str) -> None:
    """Gather: this rank's parts. Reduce-scatter: the whole gradients. All-reduce: whole parameters, and sum and count
    of every loss."""
    moved, item = trained(name)["traffic"]["bytes"], 8
    assert moved["all_gather"] == sum(BIG) * item // RANKS
    assert moved["reduce_scatter"] == sum(BIG) * item
    assert moved["all_reduce"] == sum(SMALL) * item + 2 * item * BY_NAME[name].copies


@pytest.mark.slow
@in_eight_ranks
def test_each_of_two_copies_moves_half_the_rows() -> None:
    one, two = (trained(name)["traffic"]["bytes"] for name in ("tensor-parallel", "tensor-parallel-two-copies"))
    assert two["all_gather"] == one["all_gather"]


@pytest.mark.slow
@in_eight_ranks
@pytest.mark.parametrize(("name", "item"), [("hsdp-level1", 8), ("hsdp-level2", 8), ("hsdp-level3-float32", 4)])
def test_cut_parameters_take_one_eighth_and_small_ones_stay_whole(name: str, item: int) -> None:
    by_name = {parameter.name: parameter for parameter in trained(name)["plan"].parameters}
    for layer, size in zip(("layer1", "layer2"), BIG, strict=True):
        weight = by_name.pop(f"{layer}.weight")
        assert (weight.global_bytes, weight.local_bytes) == (size * item, size * item // RANKS)
        assert (weight.shard_ranks, weight.reason) == (8, "rows cut over 8 ranks")
    for small in by_name.values():
        assert (small.local_bytes, small.shard_ranks) == (small.global_bytes, 1)
        assert small.reason.endswith("is under the threshold of 64 KB")


@pytest.mark.slow
@in_eight_ranks
def test_optimizer_state_is_cut_exactly_like_its_parameter() -> None:
    order = [BIG[0], SMALL[0], BIG[1], *SMALL[1:]]
    expected = [size // (RANKS if size in BIG else 1) * 2 * 8 for size in order]
    assert [*trained("hsdp-adam")["state"].values()] == expected


@pytest.mark.slow
@in_eight_ranks
@pytest.mark.parametrize("ranks_of_a_weight", [2, 4])
def test_shard_size_says_how_many_ranks_share_a_weight(ranks_of_a_weight: int) -> None:
    plan = trained(f"hsdp-shard-size-{ranks_of_a_weight}")["plan"]
    cut = [parameter for parameter in plan.parameters if parameter.shard_ranks > 1]
    assert {parameter.name for parameter in cut} == {"layer1.weight", "layer2.weight"}
    assert all(p.local_bytes * ranks_of_a_weight == p.global_bytes for p in cut)


@pytest.mark.slow
@in_eight_ranks
def test_explanation_names_every_parameter_with_its_sizes_and_the_reason() -> None:
    lines = trained("hsdp-level3-float32")["plan"].explain().splitlines()
    (weight,) = [line for line in lines if line.split()[:1] == ["layer1.weight"]]
    assert "128x196 -> 16x196" in weight
    assert weight.endswith("rows cut over 8 ranks")
    (bias,) = [line for line in lines if line.split()[:1] == ["layer3.bias"]]
    assert bias.endswith("40 B is under the threshold of 64 KB")
    assert lines[0].startswith("8 ranks as 2 x 2 x 2, semi_auto, hsdp level3")
