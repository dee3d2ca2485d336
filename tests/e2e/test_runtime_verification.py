"""`AutoParallel.verify` and MSRUN_VERIFY: the step of one process, and what differs from it is found."""

import contextlib
import io
import logging
import os
import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import local
from mode_networks import mine
from on_ranks import on_ranks
from torch import Tensor, nn

from msrun.errors import ParallelError, VerificationError
from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    Pipeline,
    WithLoss,
    get_rank,
    no_init_parameters,
    shard,
    value_and_grad,
)
from msrun.runtime.nn.random_stream import stream_of
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.verification import verify as verify_module
from msrun.runtime.sharding.operators.along_split import Softmax

GRADIENTS = {f"gradient of {name}" for name in ("fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight")}
on_two = on_ranks(2)
slow_on_two = on_ranks(2, slow=True)


class Network(nn.Module):
    """Dropout, and a normalisation with running statistics unless it is left out."""

    def __init__(self, *, has_norm=True):
        super().__init__()
        self.fc1 = nn.Linear(24, 32)
        self.norm = nn.BatchNorm1d(32) if has_norm else nn.LayerNorm(32)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(32, 6)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.norm(self.fc1(x)))))


def with_loss(*, has_norm=True, dtype=torch.float64):
    torch.manual_seed(5)
    return WithLoss(Network(has_norm=has_norm).to(dtype), nn.CrossEntropyLoss())


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(16, 24, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 6, (16,), generator=generator)


def own_batch(dtype=torch.float64):
    return tuple(mine(tensor) for tensor in batch(dtype))


def refused(run):
    try:
        run()
    except ParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def heard(run):
    """Return what msrun warns of meanwhile."""
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
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

    def __init__(self, *, loses_write=False):
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(24, 24)
        self.head = nn.Linear(24, 6)
        self.loses_write = loses_write

    def forward(self, x, y):
        h = self.fc(x)
        if not (self.loses_write and torch.compiler.is_compiling()):
            h[:, 0] = 0
        return F.cross_entropy(self.head(h), y)


# -- a right step --------------------------------------------------------------------------------------------------


def operator_strategies():
    network = with_loss()
    shard(network.network.fc1, ((1, 1), (2, 1)))
    shard(network.network.fc2, ((1, 2), (1, 2)))
    return AutoParallel(network).dataset_strategy("full_batch"), batch()


def data_parallel():
    return AutoParallel(with_loss(has_norm=False), "data_parallel"), own_batch()


def single_number():
    """A temperature is a parameter without a dimension, which FSDP2 cannot cut."""

    class Tempered(Network):
        def __init__(self):
            super().__init__(has_norm=False)
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return super().forward(x) * self.scale.exp()

    torch.manual_seed(5)
    network = WithLoss(Tempered().double(), nn.CrossEntropyLoss())
    return AutoParallel(network, "data_parallel").hsdp(threshold=0, optimizer_level="level3"), own_batch()


def gradient_of_input(mode):
    x, y = own_batch()
    return AutoParallel(with_loss(has_norm=False), mode), (x.requires_grad_(), y)


def step_function(mode, *, is_sharded):
    network = with_loss(has_norm=False)
    gradients_of = value_and_grad(lambda x, y: network(x, y), None, list(network.parameters()))

    def step(x, y):
        gradients_of(x, y)
        raise AssertionError("a step function is stopped before it trains")

    model = AutoParallel(step, mode)
    return model.hsdp(threshold=0) if is_sharded else model, own_batch()


def loss_outside(mode, *, is_sharded=False):
    """A network without a loss: its loss is outside, and goes back through a step before it as well."""
    torch.manual_seed(5)
    network = Network(has_norm=False).double()
    first = AutoParallel(nn.Linear(24, 24).double(), mode)
    model = AutoParallel(network, mode)
    model = model.hsdp(threshold=0) if is_sharded else model
    x, y = own_batch()
    assert not [line for line in heard(lambda: F.cross_entropy(model(first(x)), y).backward()) if "process" in line]
    return model, (x.requires_grad_(),)


def pipeline():
    return AutoParallel(Pipeline(MicroBatchInterleaved(with_loss(has_norm=False), 2), 4)).pipeline(2), batch()


BUFFERS = {f"buffer norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
EQUAL = {
    "operators": (operator_strategies, {"loss", *BUFFERS}),
    "pipeline": (pipeline, {"loss"}),
    "ddp": (data_parallel, {"loss"}),
    "fsdp2 number": (single_number, {"loss", "gradient of scale"}),
    "input": (lambda: gradient_of_input("semi_auto"), {"loss", "gradient of input 0"}),
    "input ddp": (lambda: gradient_of_input("data_parallel"), {"loss", "gradient of input 0"}),
    "step": (lambda: step_function("semi_auto", is_sharded=True), {"loss"}),
    "step fsdp2": (lambda: step_function("data_parallel", is_sharded=True), {"loss"}),
    "loss outside": (lambda: loss_outside("semi_auto"), {"result 0"}),
    "loss outside ddp": (lambda: loss_outside("data_parallel"), {"result 0"}),
    "loss outside fsdp2": (lambda: loss_outside("data_parallel", is_sharded=True), {"result 0"}),
}


@on_two
@pytest.mark.parametrize("case", slow_but(["operators"], EQUAL))
def test_a_right_step_is_verified_with_every_gradient(case):
    make, others = EQUAL[case]
    model, args = make()
    report = model.verify(*args, raises=False)
    assert report.is_equal, str(report)
    assert GRADIENTS | others <= {each.name for each in report.differences}


# -- what it must find --------------------------------------------------------------------------------------------


@on_two
def test_a_planted_wrong_operator_rule_is_found_on_every_rank():
    """The rule of softmax takes the axes of the other dimension: each rank then normalises its own classes."""
    right = Softmax.lower

    def swapped(self, call, form, build, inputs, split):
        return right(self, call, form, build, inputs, {"d0": split.get("d1", ()), "d1": split.get("d0", ())})

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(24, 6)

        def forward(self, x, y):
            return -(F.log_softmax(self.fc(x), 1) * F.one_hot(y, 6)).sum(1).mean()

    def model():
        torch.manual_seed(5)
        network = Scores().double()
        shard(network.fc, ((1, 1), (2, 1)))
        return AutoParallel(network).dataset_strategy("full_batch")

    with patch.object(Softmax, "lower", swapped):
        first = refused(lambda: model()(*batch()))
        broken = model()
        report = broken.verify(*batch(), raises=False)
    assert sorted(each.name for each in report.failures) == ["gradient of fc.bias", "gradient of fc.weight", "loss"]
    assert "DIFFERS on rank" in str(report)
    error = refused(lambda: broken.verify(*batch()))
    assert error.startswith("VerificationError: 3 of 3 values differ from one process, first ")
    for text in (error, first):
        assert "the first operator that differs is aten.log_softmax.int (" in text
    assert model().verify(*batch()).is_equal


@on_two
def test_a_capture_that_has_become_stale_is_found():
    """What no guard watches, a variable of the environment, changes after the capture."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(24, 6)

        def forward(self, x):
            return self.fc(x) * float(os.environ.get("SCALE_OF_TEST", "1"))

    torch.manual_seed(5)
    model = AutoParallel(WithLoss(Scaled().double(), nn.CrossEntropyLoss()))
    assert model.verify(*own_batch()).is_equal
    with patch.dict(os.environ, {"SCALE_OF_TEST": "0.5"}):
        assert not model.verify(*own_batch(), raises=False).is_equal


# -- the first step, which checks itself --------------------------------------------------------------------------

LOST = {
    "lost write": "the first operator that differs is aten.linear of head (",
    "lost write in 16 bits": "the first operator that differs is aten.",
    "gradient": "the results are right, and the gradients 2 times as large as they should be",
}


@on_two
@pytest.mark.parametrize("kind", slow_but(["lost write"], LOST))
def test_the_first_step_finds_what_is_wrong_before_anything_is_trained(kind):
    dtype = torch.float32 if "16 bits" in kind else torch.float64
    network = Scaled(loses_write="write" in kind).to(dtype)
    model = AutoParallel(network)
    if dtype != torch.float64:
        model.mixed_precision("bfloat16")
    before = [p.detach().clone() for p in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def train():
        model(*own_batch(dtype)).backward()
        optimizer.step()

    right, factor = CompiledCall.backward, 2 if kind == "gradient" else 1
    doubled = lambda *given: {k: factor * v for k, v in right(*given).items()}  # noqa: E731
    with patch.object(CompiledCall, "backward", doubled):
        error = refused(train)
    assert error.startswith("VerificationError: ") and LOST[kind] in error
    assert all(torch.equal(a, local(b)) for a, b in zip(before, network.parameters(), strict=True))


class Writing(nn.Module):
    """Its code writes wherever it can, and draws from every generator there is."""

    def __init__(self, log):
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

    def forward(self, x, y):
        self.calls += 1
        self.calls_in_python += 1
        self.table["calls"] += 1
        self.seen.append(self.calls_in_python)
        self.log.append("forward")
        print("forward")
        drawn = random.random() + np.random.rand() + torch.rand((), generator=self.generator).item()
        self.last = x.mean().detach() * drawn
        return F.cross_entropy(self.fc(F.dropout(x, 0.2)), y)


def leaves_no_trace(setting):
    """Train two steps; everything that their code has written."""
    log = []
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


@on_two
def test_the_check_of_the_first_step_leaves_no_trace():
    checked, unchecked, asked = (leaves_no_trace(setting) for setting in ("", "0", "1"))
    assert checked == unchecked == asked


class Loss(nn.Module):
    """A layer, and a loss that is given."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(24, 6)
        self.register_buffer("center", torch.zeros(6))
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.fc(x), y)


def contrastive(h, _):
    return F.cross_entropy(h @ h.T, torch.arange(len(h)))


def counted(h, y):
    return F.cross_entropy(h, y), (h.argmax(-1) == y).sum()


class Centered(Loss):
    def forward(self, x, y):
        h = self.fc(x)
        self.center += h.detach().mean(0)
        return F.cross_entropy(h, y)


@on_two
def test_data_parallel_says_once_where_it_is_not_one_process(ranks):
    """Losses that data_parallel takes of each rank's rows."""
    x, y = own_batch()
    ignored = torch.where(torch.arange(8) < (2 if ranks.rank else 7), y, -100)
    empty = torch.full_like(y, -100) if ranks.rank else y
    rows = slice(0, 8 - 3 * ranks.rank)
    losses = [
        (Loss(F.cross_entropy), (x, y), ""),
        (with_loss(), (x, y), ""),
        (Loss(lambda h, y: F.cross_entropy(h, y, reduction="sum")), (x, y),
         "take the mean over the rows, or have gradients summed (gradients_mean=False)"),
        (Loss(F.cross_entropy), (x, ignored), "masked, padded or ignored count unevenly"),
        (Loss(F.cross_entropy), (x, empty), "none of its rows or labels is valid"),
        (Loss(F.cross_entropy), (x[rows], y[rows]), "the ranks have different numbers of rows"),
        (Loss(contrastive), (x, y), "rows are compared with each other"),
        (Centered(F.cross_entropy), (x, y), "each rank writes buffers from its own rows"),
        (Loss(counted), (x, y), "these numbers are each rank's own"),
    ]  # fmt: skip
    for network, args, reason in losses:
        model = AutoParallel(network.double(), "data_parallel")

        def train(model=model, args=args):
            result = model(*args)
            (result[0] if isinstance(result, tuple) else result).backward()

        said = heard(train)
        assert len(said) == (ranks.rank == 0 and reason != ""), (reason, said)
        for line in said:
            assert line.startswith("data_parallel is not one process here: ") and reason in line and "\n" not in line
            assert 'parallel_mode="semi_auto"' in line


@slow_on_two
def test_the_variable_decides_over_the_setting_and_large_networks_are_left_alone():
    for setting, value, is_checked in (("", None, True), ("", False, False), ("0", True, False), ("1", False, True)):
        model = AutoParallel(Scaled(loses_write=True).double())
        model = model if value is None else model.check_first_step(value)
        with patch.dict(os.environ, {"MSRUN_VERIFY": setting}):
            assert (refused(lambda model=model: model(*own_batch())) != "accepted") is is_checked
    with patch.object(verify_module, "ELEMENTS", 1):
        assert refused(lambda: AutoParallel(Scaled(loses_write=True).double())(*own_batch())) == "accepted"


# -- what it must leave -------------------------------------------------------------------------------------------


@on_two
@pytest.mark.parametrize("kind", slow_but(["ddp"], ["semi_auto", "deferred", "ddp", "fsdp2"]))
def test_training_goes_on_as_if_nothing_had_been_verified(kind):
    """The same in every bit, with a verification before each of three steps or without."""

    def train(*, verifies):
        with no_init_parameters() if kind == "deferred" else contextlib.nullcontext():
            network = with_loss(has_norm=kind in ("semi_auto", "deferred"))
        hooked = []
        weight = network.network.fc2.weight
        if kind != "ddp":  # which rejects such hooks
            weight.register_post_accumulate_grad_hook(lambda _: hooked.append(1))
        mode = "data_parallel" if kind in ("ddp", "fsdp2") else "semi_auto"
        model = AutoParallel(network, mode)
        model = model.hsdp(threshold=0) if kind != "ddp" else model
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        torch.manual_seed(9)
        seen = []
        for _ in range(3):
            if verifies:
                gradients = [p.grad for p in network.parameters()]
                assert model.verify(*own_batch()).is_equal
                kept = zip(gradients, network.parameters(), strict=True)
                assert all(old is p.grad for old, p in kept) or not gradients[0]
            optimizer.zero_grad(set_to_none=False)
            loss = model(*own_batch())
            loss.backward()
            optimizer.step()
            values = [*network.parameters(), *network.buffers()]
            grads = [p.grad for p in network.parameters()]
            seen += [float(loss), [local(v).tolist() for v in values], [local(g).tolist() for g in grads]]
            seen += [float(torch.rand(())), stream_of(network).step, stream_of(network).seed, network.training]
        return [*seen, len(hooked)]

    assert train(verifies=True) == train(verifies=False)


@slow_on_two
def test_a_loss_of_before_still_has_its_backward_pass_after_a_verification():
    found = []
    for verifies in (True, False):
        model = AutoParallel(network := with_loss()).hsdp(threshold=0)
        loss = model(*own_batch())
        if verifies:
            model.verify(*own_batch())
        loss.backward()
        found.append([local(p.grad) for p in network.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- what it refuses, and the variable ----------------------------------------------------------------------------


class Failing(Loss):
    def forward(self, x, y):
        if x.shape[0] == 16 and get_rank() == 1:
            raise ValueError("only of one rank")
        return F.cross_entropy(self.fc(x), y)


class Winner(Loss):
    def forward(self, x, y):
        return self.fc(x).argmax(-1)


REFUSED = {
    "norm normalises the rows of each rank apart": lambda: AutoParallel(with_loss(), "data_parallel"),
    "cut by hand": lambda: AutoParallel(with_loss(), "hybrid_parallel"),
    "none of whose results has a gradient": lambda: AutoParallel(Winner(F.cross_entropy).double(), "data_parallel"),
    "does not run in one process: rank 1: ValueError: only of one rank": lambda: AutoParallel(
        Failing(F.cross_entropy).double(), "data_parallel"
    ),
    "called no function of value_and_grad": lambda: AutoParallel(lambda *_: torch.zeros(())),
}


@slow_on_two
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_verified_says_so_in_one_line_on_every_rank(words):
    text = refused(lambda: REFUSED[words]().verify(*own_batch()))
    assert words in text and "\n" not in text
    assert text.startswith(("UnverifiableError: ", "CaptureError: "))


@slow_on_two
def test_ranks_that_stand_alone_have_nothing_to_compare():
    report = AutoParallel(with_loss(), "stand_alone").verify(*own_batch())
    assert str(report) == "verify: stand_alone ranks exchange nothing: there is nothing to compare"


class Odd(Loss):
    def forward(self, x, y):
        return F.cross_entropy(self.fc(x), y) * (x.shape[0] / 16)


@slow_on_two
def test_msrun_verify_looks_at_the_first_training_step_and_raises():
    losses = []
    for setting in ("1", ""):
        with patch.dict(os.environ, {"MSRUN_VERIFY": setting}):
            model = AutoParallel(with_loss())
            with torch.no_grad():
                model(*own_batch())
            losses.append([float(model(*own_batch()).detach()) for _ in range(2)])
            AutoParallel(with_loss(), "data_parallel")(*own_batch())  # cannot be verified
    assert losses[0] == losses[1]
    with patch.dict(os.environ, {"MSRUN_VERIFY": "1"}), pytest.raises(VerificationError) as error:
        AutoParallel(Odd(F.cross_entropy).double(), "data_parallel")(*own_batch())
    assert "values differ from one process, first " in str(error.value)
    assert 'parallel_mode="semi_auto" computes loss and buffers over the rows of all ranks' in str(error.value)
