"""The equality law: however the work is divided, training gives the numbers of one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
    mode: str = "semi_auto"
    weights_late: bool = False
    """transformer_opt's grad_matmul_communication_overlap."""
    traffic: Mapping[str, int] | None = None
    """Collectives of one step; None: not known by hand."""
    steps: int = STEPS
    float32: bool = False
    """Run in float32 too; the rule is the same, only the rounding differs."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float64", "float32") if self.float32 else ("float64",)


def _hsdp(level: str = "level1", shard_size: int = -1, threshold: int = 64) -> dict[str, Any]:
    return {"optimizer_level": level, "shard_size": shard_size, "threshold": threshold}


LOSS = 2
"""Messages of a cross-entropy: the number of labels that count, which leaves first, and the sum."""
ONE_MESSAGE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1 + LOSS}
"""hsdp: the cut weights in one message each way, the whole parameters in one, and the loss."""

SCENARIOS = [
    Scenario("plain", traffic={"all_reduce": 1 + LOSS}, float32=True),
    Scenario("plain-full-batch", dataset="full_batch", traffic={"all_reduce": 1 + LOSS}),
    Scenario("plain-step-function", form="step", traffic={"all_reduce": 1 + LOSS}),
    Scenario("data-parallel-mode", mode="data_parallel", float32=True),
    Scenario("batch-cut-in-four", dataset=((4, 1), (4,))),
    Scenario("hsdp-level1", _hsdp(), traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-level2", _hsdp("level2"), traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-level3", _hsdp("level3"), traffic={**ONE_MESSAGE, "all_gather": 2}, float32=True),
    Scenario("hsdp-shard-size-2", _hsdp(shard_size=2), traffic={**ONE_MESSAGE, "all_reduce": 2 + LOSS}, float32=True),
    Scenario("hsdp-shard-size-4", _hsdp(shard_size=4), traffic={**ONE_MESSAGE, "all_reduce": 2 + LOSS}),
    Scenario("hsdp-threshold-0", _hsdp(threshold=0)),
    Scenario("hsdp-full-batch", _hsdp(), dataset="full_batch", traffic=ONE_MESSAGE),
    Scenario("hsdp-step-function", _hsdp(), form="step", traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-level3-step-function", _hsdp("level3"), form="step", traffic={**ONE_MESSAGE, "all_gather": 2}),
    Scenario("hsdp-deferred", _hsdp(), deferred=True, traffic=ONE_MESSAGE),
    Scenario("hsdp-adam", _hsdp(), optimizer="adam", traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-torch-adam", _hsdp("level3"), optimizer="torch-adam"),
    Scenario("hsdp-torch-sgd", _hsdp(), optimizer="torch-sgd"),
    Scenario("hsdp-deferred-torch-adamw", _hsdp(), optimizer="torch-adamw", deferred=True),
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
    Scenario("fusion-one-message", _hsdp(), fusion={"layer1": 1, "layer2": 1, "layer3": 1}, traffic=ONE_MESSAGE),
    Scenario("two-copies", copies=2, traffic={"all_reduce": 1 + 2 * LOSS}),
    Scenario("four-copies", copies=4, traffic={"all_reduce": 1 + 4 * LOSS}, float32=True),
    Scenario("two-copies-sum", copies=2, compat="mindspore", traffic={"all_reduce": 1 + 2 * LOSS}, float32=True),
    Scenario("four-copies-sum-step-function", copies=4, compat="mindspore", form="step"),
    Scenario("two-copies-hsdp", _hsdp(), copies=2, traffic={**ONE_MESSAGE, "all_reduce": 1 + 2 * LOSS}),
    Scenario("two-copies-hsdp-level3-sum", _hsdp("level3"), copies=2, compat="mindspore"),
    Scenario("two-copies-full-batch-step-function", copies=2, dataset="full_batch", form="step"),
    # layer2's partial sums are scattered, for layer3 is data-parallel; gathered on the way back; loss and gradients.
    Scenario(
        "tensor-parallel",
        strategies=MEGATRON,
        dataset="full_batch",
        traffic={"all_reduce": 1 + LOSS, "reduce_scatter": 1, "all_gather": 1},
    ),
    Scenario(
        "tensor-parallel-two-copies",
        strategies=MEGATRON,
        dataset="full_batch",
        copies=2,
        traffic={"all_reduce": 1 + 2 * LOSS, "reduce_scatter": 2, "all_gather": 2},
        float32=True,
    ),
    Scenario(
        "tensor-parallel-weights-late",
        strategies=MEGATRON,
        dataset="full_batch",
        weights_late=True,
        traffic={"all_reduce": 1 + LOSS, "reduce_scatter": 1, "all_gather": 1},
        float32=True,
    ),
    Scenario("tensor-parallel-own-batches", strategies=MEGATRON),
    Scenario("tensor-parallel-adam-deferred", strategies=MEGATRON, optimizer="adam", deferred=True),
    Scenario("mixed-strategies", strategies=MIXED, dataset="full_batch"),
    Scenario("mixed-strategies-step-function", strategies=MIXED, form="step"),
    Scenario("mixed-strategies-hsdp", _hsdp(threshold=0), MIXED, dataset="full_batch"),
    Scenario("mixed-strategies-hsdp-level3-two-copies", _hsdp("level3", threshold=0), MIXED, copies=2, float32=True),
    Scenario("mixed-strategies-hsdp-level3-weights-late", _hsdp("level3", threshold=0), MIXED, 2, weights_late=True),
    Scenario("half-batch-hsdp", _hsdp(threshold=0), HALF_BATCH),
    Scenario(
        "half-batch-hsdp-level3", _hsdp("level3", threshold=0), HALF_BATCH, dataset="full_batch", copies=2, float32=True
    ),
    Scenario("half-batch-hsdp-shard-size-2", _hsdp("level2", 2, 0), HALF_BATCH, form="step"),
    Scenario(
        "everything",
        _hsdp("level3", 2, 0),
        MIXED,
        2,
        "mindspore",
        form="step",
        optimizer="adam",
        deferred=True,
        float32=True,
    ),
]


OPTIMIZERS = {
    "momentum": lambda p: optim.Momentum(p, 0.05, 0.9),
    "adam": lambda p: optim.Adam(p, lr=1e-3),
    "torch-adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "torch-adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "torch-sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
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
    if scenario.deferred:
        with no_init_parameters():
            network = make_network(dtype)
            optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    else:
        network = make_network(dtype)
        optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    for name, strategy in scenario.strategies.items():
        shard(getattr(network, name), strategy)
    for name, number in scenario.fusion.items():
        set_comm_fusion(getattr(network, name), number)
    whole = WithLoss(network, F.cross_entropy)
    if scenario.copies > 1:
        whole = MicroBatchInterleaved(whole, scenario.copies)
    if scenario.form == "step":
        gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

        def train(images, labels):
            loss, gradients = gradients_of(images, labels)
            optimizer(gradients)
            return loss
    else:
        train = whole
    step = AutoParallel(train, scenario.mode, compat=scenario.compat)
    if scenario.mode == "semi_auto":
        step.dataset_strategy(scenario.dataset)
    if scenario.weights_late:
        step.transformer_opt({"grad_matmul_communication_overlap": True})
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    losses = []
    for images, labels in batches(scenario.steps, dtype):
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
RUNS = [(scenario, dtype) for scenario in SCENARIOS for dtype in scenario.dtypes]
BIG = SIZES[0] * SIZES[1], SIZES[1] * SIZES[2]
SMALL = SIZES[1], SIZES[2], SIZES[2] * SIZES[3], SIZES[3]


@functools.cache
def trained(name: str, dtype_name: str = "float64") -> dict[str, Any]:
    """Train in one way, check the law, and return what else there is to see."""
    scenario, dtype, rank = BY_NAME[name], getattr(torch, dtype_name), get_rank()
    factor = scenario.copies if scenario.compat == "mindspore" else 1  # copies are added up
    right, weights = serial(scenario.optimizer, factor, scenario.steps, dtype)
    losses, network, step, optimizer, moved = parallel(scenario, dtype, rank)
    assert losses == pytest.approx(right, rel=TOLERANCE[dtype_name], abs=0)
    assert len(right) == scenario.steps and right[-1] != right[0]
    assert max(difference(p, weights[n]) for n, p in network.named_parameters()) <= OF_WEIGHTS[dtype_name]
    plan = step.plan.to_json() if scenario.mode == "semi_auto" else {}
    return {"losses": losses, "traffic": moved, "plan": plan, "step": step, "state": state_bytes(optimizer)}


@in_eight_ranks
@pytest.mark.parametrize(("scenario", "dtype"), slow_but(["everything/float64"], RUNS))
def test_losses_and_weights_are_those_of_one_process_and_the_plan_tells_the_traffic(
    ranks: Ranks, scenario: Scenario, dtype: str
) -> None:
    found = trained(scenario.name, dtype)
    assert ranks.gather(found["losses"]) == [found["losses"]] * RANKS
    if scenario.traffic is not None:
        assert found["traffic"]["calls"] == scenario.traffic
    if scenario.mode == "semi_auto":
        assert found["plan"]["traffic"] == found["traffic"]
        text, adds_up = found["step"].plan.explain(), scenario.compat == "mindspore"
        assert ("added up" in text, "means over the global batch" in text) == (adds_up, not adds_up)


@pytest.mark.slow
@in_eight_ranks
@pytest.mark.parametrize("name", ["hsdp-level1", "hsdp-level2", "two-copies-hsdp", "fusion-never"])
def test_bytes_of_optimizer_parallel_are_the_closed_form(name: str) -> None:
    """Gather: this rank's parts. Reduce-scatter: the whole gradients. All-reduce: whole parameters, and sum and count
    of every loss."""
    moved = trained(name)["traffic"]["bytes"]
    item = 8
    assert moved["all_gather"] == sum(BIG) * item // RANKS
    assert moved["reduce_scatter"] == sum(BIG) * item
    assert moved["all_reduce"] == sum(SMALL) * item + 2 * item * BY_NAME[name].copies


@pytest.mark.slow
@in_eight_ranks
def test_two_copies_double_the_collectives_of_activations_but_not_those_of_gradients() -> None:
    one, two = (trained(name)["traffic"] for name in ("tensor-parallel", "tensor-parallel-two-copies"))
    of_gradients = 1
    assert two["calls"]["all_gather"] == 2 * one["calls"]["all_gather"]
    assert two["calls"]["all_reduce"] - of_gradients == 2 * (one["calls"]["all_reduce"] - of_gradients)
    assert two["bytes"]["all_gather"] == one["bytes"]["all_gather"], "each copy has half the rows"


@pytest.mark.slow
@in_eight_ranks
@pytest.mark.parametrize(("dtype", "item"), [("float64", 8), ("float32", 4)])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_cut_parameters_take_one_eighth_and_small_ones_stay_whole(level: int, dtype: str, item: int) -> None:
    plan = trained(f"hsdp-level{level}", dtype)["plan"]
    by_name = {parameter["name"]: parameter for parameter in plan["parameters"]}
    for layer, size in zip(("layer1", "layer2"), BIG, strict=True):
        weight = by_name[f"{layer}.weight"]
        assert weight["global_bytes"] == size * item
        assert weight["local_bytes"] * RANKS == weight["global_bytes"]
        assert (weight["shard_ranks"], weight["reason"]) == (8, "rows cut over 8 ranks")
    for name in ("layer1.bias", "layer2.bias", "layer3.weight", "layer3.bias"):
        assert by_name[name]["local_bytes"] == by_name[name]["global_bytes"]
        assert by_name[name]["shard_ranks"] == 1
        assert by_name[name]["reason"].endswith("is under the threshold of 64 KB")


@pytest.mark.slow
@in_eight_ranks
@pytest.mark.parametrize(("dtype", "item"), [("float64", 8), ("float32", 4)])
def test_optimizer_state_is_cut_exactly_like_its_parameter(dtype: str, item: int) -> None:
    whole = [*BIG, *SMALL]
    order = [0, 2, 1, 3, 4, 5]  # weight, bias of layer1; weight, bias of layer2; weight, bias of layer3
    expected = [size // (RANKS if size in BIG else 1) * 2 * item for size in whole]
    assert [*trained("hsdp-adam", dtype)["state"].values()] == [expected[index] for index in order]


@pytest.mark.slow
@in_eight_ranks
@pytest.mark.parametrize("ranks_of_a_weight", [2, 4])
def test_shard_size_says_how_many_ranks_share_a_weight(ranks_of_a_weight: int) -> None:
    plan = trained(f"hsdp-shard-size-{ranks_of_a_weight}")["plan"]
    cut = [parameter for parameter in plan["parameters"] if parameter["shard_ranks"] > 1]
    assert {parameter["name"] for parameter in cut} == {"layer1.weight", "layer2.weight"}
    assert all(p["local_bytes"] * ranks_of_a_weight == p["global_bytes"] for p in cut)


@pytest.mark.slow
@in_eight_ranks
def test_explanation_names_every_parameter_with_its_sizes_and_the_reason() -> None:
    lines = trained("hsdp-level1", "float32")["step"].plan.explain().splitlines()
    (weight,) = [line for line in lines if line.split()[:1] == ["layer1.weight"]]
    assert "128x196 -> 16x196" in weight
    assert weight.endswith("rows cut over 8 ranks")
    (bias,) = [line for line in lines if line.split()[:1] == ["layer3.bias"]]
    assert bias.endswith("40 B is under the threshold of 64 KB")
    assert lines[0].startswith("8 ranks as 2 x 2 x 2, semi_auto, hsdp level1")
