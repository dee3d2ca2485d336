"""Cases of tests/workers/runtime/modes.py: `verify` compares a step with that of one process and leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from mode_networks import mine
from torch import Tensor, nn

from msrun.errors import ParallelError, VerificationError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_rank,
    no_init_parameters,
    recompute,
    shard,
    value_and_grad,
)
from msrun.runtime.nn.random_stream import stream_of
from msrun.runtime.parallel.parameters.whole import whole_parameters
from msrun.runtime.sharding.operators.along_split import Softmax

Found = dict[str, Any]


class Network(nn.Module):
    """Dropout, and a normalisation with running statistics unless it is left out."""

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 32)
        self.norm = nn.BatchNorm1d(32) if has_norm else nn.LayerNorm(32)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(F.relu(self.norm(self.fc1(x)))))


def with_loss(*, has_norm: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return WithLoss(Network(has_norm=has_norm).to(dtype), nn.CrossEntropyLoss())


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(16, 24, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 6, (16,), generator=generator)


def own_batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(mine(tensor) for tensor in batch(dtype))


def found_by(model: AutoParallel, *args: Any) -> Found:
    report = model.verify(*args, raises=False)
    return {
        "is_equal": report.is_equal,
        "names": sorted(d.name for d in report.differences),
        "failed": sorted(d.name for d in report.failures),
        "text": str(report),
    }


def refused(run: Callable[[], object]) -> str:
    try:
        run()
    except ParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# -- modes --------------------------------------------------------------------------------------------------------


def operator_strategies() -> Found:
    network = with_loss()
    shard(network.network.fc1, ((1, 1), (2, 1)))
    shard(network.network.fc2, ((1, 2), (1, 2)))
    return found_by(AutoParallel(network).dataset_strategy("full_batch"), *batch())


def hsdp(level: str) -> Found:
    model = AutoParallel(with_loss()).hsdp(threshold=0, optimizer_level=level)  # type: ignore[arg-type]
    return found_by(model, *own_batch())


def wrapped() -> Found:
    network = GradAccumulation(MicroBatchInterleaved(with_loss(), 2), 2)
    return found_by(AutoParallel(network).hsdp(threshold=0, optimizer_level="level2"), *own_batch())


def recomputed() -> Found:
    network = with_loss(has_norm=False)
    recompute(network.network.drop)
    recompute(network.network.fc1)
    return found_by(AutoParallel(network), *own_batch())


def pipeline() -> Found:
    network = Pipeline(MicroBatchInterleaved(with_loss(has_norm=False), 2), 4)
    return found_by(AutoParallel(network).pipeline(2), *batch())


def mixed(dtype: str, scale: str | None, mode: str) -> Found:
    network = with_loss(has_norm=False, dtype=torch.float32)
    return found_by(AutoParallel(network, mode).mixed_precision(dtype, scale), *own_batch(torch.float32))


def data_parallel(*, is_sharded: bool, compat: str = "torch") -> Found:
    model = AutoParallel(with_loss(has_norm=False), "data_parallel", compat=compat)  # type: ignore[arg-type]
    return found_by(model.hsdp(threshold=1) if is_sharded else model, *own_batch())


def columns_of_the_batch() -> Found:
    """Each rank passes half of the columns of every row."""
    x, y = batch()
    model = AutoParallel(with_loss()).dataset_strategy(((1, 2), (1,)))
    return found_by(model, x.chunk(2, 1)[get_rank()].requires_grad_(), y)


def gradient_of_input(mode: str) -> Found:
    x, y = own_batch()
    return found_by(AutoParallel(with_loss(has_norm=False), mode), x.requires_grad_(), y)


def step_function(mode: str, *, is_sharded: bool) -> Found:
    network = with_loss(has_norm=False)
    calls = []
    gradients_of = value_and_grad(lambda x, y: network(x, y), None, list(network.parameters()))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss, _ = gradients_of(x, y)
        calls.append("trained")
        return loss

    model = AutoParallel(step, mode)
    return found_by(model.hsdp(threshold=0) if is_sharded else model, *own_batch()) | {"calls": calls}


# -- what it must find --------------------------------------------------------------------------------------------


def wrong_rule() -> Found:
    """The rule of softmax takes the axes of the other dimension: each rank then normalises its own classes."""
    right = Softmax.lower

    def swapped(self: Softmax, call: Any, form: Any, build: Any, inputs: Any, split: Any) -> Any:
        return right(self, call, form, build, inputs, {"d0": split.get("d1", ()), "d1": split.get("d0", ())})

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return -(F.log_softmax(self.fc(x), 1) * F.one_hot(y, 6)).sum(1).mean()

    def model() -> AutoParallel:
        torch.manual_seed(5)
        network = Scores().double()
        shard(network.fc, ((1, 1), (2, 1)))
        return AutoParallel(network).dataset_strategy("full_batch")

    with patch.object(Softmax, "lower", swapped):
        broken = model()
        found = found_by(broken, *batch())
    return found | {"error": refused(lambda: broken.verify(*batch())), "right": model().verify(*batch()).is_equal}


def stale_capture() -> Found:
    """What no guard watches, a variable of the environment, changes after the capture."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * float(os.environ.get("SCALE_OF_TEST", "1"))

    torch.manual_seed(5)
    model = AutoParallel(WithLoss(Scaled().double(), nn.CrossEntropyLoss()))
    fresh = model.verify(*own_batch()).is_equal
    with patch.dict(os.environ, {"SCALE_OF_TEST": "0.5"}):
        return found_by(model, *own_batch()) | {"fresh": fresh}


# -- what it must leave -------------------------------------------------------------------------------------------


def traces(kind: str) -> Found:
    """Train three steps, with a verification before each or without: the same in every bit."""

    def train(*, verifies: bool) -> list[Any]:
        with no_init_parameters() if kind == "deferred" else contextlib.nullcontext():
            network = with_loss(has_norm=kind in ("semi_auto", "deferred"))
        hooked: list[int] = []
        weight = network.network.fc2.weight
        if kind != "ddp":  # which rejects such hooks
            weight.register_post_accumulate_grad_hook(lambda _: hooked.append(1))
        mode = "data_parallel" if kind in ("ddp", "fsdp2") else "semi_auto"
        model = AutoParallel(network, mode)
        model = model.hsdp(threshold=0) if kind != "ddp" else model
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        torch.manual_seed(9)
        seen: list[Any] = []
        for _ in range(3):
            if verifies:
                gradients = [p.grad for p in network.parameters()]
                assert model.verify(*own_batch()).is_equal
                kept = zip(gradients, network.parameters(), strict=True)
                seen.append(("gradients kept", all(old is p.grad for old, p in kept) or not gradients[0]))
            else:
                seen.append(("gradients kept", True))
            optimizer.zero_grad(set_to_none=False)
            loss = model(*own_batch())
            loss.backward()
            optimizer.step()
            values = [*network.parameters(), *network.buffers()]
            grads = [p.grad for p in network.parameters()]
            seen += [float(loss), [local(v).tolist() for v in values], [local(g).tolist() for g in grads]]
            seen += [float(torch.rand(())), stream_of(network).step, stream_of(network).seed, network.training]
        return [*seen, len(hooked)]

    return {"is_same": train(verifies=True) == train(verifies=False)}


def between_passes() -> Found:
    """A loss of before still has its backward pass afterwards."""
    model = AutoParallel(network := with_loss()).hsdp(threshold=0)
    loss = model(*own_batch())
    model.verify(*own_batch())
    loss.backward()
    first = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    again = AutoParallel(network := with_loss()).hsdp(threshold=0)
    again(*own_batch()).backward()
    second = [p.grad for p in network.parameters() if p.grad is not None]
    return {"is_same": all(torch.equal(local(a), local(b)) for a, b in zip(first, second, strict=True))}


def whole_for_a_while() -> Found:
    """The user's own network computes what it did before it was cut, and is cut again afterwards."""
    network = with_loss().eval()
    right = copy.deepcopy(network)(*batch())
    model = AutoParallel(network).hsdp(threshold=0)
    with torch.no_grad():
        model(*own_batch())
    cut = [tuple(p.shape) for p in network.parameters()]
    objects = [id(p) for p in network.parameters()]
    with whole_parameters(network):
        result = network(*batch())
        same = objects == [id(p) for p in network.parameters()]
    after = [tuple(p.shape) for p in network.parameters()]
    return {"is_same": torch.equal(result, right) and same, "is_cut": cut == after and cut[0] == (16, 24)}


# -- what it refuses, and the variable ----------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if x.shape[0] == 16 and get_rank() == 1:
                raise ValueError("only of one rank")
            return F.cross_entropy(self.fc(x), y)

    def step(*_: Tensor) -> Tensor:
        return torch.zeros(())

    without_loss = AutoParallel(Network(has_norm=False).double(), "data_parallel").hsdp(threshold=0)
    refusal = refused(lambda: without_loss.verify(own_batch()[0]))
    for _ in range(2):  # as if nothing had been refused
        without_loss(own_batch()[0]).sum().backward()

    return {
        "batch norm": refused(lambda: AutoParallel(with_loss(), "data_parallel").verify(*own_batch())),
        "hybrid": refused(lambda: AutoParallel(with_loss(), "hybrid_parallel").verify(*own_batch())),
        "no loss, fsdp2": refusal,
        "no loss": refused(lambda: AutoParallel(nn.Linear(24, 6).double()).verify(own_batch()[0])),
        "fails": refused(lambda: AutoParallel(Failing().double(), "data_parallel").verify(*own_batch())),
        "stand_alone": str(AutoParallel(with_loss(), "stand_alone").verify(*own_batch())),
        "no gradients": refused(lambda: AutoParallel(step).verify(*own_batch())),
    }


def by_variable() -> Found:
    """MSRUN_VERIFY=1 verifies the first training step alone, and raises."""
    with patch.dict(os.environ, {"MSRUN_VERIFY": "1"}):
        model = AutoParallel(with_loss())
        with torch.no_grad():
            model(*own_batch())
        losses = [float(model(*own_batch()).detach()) for _ in range(2)]
        unverified = AutoParallel(with_loss(), "data_parallel")
        unverified(*own_batch())
    without = AutoParallel(with_loss())
    with torch.no_grad():
        without(*own_batch())
    plain = [float(without(*own_batch()).detach()) for _ in range(2)]
    return {"losses": losses, "plain": plain, "error": raised_by_variable()}


def raised_by_variable() -> str:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.fc(x), y) * (x.shape[0] / 16)

    with patch.dict(os.environ, {"MSRUN_VERIFY": "1"}):
        try:
            AutoParallel(Odd().double(), "data_parallel")(*own_batch())
        except VerificationError as error:
            return str(error)
    return "accepted"


def cases(ranks: int) -> dict[str, Callable[[], Any]]:
    assert ranks == 2
    return {
        "equal/operators": operator_strategies,
        **{f"equal/hsdp {level}": lambda level=level: hsdp(level) for level in ("level1", "level2", "level3")},
        "equal/wrapped": wrapped,
        "equal/recomputed": recomputed,
        "equal/pipeline": pipeline,
        "equal/bfloat16": lambda: mixed("bfloat16", None, "semi_auto"),
        "equal/float16": lambda: mixed("float16", "dynamic", "semi_auto"),
        "equal/bfloat16 ddp": lambda: mixed("bfloat16", None, "data_parallel"),
        "equal/ddp": lambda: data_parallel(is_sharded=False),
        "equal/ddp sums": lambda: data_parallel(is_sharded=False, compat="mindspore"),
        "equal/fsdp2": lambda: data_parallel(is_sharded=True),
        "equal/columns": columns_of_the_batch,
        "equal/input": lambda: gradient_of_input("semi_auto"),
        "equal/input ddp": lambda: gradient_of_input("data_parallel"),
        "equal/step": lambda: step_function("semi_auto", is_sharded=True),
        "equal/step ddp": lambda: step_function("data_parallel", is_sharded=False),
        "equal/step fsdp2": lambda: step_function("data_parallel", is_sharded=True),
        "wrong rule": wrong_rule,
        "stale capture": stale_capture,
        **{f"traces/{kind}": lambda kind=kind: traces(kind) for kind in ("semi_auto", "deferred", "ddp", "fsdp2")},
        "traces/between passes": between_passes,
        "whole": whole_for_a_while,
        "refusals": refusals,
        "variable": by_variable,
    }
