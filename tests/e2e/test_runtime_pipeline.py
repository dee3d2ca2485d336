"""Pipelines give the numbers of one process, in as few messages as there must be."""

import functools
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import difference, local
from on_ranks import on_ranks
from torch import nn

from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_rank,
    no_init_parameters,
    optim,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

STEPS = 4
GLOBAL_BATCH = 16
WIDTH, BLOCKS, CLASSES = 16, 4, 6

COLUMNS, ROWS = ((1, 1), (2, 1), (2,)), ((1, 2), (1, 2))
MEGATRON = {f"blocks.{block}.{layer}": COLUMNS if layer == "0" else ROWS for block in range(BLOCKS) for layer in "02"}
BY_BLOCKS = {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}


@dataclass(frozen=True)
class Scenario:
    """One pipeline on `stages` x `stage_size` ranks."""

    name: str
    scheduler: str = "1f1b"
    interleave: bool = False
    stages: int = 2
    stage_size: int = 1
    micro_size: int = 4
    stage_config: Mapping[str, int] | None = None
    strategies: Mapping[str, Any] = field(default_factory=dict)
    hsdp: Mapping[str, Any] | None = None
    copies: int = 1
    compat: Literal["torch", "mindspore"] = "torch"
    dataset: str = "data_parallel"
    form: Literal["module", "step"] = "module"
    """A module in a torch loop, or a step function with value_and_grad."""
    optimizer: str = "momentum"
    deferred: bool = False
    tied: bool = False
    """The last layer uses the first one's weight."""
    skips: bool = False
    """Every block reads what the first layer makes."""
    dtype: str = "float64"
    weights_late: bool = False
    """transformer_opt's grad_matmul_communication_overlap."""

    @property
    def world_size(self):
        return self.stages * self.stage_size

    @property
    def chunks(self):
        return 2 if self.interleave or self.scheduler in ("zbv", "dualpipev") else 1


def _hsdp(level="level1", shard_size=-1):
    return {"optimizer_level": level, "shard_size": shard_size, "threshold": 0}


SCENARIOS = [
    Scenario("gpipe", "gpipe"),
    Scenario("gpipe-float32", "gpipe", dtype="float32"),
    Scenario("1f1b", stage_config=BY_BLOCKS),
    Scenario("eager", "eager_1f1b", micro_size=8, tied=True, skips=True),
    Scenario("interleaved", interleave=True, optimizer="adam", deferred=True),
    Scenario("zero-bubble", "zero_bubble", skips=True),
    Scenario("zbv", "zbv", tied=True, deferred=True),
    Scenario("dualpipev", "dualpipev", skips=True, form="step"),
    Scenario("tied-step-function-sums", "gpipe", micro_size=2, tied=True, compat="mindspore", form="step"),
    Scenario("one-stage", stages=1, stage_size=2, micro_size=2, hsdp=_hsdp()),
    Scenario("four-stages", stages=4, tied=True, skips=True, optimizer="adam"),
    Scenario("four-stages-zero-bubble-copies", "zero_bubble", stages=4, copies=2, compat="mindspore"),
    Scenario("data-parallel", stage_size=2, micro_size=2, tied=True, hsdp=_hsdp("level2"), deferred=True),
    Scenario("tensor-parallel", "zbv", stage_size=2, strategies=MEGATRON, dataset="full_batch", skips=True),
    Scenario("zbv-weights-late", "zbv", stage_size=2, strategies=MEGATRON, dataset="full_batch", weights_late=True),
    Scenario("zero-bubble-level3-copies", "zero_bubble", stage_size=2, hsdp=_hsdp("level3"), copies=2, micro_size=2),
    Scenario(
        "everything",
        "zero_bubble",
        interleave=True,
        stage_size=4,
        strategies=MEGATRON,
        hsdp=_hsdp("level3", 2),
        micro_size=2,
        copies=2,
        form="step",
        optimizer="adam",
        deferred=True,
        tied=True,
    ),
]


OPTIMIZERS = {"momentum": lambda p: optim.Momentum(p, 0.05, 0.9), "adam": lambda p: optim.Adam(p, lr=3e-3)}


class Network(nn.Module):
    def __init__(self, scenario):
        super().__init__()
        self.first = nn.Linear(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )
        self.last = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(1, 1)
        if scenario.tied:
            self.last.weight = None
        self.skips = scenario.skips

    def forward(self, x):
        first = h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
            if self.skips:
                h = h + 0.25 * first
        if self.last.weight is None:
            return h @ self.first.weight + self.last.bias
        return self.last(h)


def loss_of(scores, labels):
    smooth = 0.9 * F.one_hot(labels, CLASSES).to(scores.dtype) + 0.1 / CLASSES  # of labels alone: in the last stage
    return F.cross_entropy(scores, smooth)


def make_network(scenario, dtype):
    torch.manual_seed(1)
    torch.set_default_dtype(dtype)
    return Network(scenario)


def batches(dtype):
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(GLOBAL_BATCH, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
        yield x, torch.randint(0, CLASSES, (GLOBAL_BATCH,), generator=generator)


def serial(scenario, dtype):
    """Return losses and weights of one process; sums are that many times the mean loss."""
    network = make_network(scenario, dtype)
    optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    copies, parts = (scenario.copies, scenario.micro_size) if scenario.compat == "mindspore" else (1, 1)
    losses = []
    for x, labels in batches(dtype):
        loss = loss_of(network(x), labels)
        (loss * copies).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) * copies * parts)
    return losses, dict(network.named_parameters())


def rows_of(tensor, scenario, rank):
    if scenario.dataset == "full_batch":
        return tensor
    return tensor.chunk(scenario.stage_size)[rank % scenario.stage_size]


def parallel(scenario, dtype, rank):
    """Return losses, the network, its AutoParallel, and the messages of the last step."""
    with no_init_parameters() if scenario.deferred else nullcontext():
        network = make_network(scenario, dtype)
        optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    for name, strategy in scenario.strategies.items():
        shard(network.get_submodule(name), strategy)
    whole = WithLoss(network, loss_of)
    if scenario.copies > 1:
        whole = MicroBatchInterleaved(whole, scenario.copies)
    whole = Pipeline(whole, scenario.micro_size, scenario.stage_config)
    gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

    def train(x, labels):
        loss, gradients = gradients_of(x, labels)
        optimizer(gradients)
        return loss

    step = AutoParallel(whole if scenario.form == "module" else train, compat=scenario.compat)
    step.dataset_strategy(scenario.dataset)
    step.pipeline(scenario.stages, scenario.scheduler, scenario.interleave)
    if scenario.weights_late:
        step.transformer_opt({"grad_matmul_communication_overlap": True})
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    losses = []
    for batch in batches(dtype):
        traffic.reset()
        loss = step(*(rows_of(value, scenario, rank) for value in batch))
        if scenario.form == "module":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, network, step, {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}


TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


RUNS = sorted(((s.world_size, s) for s in SCENARIOS), key=lambda run: run[0])


@functools.cache
def trained(name):
    """Train through one pipeline, check the law, and return what else there is to see."""
    scenario = BY_NAME[name]
    right, weights = serial(scenario, getattr(torch, scenario.dtype))
    losses, network, step, moved = parallel(scenario, getattr(torch, scenario.dtype), get_rank())
    assert losses == pytest.approx(right, rel=TOLERANCE[scenario.dtype], abs=0)
    assert right[-1] != right[0]
    if scenario.hsdp is None:
        assert {"calls": step.plan.traffic.calls, "bytes": step.plan.traffic.bytes} == moved
    lines = step.plan.explain().splitlines()
    told = [line for line in lines if line.startswith("one training step, on each rank of stage")]
    assert len(told) == scenario.stages and not any("not known" in line for line in lines)
    held = {name: p for name, p in network.named_parameters() if local(p).numel()}
    assert max(difference(p, weights[name]) for name, p in held.items()) <= TOLERANCE[scenario.dtype]
    everyone = [None] * scenario.world_size
    dist.all_gather_object(everyone, {"losses": losses, "held": [*held], "traffic": moved})
    assert [rank["losses"] for rank in everyone] == [losses] * scenario.world_size
    return {"ranks": everyone, "plan": json.loads(json.dumps(step.plan.to_json())), "explain": step.plan.explain()}


@on_ranks()
@pytest.mark.parametrize(("ranks", "scenario"), slow_but(["zbv"], RUNS, lambda _, s: s.name), indirect=["ranks"])
def test_losses_and_weights_are_those_of_one_process_and_ranks_hold_the_parameters_of_their_stages_alone(scenario):
    """What the graph does not use stays everywhere."""
    found = trained(scenario.name)
    everywhere = {p["name"] for p in found["plan"]["parameters"] if not p["stages"]}
    assert everywhere == {"unused.weight", "unused.bias"}
    holders = {}
    for rank, of_rank in enumerate(found["ranks"]):
        stages = [stage for stage in found["plan"]["pipeline"]["stages"] if rank in stage["ranks"]]
        assert len(stages) == scenario.chunks
        assert set(of_rank["held"]) == everywhere.union(*(stage["parameters"] for stage in stages))
        for parameter in of_rank["held"]:
            holders.setdefault(parameter, set()).add(rank // scenario.stage_size)
    shared = {parameter for parameter, ranks in holders.items() if len(ranks) > 1} - everywhere
    one_rank_holds_both_ends = scenario.scheduler == "zbv" or scenario.stages == 1
    assert shared == ({"first.weight"} if scenario.tied and not one_rank_holds_both_ends else set())
    check_messages(scenario, found)


def check_messages(scenario, found):
    """Every border value of every copy of every micro batch is sent once, its gradient once, by every rank of a
    stage; borders between stages of one rank cost nothing."""
    stages = found["plan"]["pipeline"]["stages"]
    sent_calls = [0] * scenario.world_size
    sent_bytes = [0] * scenario.world_size
    times = scenario.micro_size * scenario.copies
    for border in found["plan"]["pipeline"]["borders"]:
        assert border["has_gradient"]
        here, there = (stages[border["from_stage"] + more]["ranks"] for more in (0, 1))
        if here != there:
            for rank in [*here, *there]:
                sent_calls[rank] += times
                sent_bytes[rank] += border["nbytes"] * scenario.micro_size
    for rank, of_rank in enumerate(found["ranks"]):
        assert of_rank["traffic"]["calls"].get("send", 0) == sent_calls[rank]
        assert of_rank["traffic"]["bytes"].get("send", 0) == sent_bytes[rank]
    assert sum(of_rank["traffic"]["bytes"].get("receive", 0) for of_rank in found["ranks"]) == sum(sent_bytes)


@on_ranks(2, slow=True)
def test_border_of_one_activation_carries_the_rows_of_a_micro_batch_alone():
    (border,) = trained("gpipe")["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["gpipe"].micro_size
    assert border["shape"] == [rows, WIDTH]
    assert trained("gpipe")["ranks"][0]["traffic"]["bytes"]["send"] == GLOBAL_BATCH * WIDTH * 8


@on_ranks(4, slow=True)
def test_value_that_skips_stages_is_passed_along_in_the_layout_that_it_has():
    borders = trained("four-stages")["plan"]["pipeline"]["borders"]
    skipping = [border for border in borders if border["name"] == borders[0]["name"]]
    assert [border["from_stage"] for border in skipping] == [0, 1, 2]
    # Full batch and tensor parallel: the ranks of a stage hold the residual stream cut by rows, as layouts go.
    halves = trained("tensor-parallel")["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["tensor-parallel"].micro_size
    assert [rows // 2, WIDTH] in [border["shape"] for border in halves]


@on_ranks(4, slow=True)
def test_gradients_of_level2_are_scattered_after_every_micro_batch_and_weights_gathered_once():
    calls = trained("data-parallel")["ranks"][0]["traffic"]["calls"]
    assert calls["reduce_scatter"] == 2
    assert calls["all_gather"] == 1
    assert calls["broadcast"] == 1


@on_ranks(4, slow=True)
def test_explanation_says_which_stage_holds_what_and_what_leaves_it(ranks):
    text = trained("four-stages")["explain"]
    assert text.startswith("4 ranks in 4 stages (1f1b, 4 micro batches, 1 rank each)")
    assert "stages, divided by equal cost; 1f1b: 4 stages, 4 micro batches, bubble 42.9 %" in text
    (tied,) = [line for line in text.splitlines() if line.split()[:1] == ["first.weight"]]
    assert f"stage 0,3, {'message' if ranks.rank in (0, 3) else 'elsewhere'}" in tied
    (foreign,) = [line for line in text.splitlines() if line.split()[:1] == ["blocks.1.2.weight"]]
    assert (f"{WIDTH}x{WIDTH} -> 0x{WIDTH} " in foreign) == ("elsewhere" in foreign) == (ranks.rank != 1)
    assert "512 B per micro batch, and its gradient back" in text
    assert sum(line.startswith("  stage ") for line in text.splitlines()) == 4
