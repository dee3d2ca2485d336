"""Ways to train one network, and the law of them all: losses, gradients and weights are those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from host_operators import AdamWeightDecayOp
from local_parts import difference, held, local
from torch import nn

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    clip_by_global_norm,
    clip_grad_norm_,
    get_group_size,
    get_rank,
    no_init_parameters,
    optim,
    recompute,
    set_comm_fusion,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
OPTIMIZERS = {
    "momentum": lambda p: optim.Momentum(p, 0.05, 0.9),
    "sgd": lambda p: torch.optim.SGD([each for each in p if each.requires_grad], lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=1e-3),
    "torch-adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adam-weight-decay": lambda p: optim.AdamWeightDecay(p, lr=1e-2, weight_decay=0.1),
    "lamb": lambda p: optim.Lamb(p, lr=1e-2, weight_decay=0.1),
    "adam-weight-decay-op": lambda p: AdamWeightDecayOp(p, learning_rate=1e-2, weight_decay=0.1),
}
MAX_NORM = 0.1
CLIPPING = {"ours": clip_grad_norm_, "torch": nn.utils.clip_grad_norm_}
WRAPPERS = {"copies": MicroBatchInterleaved, "micro": GradAccumulation}


@dataclass(frozen=True)
class Way:
    """One way."""

    name: str
    level: str | None = None
    """of hsdp"""
    parts: tuple[tuple[Literal["copies", "micro"], int], ...] = ()
    """Wrappers, outermost first."""
    calls: Mapping[str, int] | None = None
    """Collectives of one step by operation; None = not known by hand."""
    strategies: Mapping[str, Any] = field(default_factory=dict)
    dataset: Any = "data_parallel"
    recompute: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """module path -> settings"""
    fusion: Mapping[str, int] = field(default_factory=dict)
    """module path -> fusion id"""
    shard_size: int = -1
    threshold: int = 0
    optimizer: str = "momentum"
    deferred: bool = False
    compat: Literal["torch", "mindspore"] = "torch"
    mode: str = "semi_auto"
    form: Literal["module", "step", "fresh closures"] = "module"
    """A module in a torch loop, or a step function with value_and_grad."""
    dtype: str = "float64"
    scaled: bool = False
    """The loss is multiplied by 3 before its backward pass, and the gradients divided after it."""
    clips: Literal["", "ours", "torch"] = ""
    """Who clips the gradients."""
    passes: int = 1
    """Backward passes before a step of the optimizer."""
    stages: int = 0
    """Of a pipeline; 0 = there is none."""
    scheduler: str = "1f1b"
    interleave: bool = False
    micro_size: int = 4
    stage_config: Mapping[str, int] | None = None
    configure: Callable[[AutoParallel], AutoParallel] = lambda step: step
    join: Callable[[AutoParallel, Any], Any] = lambda _step, _optimizer: None
    """Where else the optimizer works than on the device, after the backward pass."""
    of_network: Mapping[str, Any] = field(default_factory=dict)
    """What else the network is made of."""

    def factor(self, *kinds):
        """How many times the mean loss: copies add up, gradients of micro batches never do."""
        parts = (*self.parts, ("micro", self.micro_size if self.stages else 1))
        return math.prod(count for kind, count in parts if kind in kinds) if self.compat == "mindspore" else 1

    def rows_of(self, tensor):
        """Return what this rank passes."""
        if self.dataset == "full_batch":
            return tensor
        ranks = get_group_size() // max(self.stages, 1)
        first = self.dataset[0]
        parts = ranks if self.dataset == "data_parallel" else first[0] if isinstance(first, tuple) else 2
        return tensor.chunk(parts)[get_rank() % ranks * parts // ranks]

    def set_up(self, network, optimizer, loss_of, first):
        """Return the AutoParallel of a network; a step function puts its first gradients into `first`."""
        for name, strategy in self.strategies.items():
            shard(network.get_submodule(name), strategy)
        for path, number in self.fusion.items():
            set_comm_fusion(network.get_submodule(path), number)
        for path, given in self.recompute.items():
            recompute(network.get_submodule(path), **given)
        whole = WithLoss(network, loss_of)
        for kind, number in reversed(self.parts):
            whole = WRAPPERS[kind](whole, number)
        if self.stages:
            whole = Pipeline(whole, self.micro_size, self.stage_config)
        gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

        def train(x, y):
            function = gradients_of
            if self.form == "fresh closures":
                function = value_and_grad(lambda *batch: whole(*batch), None, list(network.parameters()))
            loss, gradients = function(x, y)
            if not first:
                pairs = zip(gradients, network.parameters(), strict=True)
                first.extend(held(gradient, parameter).clone() for gradient, parameter in pairs)
            if self.clips:
                gradients = clip_by_global_norm(gradients, MAX_NORM)
            if callable(optimizer):
                optimizer(gradients)
            else:
                for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            return loss

        step = AutoParallel(whole if self.form == "module" else train, self.mode, compat=self.compat)
        step.dataset_strategy(self.dataset)
        if self.level:
            step.hsdp(shard_size=self.shard_size, threshold=self.threshold, optimizer_level=self.level)
        if self.stages:
            step.pipeline(self.stages, self.scheduler, self.interleave)
        self.join(step, optimizer)
        return self.configure(step)


def weights_late(step):
    return step.transformer_opt({"grad_matmul_communication_overlap": True})


@dataclass
class Trained:
    """What there is to see of a network that was trained in one way."""

    step: AutoParallel
    network: nn.Module
    alone: nn.Module
    """The same one in one process."""
    optimizer: Any
    losses: list[float]
    moved: dict[str, dict[str, int]]
    """Calls and bytes of the last step."""


def train_beside_one_process(way, make, batches, loss_of=F.cross_entropy):
    """Train in one way beside one process, and check the law.

    Args:
        make: makes the network, of random numbers.
        batches: whole batches of float64.
    """
    dtype, tolerance = getattr(torch, way.dtype), TOLERANCE[way.dtype]
    torch.set_default_dtype(dtype)
    torch.manual_seed(1)
    alone = make()
    torch.manual_seed(1)
    with no_init_parameters() if way.deferred else nullcontext():
        network = make()
        optimizer, other = (OPTIMIZERS[way.optimizer](net.parameters()) for net in (network, alone))
    first = []
    step, losses = way.set_up(network, optimizer, loss_of, first), []
    for number, (x, y) in enumerate(batches):
        right = loss_of(alone(x.to(dtype)), y)
        (right * way.factor("copies")).backward()
        traffic.reset()
        loss = step(way.rows_of(x.to(dtype)), way.rows_of(y))
        if way.form == "module":
            (loss * 3 if way.scaled else loss).backward()
            gradients = [parameter.grad for parameter in network.parameters()]
            for gradient in gradients if way.scaled else ():
                gradient.div_(3)
            pairs = zip(gradients, network.parameters(), strict=True)
            first = first or [
                gradient if gradient is None else held(gradient, mine).clone() for gradient, mine in pairs
            ]
        losses.append(float(loss.detach()))
        expected = float(right.detach()) * way.factor("copies", "micro")
        assert losses[-1] == pytest.approx(expected, rel=tolerance, abs=0)
        for mine, its, gradient in zip(network.parameters(), alone.parameters(), first, strict=True):
            is_told = number == 0 and gradient is not None and its.grad is not None  # else of other stages, or unused
            assert not is_told or difference(gradient, its.grad, mine) <= tolerance
        if (number + 1) % way.passes:
            continue
        if way.clips:
            nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        other.step()
        other.zero_grad()
        if way.form == "module":
            if way.clips:
                CLIPPING[way.clips](network.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] != losses[-1]
    pairs = zip(network.parameters(), alone.parameters(), strict=True)
    assert max(difference(mine, its) for mine, its in pairs if local(mine).numel()) <= tolerance
    return Trained(
        step, network, alone, optimizer, losses, {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}
    )
