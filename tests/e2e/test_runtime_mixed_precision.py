"""Mixed precision in every mode, beside one process under torch's own autocast and GradScaler."""

import functools
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from mode_networks import batches, make_network, mine, momentum, step_function
from on_ranks import on_ranks
from torch import nn

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Model,
    Pipeline,
    WithLoss,
    get_rank,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic
from msrun.shm.collectives import Reduction

STEPS, BAD_STEP, SCALE = 8, 3, 1024.0
on_four = on_ranks(4)
pytestmark = pytest.mark.slow


@functools.cache
def serial(dtype, scale=1.0, skipped=None):
    """Return the losses of one process with float32 weights; dtype None: float32 throughout."""
    given = [batch for index, batch in enumerate(batches(torch.float32, STEPS)) if index != skipped]
    network = make_network(torch.float32)
    optimizer = momentum(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    losses = []
    for images, labels in given:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(network(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def mixed(mode, dtype, scale=None, **hsdp):
    def build(network):
        step = AutoParallel(network, mode).mixed_precision(dtype, scale)
        return step.hsdp(**{"threshold": 1, **hsdp}) if hsdp else step

    return build


@functools.cache
def trained(case):
    """Train in one way beside one process under autocast; return the step, and leave the traffic of the last one."""
    build, dtype, form, cut = WAYS[case]
    scale = SCALE if case.startswith("scaled") else 1.0
    right, wide = serial(dtype, scale), serial(None)
    network = make_network(torch.float32)
    for name in cut:
        shard(getattr(network, name), CUTS[name])
    optimizer = momentum(network)
    step = build(WithLoss(network, F.cross_entropy) if form == "module" else step_function(network, optimizer))
    if cut:
        step.dataset_strategy("full_batch")
    losses = []
    for images, labels in batches(torch.float32, STEPS):
        traffic.reset()
        loss = step(*((images, labels) if cut else (mine(images), mine(labels))))
        if form == "module":
            loss.backward()
            assert {parameter.grad.dtype for parameter in network.parameters()} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    MOVED[case] = dict(traffic.bytes)
    assert losses == pytest.approx(right, rel=1e-3)
    assert losses != pytest.approx(wide, rel=1e-6), "nothing was computed in 16 bits"
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    if case == "columns":  # bit by bit those of autocast
        assert losses[0] == pytest.approx(right[0], rel=1e-7)
        assert abs(losses[0] - wide[0]) > 1e-5
    return step


MOVED = {}
CUTS = {"layer1": ((1, 1), (4, 1), (4,)), "layer2": ((1, 4), (1, 4))}
MODES = {
    "semi-auto": ("semi_auto", {}),
    "hsdp": ("semi_auto", {"optimizer_level": "level1"}),
    "hsdp-level3": ("semi_auto", {"optimizer_level": "level3"}),
    "data-parallel": ("data_parallel", {}),
    "fsdp": ("data_parallel", {"threshold": 1}),
}
SCALED = ("semi-auto", "hsdp-level3", "data-parallel")
FORMS = ("module", "step")
WAYS = {
    "columns": (mixed("semi_auto", "bfloat16"), torch.bfloat16, "module", ("layer1",)),
    "columns-rows": (mixed("semi_auto", "bfloat16"), torch.bfloat16, "module", ("layer1", "layer2")),
    "float16-unscaled": (mixed("semi_auto", "float16"), torch.float16, "module", ()),
    **{
        f"mixed/{name}-{form}": (mixed(mode, "bfloat16", **hsdp), torch.bfloat16, form, ())
        for name, (mode, hsdp) in MODES.items()
        for form in FORMS
    },
    **{
        f"scaled/{name}-{form}": (mixed(MODES[name][0], "float16", SCALE, **MODES[name][1]), torch.float16, form, ())
        for name in SCALED
        for form in FORMS
    },
}


@on_four
@pytest.mark.parametrize("case", WAYS)
def test_mixed_precision_trains_as_one_process_under_autocast_with_weights_in_float32(case):
    trained(case)


@on_four
def test_weights_are_gathered_in_16_bits_and_gradients_summed_in_32():
    trained("mixed/hsdp-module")
    elements, moved = 32 * 24, MOVED["mixed/hsdp-module"]
    assert (moved["all_gather"], moved["reduce_scatter"]) == (elements // 4 * 2, elements * 4)


@on_four
@pytest.mark.parametrize("form", FORMS)
def test_looking_for_overflows_costs_one_number(form):
    cases = [f"{kind}/data-parallel-{form}" for kind in ("scaled", "mixed")]
    for case in cases:
        trained(case)
    scaled, plain = (MOVED[case]["all_reduce"] for case in cases)
    assert scaled - plain == 4


@on_four
def test_float16_without_a_scale_is_said_aloud():
    notes = trained("float16-unscaled").plan.notes
    assert any('give mixed_precision(loss_scale="dynamic")' in note for note in notes)


# -- overflows ----------------------------------------------------------------------------------------------------


@on_four
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*SCALED, "stand-alone"])
def test_gradients_that_overflow_on_one_rank_are_skipped_by_all(ranks, name, form):
    """Nobody's weights change in that step, and the next ones go on as if it had not been. Ranks that stand alone skip
    their own."""
    mode, hsdp = MODES.get(name, ("stand_alone", {}))
    network = make_network(torch.float32)
    optimizer = momentum(network)
    called = WithLoss(network, F.cross_entropy) if form == "module" else step_function(network, optimizer)
    step = mixed(mode, "float16", "dynamic", **hsdp)(called)
    scales, changed, losses = [], [], []
    for index, (images, labels) in enumerate(batches(torch.float32, STEPS)):
        part = mine(images)
        if index == BAD_STEP and ranks.rank == 1:
            part = part * 1e5  # 65504 is the largest number of float16
        before = [local(parameter).clone() for parameter in network.parameters()]
        loss = step(part, mine(labels))
        if form == "module":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        losses.append(float(loss.detach()))
        changed.append(any(not torch.equal(local(p), b) for p, b in zip(network.parameters(), before, strict=True)))
        scales.append(step.loss_scale)
    skips = name != "stand-alone" or ranks.rank == 1
    assert changed == [index != BAD_STEP or not skips for index in range(STEPS)]
    assert scales == [2.0**16] * BAD_STEP + [2.0 ** (15 if skips else 16)] * (STEPS - BAD_STEP)
    if name != "stand-alone":
        assert losses[BAD_STEP + 1 :] == pytest.approx(serial(torch.float16, SCALE, BAD_STEP)[BAD_STEP:], rel=1e-3)
    assert all(local(state["momentum_buffer"]).isfinite().all() for state in optimizer.state.values())


class Amplified(nn.Module):
    """A network whose gradient overflows in one column of the first weight, while its loss stays finite."""

    def __init__(self):
        super().__init__()
        self.inner = make_network(torch.float32)
        with torch.no_grad():
            self.inner.layer1.weight[0] = 0.0
            self.inner.layer1.bias[0] = 1e-6

    def forward(self, x, y, factors):
        hidden = F.relu(self.inner.layer1(x)) * factors
        return F.cross_entropy(self.inner.layer2(hidden), y)


@on_four
def test_overflow_that_only_one_rank_can_see_is_skipped_by_all(ranks):
    """Only the rank that holds the column can know."""
    network = Amplified()
    for name, strategy in CUTS.items():
        shard(getattr(network.inner, name), strategy)
    optimizer = momentum(network)
    step = AutoParallel(network).mixed_precision("float16", "dynamic").dataset_strategy("full_batch")
    for index, (images, labels) in enumerate(batches(torch.float32, STEPS)):
        factors = torch.ones(32)
        factors[0] = 1e5 if index == BAD_STEP else 1
        before = [local(parameter).clone() for parameter in network.parameters()]
        step(images, labels, factors).backward()
        sees = any(not bool(local(p.grad).isfinite().all()) for p in network.parameters() if p.grad is not None)
        assert sees is (index == BAD_STEP and ranks.rank == 0)
        optimizer.step()
        optimizer.zero_grad()
        if index:  # the first call has cut the parameters
            pairs = zip(network.parameters(), before, strict=True)
            assert any(not torch.equal(local(parameter), old) for parameter, old in pairs) is (index != BAD_STEP)
        assert step.loss_scale == 2.0 ** (16 if index < BAD_STEP else 15)


@on_four
def test_model_trains_with_a_dynamic_loss_scale():
    given = list(batches(torch.float32, STEPS))
    network = make_network(torch.float32)
    parallel = AutoParallel(WithLoss(network, F.cross_entropy)).mixed_precision("float16", "dynamic").hsdp(threshold=1)
    Model(parallel, optimizer=momentum(network)).train(1, [(mine(x), mine(y)) for x, y in given])
    assert parallel.loss_scale == 2.0**16
    with torch.no_grad():
        loss = float(parallel(mine(given[0][0]), mine(given[0][1])))
    assert loss < serial(torch.float16, 2.0**16)[0] - 0.1


# -- sums of short gradients --------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Its gradient is the sum of its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x):
        return (x * self.weight).sum()


@contextmanager
def summed_types():
    """Give the types in which the ranks add up the gradient, the only message of four numbers."""
    types = set()
    reduce = Reduction.reduce

    def note(self, parts, result):
        if result.numel() == 4:
            types.add(str(result.dtype))
        reduce(self, parts, result)

    with mock.patch.object(Reduction, "reduce", note):
        yield types


@on_four
@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize(
    ("mode", "form"), [("fsdp", "module"), *((m, f) for m in ("semi_auto", "data_parallel") for f in FORMS)]
)
def test_short_gradients_are_added_up_in_float32_unless_switched_off(mode, form, is_wide):
    """256 and three halves: 257.5 in float32, 256 in bfloat16, which has 8 bits."""
    network = Weighted()
    x = torch.full((1, 4), 256.0 if get_rank() == 0 else 0.5, dtype=torch.bfloat16)
    function = value_and_grad(lambda x: network(x), None, list(network.parameters()))
    step = AutoParallel(network if form == "module" else lambda x: function(x), mode.replace("fsdp", "data_parallel"))
    if mode == "fsdp":
        step.hsdp(threshold=0)
    step = step.enable_fp32_communication() if is_wide else step.disable_gradient_fp32_sync()
    gradient: Any
    with summed_types() as types:
        if form == "module":
            step(x).backward()
            gradient = network.weight.grad
        else:
            _, (gradient,) = step(x)
    if mode != "fsdp":  # where each rank adds up its part alone
        assert types == {"torch.float32" if is_wide else "torch.bfloat16"}
    if is_wide:
        share = 1.0 if mode == "semi_auto" else 0.25  # a sum of the network's own, or the mean of the ranks
        assert (gradient.full_tensor() if mode == "fsdp" else gradient).tolist() == [258.0 * share] * 4
        assert gradient.dtype == torch.bfloat16


# -- gradients too small for float16 ------------------------------------------------------------------------------


class Faint(nn.Module):
    """Its gradients are too small for float16, unless the backward pass begins with a loss scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return (self.second(hidden).float() * 2.0**-22).sum(-1).mean()


PIPELINE = lambda net: Pipeline(net, 4, {"first": 0, "second": 1})  # noqa: E731
DIVIDED = {
    **{f"accumulation, {m}": (lambda n: GradAccumulation(n, 4), m, "") for m in ("semi_auto", "data_parallel")},
    "copies": (lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 2), "semi_auto", ""),
    **{f"pipeline, {word}": (PIPELINE, "semi_auto", word) for word in ("1f1b", "zero_bubble")},
}


@on_four
@pytest.mark.parametrize("case", DIVIDED)
def test_gradients_of_micro_batches_too_small_for_float16_survive_with_a_loss_scale(case):
    """They are computed inside the call."""
    wrap, mode, scheduler = DIVIDED[case]
    x = torch.rand(32, 6, generator=torch.Generator().manual_seed(3))
    network, right = Faint(), Faint()
    step = AutoParallel(wrap(network), mode).mixed_precision("float16", "dynamic")
    if mode == "semi_auto":
        step.dataset_strategy("full_batch")
    if scheduler:
        step.pipeline(stages=2, scheduler=scheduler)
    given = x.clone().requires_grad_(mode == "semi_auto" and not scheduler)
    for _ in range(2):  # from the second call on, the parameters have the hooks of the scale
        step.zero_grad()
        given.grad = None
        (step(mine(given) if mode == "data_parallel" else given) * 3).backward()
    x.requires_grad_()
    (right(x) * 3).backward()
    held = [local(parameter.grad) for parameter in step.parameters() if parameter.grad is not None]
    wanted = [p.grad for p in right.parameters()]
    if scheduler:  # this rank's stage
        wanted = wanted[:2] if get_rank() < 2 else wanted[2:]
    pairs = list(zip([gradient for gradient in held if gradient.numel()], wanted, strict=True))
    if given.requires_grad:
        pairs.append((given.grad, x.grad))
    assert max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs) < 1e-2


class Own(nn.Module):
    """Says `torch.autocast` itself."""

    def __init__(self):
        super().__init__()
        self.inner = make_network(torch.float32)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.inner.layer1(x)
            with torch.autocast("cpu", enabled=False):
                hidden = F.relu(hidden.float())
            return self.inner.layer2(hidden).float()


@on_four
def test_network_that_says_autocast_itself_is_captured_with_its_casts():
    network, right = Own(), Own()
    shard(network.inner.layer1, CUTS["layer1"])
    step = AutoParallel(WithLoss(network, F.cross_entropy)).dataset_strategy("full_batch")
    images, labels = next(batches(torch.float32))
    loss, expected = step(images, labels), F.cross_entropy(right(images), labels)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert list(step.plan.notes) == []
