"""`AutoParallel.verify` and MSRUN_VERIFY: the step of one process, and what differs from it is found."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import local
from mode_networks import mine
from on_ranks import on_all_ranks, on_ranks
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
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.parameters.whole import gathered_parameters
from msrun.runtime.parallel.verification import first_step as first_step_module
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


def mixed(dtype: str, scale: str | None, mode: str, *, has_norm: bool = False) -> Found:
    network = with_loss(has_norm=has_norm, dtype=torch.float32)
    return found_by(AutoParallel(network, mode).mixed_precision(dtype, scale), *own_batch(torch.float32))


def data_parallel(*, is_sharded: bool, compat: str = "torch") -> Found:
    model = AutoParallel(with_loss(has_norm=False), "data_parallel", compat=compat)  # type: ignore[arg-type]
    return found_by(model.hsdp(threshold=1) if is_sharded else model, *own_batch())


def single_number() -> Found:
    """A temperature is a parameter without a dimension, which FSDP2 cannot cut."""

    class Tempered(Network):
        def __init__(self) -> None:
            super().__init__(has_norm=False)
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale.exp()

    torch.manual_seed(5)
    network = WithLoss(Tempered().double(), nn.CrossEntropyLoss())
    found = found_by(AutoParallel(network, "data_parallel").hsdp(threshold=0, optimizer_level="level3"), *own_batch())
    assert "gradient of scale" in found["names"]
    return found


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


def loss_outside(mode: str, *, is_sharded: bool = False) -> Found:
    """A network without a loss: its loss is outside, and goes back through a step before it as well."""
    torch.manual_seed(5)
    network = Network(has_norm=False).double()
    first = AutoParallel(nn.Linear(24, 24).double(), mode)
    model = AutoParallel(network, mode)
    model = model.hsdp(threshold=0) if is_sharded else model
    x, y = own_batch()
    seen = heard(lambda: F.cross_entropy(model(first(x)), y).backward())
    return found_by(model, x.requires_grad_()) | {"heard": [line for line in seen if "not one process" in line]}


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
        first = refused(lambda: model()(*batch()))
        broken = model()
        found = found_by(broken, *batch())
    return found | {
        "error": refused(lambda: broken.verify(*batch())),
        "first": first,
        "right": model().verify(*batch()).is_equal,
    }


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


# -- the first step, which checks itself ------------------------------------------------------------------------


def heard(run: Callable[[], object]) -> list[str]:
    """Return what msrun warns of meanwhile."""
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                records.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("msrun.runtime")
    logger.addHandler(handler)
    try:
        run()
    finally:
        logger.removeHandler(handler)
    return records


class Scaled(nn.Module):
    """Writes into a view of a layer's output, and its capture does not see that if it is told so."""

    def __init__(self, *, loses_write: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(24, 24)
        self.head = nn.Linear(24, 6)
        self.loses_write = loses_write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.fc(x)
        if not (self.loses_write and torch.compiler.is_compiling()):
            h[:, 0] = 0
        return F.cross_entropy(self.head(h), y)


def first_step(network: nn.Module, dtype: torch.dtype = torch.float64) -> Found:
    """Train one step, and say whether the parameters have stayed what they were."""
    model = AutoParallel(network.to(dtype))
    if dtype != torch.float64:
        model.mixed_precision("bfloat16")
    before = [p.detach().clone() for p in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def train() -> None:
        model(*own_batch(dtype)).backward()
        optimizer.step()

    error = refused(train)
    stayed = all(torch.equal(a, local(b)) for a, b in zip(before, network.parameters(), strict=True))
    return {"error": error, "stayed": stayed}


def planted(kind: str) -> Found:
    """Faults of ours, which the first step finds before the optimizer has trained with them."""
    right = CompiledCall.backward
    if kind.startswith("lost write"):
        return first_step(Scaled(loses_write=True), torch.float32 if "16 bits" in kind else torch.float64)
    with patch.object(CompiledCall, "backward", lambda *given: {k: 2 * v for k, v in right(*given).items()}):
        return first_step(Scaled())


class Writing(nn.Module):
    """Its code writes wherever it can, and draws from every generator there is."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(24, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[Any] = []
        self.table = {"calls": 0}
        self.last: Tensor | None = None
        self.calls_in_python = 0
        self.generator = torch.Generator().manual_seed(1)
        self.log = log

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.calls_in_python += 1
        self.table["calls"] += 1
        self.seen.append(self.calls_in_python)
        self.log.append("forward")
        print("forward")
        drawn = random.random() + np.random.rand() + torch.rand((), generator=self.generator).item()
        self.last = x.mean().detach() * drawn
        return F.cross_entropy(self.fc(F.dropout(x, 0.2)), y)


def leaves_no_trace(setting: str) -> list[Any]:
    """Train two steps; everything that their code has written."""
    log: list[Any] = []
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    network = Writing(log).double()
    network.register_forward_hook(lambda *_: log.append("hook"))
    network.fc.register_full_backward_hook(lambda *_: log.append("back"))
    model, printed = AutoParallel(network, "data_parallel"), io.StringIO()
    with patch.dict(os.environ, {"MSRUN_VERIFY": setting}), contextlib.redirect_stdout(printed):
        losses = []
        for _ in range(2):
            loss = model(*own_batch())
            loss.backward()
            losses.append(loss.item())
    written = [network.calls.item(), network.seen, network.table, network.last, network.calls_in_python, log]
    drawn = [
        random.random(),
        np.random.rand(),
        torch.rand(()).item(),
        torch.rand((), generator=network.generator).item(),
    ]
    return [losses, *map(str, written), printed.getvalue(), drawn, [p.grad.sum().item() for p in network.parameters()]]


class Loss(nn.Module):
    """A layer, and a loss that is given."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(24, 6)
        self.register_buffer("center", torch.zeros(6))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.fc(x), y)


def of_own_rows() -> dict[str, list[str]]:
    """Losses that data_parallel takes of each rank's rows, and what it says of them."""
    x, y = own_batch()
    ignored = torch.where(torch.arange(8) < (2 if get_rank() else 7), y, -100)
    empty = torch.full_like(y, -100) if get_rank() else y
    rows = slice(0, 8 - 3 * get_rank())

    def contrastive(h: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(h @ h.T, torch.arange(len(h)))

    def counted(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(h, y), (h.argmax(-1) == y).sum()

    class Centered(Loss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            h = self.fc(x)
            self.center += h.detach().mean(0)
            return F.cross_entropy(h, y)

    def said(network: nn.Module, *args: Tensor) -> list[str]:
        model = AutoParallel(network.double(), "data_parallel")

        def train() -> None:
            result = model(*args)
            (result[0] if isinstance(result, tuple) else result).backward()

        return heard(train)

    return {
        "mean": said(Loss(F.cross_entropy), x, y),
        "batch norm": said(with_loss(), x, y),
        "sum": said(Loss(lambda h, y: F.cross_entropy(h, y, reduction="sum")), x, y),
        "ignored": said(Loss(F.cross_entropy), x, ignored),
        "empty": said(Loss(F.cross_entropy), x, empty),
        "uneven": said(Loss(F.cross_entropy), x[rows], y[rows]),
        "contrastive": said(Loss(contrastive), x, y),
        "buffer": said(Centered(F.cross_entropy), x, y),
        "counted": said(Loss(counted), x, y),
    }


def switched_off() -> Found:
    """The variable decides over the setting; a large network is left alone."""
    found = {}
    for setting, value in (("", None), ("", False), ("0", True), ("1", False)):
        model = AutoParallel(Scaled(loses_write=True).double())
        model = model if value is None else model.check_first_step(value)
        with patch.dict(os.environ, {"MSRUN_VERIFY": setting}):
            found[f"{setting} {value}"] = refused(lambda model=model: model(*own_batch())) != "accepted"
    with patch.object(first_step_module, "ELEMENTS", 1):
        found["large"] = refused(lambda: AutoParallel(Scaled(loses_write=True).double())(*own_batch())) != "accepted"
    return found


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
    cut = [tuple(local(p).shape) for p in network.parameters()]
    objects = [id(p) for p in network.parameters()]
    with gathered_parameters(network):
        result = network(*batch())
        same = objects == [id(p) for p in network.parameters()]
    after = [tuple(local(p).shape) for p in network.parameters()]
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

    class Winner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).argmax(-1)

    return {
        "batch norm": refused(lambda: AutoParallel(with_loss(), "data_parallel").verify(*own_batch())),
        "hybrid": refused(lambda: AutoParallel(with_loss(), "hybrid_parallel").verify(*own_batch())),
        "no gradient": refused(lambda: AutoParallel(Winner().double(), "data_parallel").verify(own_batch()[0])),
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


CASES: dict[str, Callable[[], Any]] = {
    "equal/operators": operator_strategies,
    **{f"equal/hsdp {level}": lambda level=level: hsdp(level) for level in ("level1", "level2", "level3")},
    "equal/wrapped": wrapped,
    "equal/recomputed": recomputed,
    "equal/pipeline": pipeline,
    "equal/bfloat16": lambda: mixed("bfloat16", None, "semi_auto"),
    "equal/float16": lambda: mixed("float16", "dynamic", "semi_auto"),
    # the gradient of the bias before the batch norm is what 16 bits have rounded, and nothing else
    "equal/bfloat16 batch norm": lambda: mixed("bfloat16", None, "semi_auto", has_norm=True),
    "equal/bfloat16 ddp": lambda: mixed("bfloat16", None, "data_parallel"),
    "equal/ddp": lambda: data_parallel(is_sharded=False),
    "equal/ddp sums": lambda: data_parallel(is_sharded=False, compat="mindspore"),
    "equal/fsdp2": lambda: data_parallel(is_sharded=True),
    "equal/fsdp2 number": single_number,
    "equal/columns": columns_of_the_batch,
    "equal/input": lambda: gradient_of_input("semi_auto"),
    "equal/input ddp": lambda: gradient_of_input("data_parallel"),
    "equal/step": lambda: step_function("semi_auto", is_sharded=True),
    "equal/step ddp": lambda: step_function("data_parallel", is_sharded=False),
    "equal/step fsdp2": lambda: step_function("data_parallel", is_sharded=True),
    "equal/loss outside": lambda: loss_outside("semi_auto"),
    "equal/loss outside ddp": lambda: loss_outside("data_parallel"),
    "equal/loss outside fsdp2": lambda: loss_outside("data_parallel", is_sharded=True),
    "wrong rule": wrong_rule,
    **{
        f"planted/{kind}": lambda kind=kind: planted(kind)
        for kind in ("lost write", "lost write in 16 bits", "gradient")
    },
    "own rows": of_own_rows,
    "no trace": lambda: [leaves_no_trace(setting) for setting in ("", "0", "1")],
    "switch": switched_off,
    "stale capture": stale_capture,
    **{f"traces/{kind}": lambda kind=kind: traces(kind) for kind in ("semi_auto", "deferred", "ddp", "fsdp2")},
    "traces/between passes": between_passes,
    "whole": whole_for_a_while,
    "refusals": refusals,
    "variable": by_variable,
}


EQUAL, TRACES, PLANTED = ([n for n in CASES if n.startswith(kind)] for kind in ("equal/", "traces/", "planted/"))
FAST = (EQUAL[0], TRACES[0], "wrong rule", "stale capture", "own rows", "no trace", PLANTED[0])
outcomes = on_all_ranks(CASES)
on_two = on_ranks(2)
GRADIENTS = [f"gradient of {name}" for name in ("fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight")]


def rows(cases: list[str]) -> list[Any]:
    return slow_but([case for case in cases if case in FAST], cases)


@on_two
@pytest.mark.parametrize("case", rows(EQUAL))
def test_a_right_step_is_verified_with_every_gradient(case: str) -> None:
    for rank in outcomes(case):
        assert rank["is_equal"], rank["text"]
        assert set(GRADIENTS) | {"result 0" if "outside" in case else "loss"} <= set(rank["names"])
        assert rank.get("heard", []) == rank.get("calls", []) == []  # a step function is stopped before it trains


@pytest.mark.slow
@on_two
def test_buffers_and_gradients_of_inputs_are_compared_too() -> None:
    assert {f"buffer norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")} <= set(
        outcomes("equal/operators")[0]["names"]
    )
    for case in ("equal/input", "equal/input ddp"):
        assert "gradient of input 0" in outcomes(case)[0]["names"]


@on_two
def test_a_planted_wrong_operator_rule_is_found_on_every_rank() -> None:
    for rank in outcomes("wrong rule"):
        assert rank["right"]
        assert rank["failed"] == ["gradient of fc.bias", "gradient of fc.weight", "loss"]
        assert rank["error"].startswith("VerificationError: 3 of 3 values differ from one process, first ")
        assert "DIFFERS on rank" in rank["text"]
        for error in (rank["error"], rank["first"]):
            assert "the first operator that differs is aten.log_softmax.int (" in error


@on_two
def test_a_capture_that_has_become_stale_is_found() -> None:
    for rank in outcomes("stale capture"):
        assert rank["fresh"] and not rank["is_equal"]


@on_two
@pytest.mark.parametrize("case", rows(TRACES))
def test_training_goes_on_as_if_nothing_had_been_verified(case: str) -> None:
    assert all(rank["is_same"] for rank in outcomes(case))


@pytest.mark.slow
@on_two
def test_a_network_holds_whole_parameters_for_a_while() -> None:
    assert all(rank["is_same"] and rank["is_cut"] for rank in outcomes("whole"))


@pytest.mark.slow
@on_two
def test_what_cannot_be_verified_says_so_in_one_line_on_every_rank() -> None:
    for rank in outcomes("refusals"):
        assert "norm normalises the rows of each rank apart" in rank["batch norm"]
        assert "cut by hand" in rank["hybrid"]
        assert "none of whose results has a gradient" in rank["no gradient"]
        assert "does not run in one process: rank 1: ValueError: only of one rank" in rank["fails"]
        assert rank["stand_alone"] == "verify: stand_alone ranks exchange nothing: there is nothing to compare"
        assert "called no function of value_and_grad" in rank["no gradients"]
        assert not [text for text in rank.values() if "\n" in text]
        assert {text.partition(":")[0] for text in rank.values()} == {"UnverifiableError", "CaptureError", "verify"}


@pytest.mark.slow
@on_two
def test_msrun_verify_looks_at_the_first_training_step_and_raises() -> None:
    for rank in outcomes("variable"):
        assert rank["losses"] == rank["plain"]
        assert "values differ from one process, first " in rank["error"]
        assert 'parallel_mode="semi_auto" computes loss and buffers over the rows of all ranks' in rank["error"]


FIRST_TO_DIFFER = {
    "planted/lost write": "the first operator that differs is aten.linear of head (",
    "planted/lost write in 16 bits": "the first operator that differs is aten.",
    "planted/gradient": "the results are right, and the gradients 2 times as large as they should be",
}


@on_two
@pytest.mark.parametrize("case", rows(PLANTED))
def test_the_first_step_finds_what_is_wrong_before_anything_is_trained(case: str) -> None:
    for rank in outcomes(case):
        assert rank["error"].startswith("VerificationError: ") and FIRST_TO_DIFFER[case] in rank["error"]
        assert rank["stayed"]


SAID_OF_OWN_ROWS = {
    "sum": "take the mean over the rows, or have gradients summed (gradients_mean=False)",
    "ignored": "masked, padded or ignored count unevenly",
    "empty": "none of its rows or labels is valid",
    "uneven": "the ranks have different numbers of rows",
    "contrastive": "rows are compared with each other",
    "buffer": "each rank writes buffers from its own rows",
    "counted": "these numbers are each rank's own",
}


@on_two
def test_data_parallel_says_once_where_it_is_not_one_process() -> None:
    first, *others = outcomes("own rows")
    assert first["mean"] == first["batch norm"] == []
    for case, reason in SAID_OF_OWN_ROWS.items():
        (line,) = first[case]
        assert line.startswith("data_parallel is not one process here: ") and reason in line and "\n" not in line
        assert 'parallel_mode="semi_auto"' in line
    assert all(not said for rank in others for said in rank.values())


@on_two
def test_the_check_of_the_first_step_leaves_no_trace() -> None:
    for rank in outcomes("no trace"):
        checked, unchecked, asked = rank
        assert checked == unchecked == asked


@pytest.mark.slow
@on_two
def test_the_variable_decides_over_the_setting_and_large_networks_are_left_alone() -> None:
    for rank in outcomes("switch"):
        assert rank == {" None": True, " False": False, "0 True": False, "1 False": True, "large": False}
