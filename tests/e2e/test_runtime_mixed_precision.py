"""Mixed precision in every mode, beside one process under torch's own autocast and GradScaler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from mode_networks import batches, make_network, mine, momentum, step_function
from on_ranks import on_all_ranks, on_ranks
from torch import Tensor, nn

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Model,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.shm.reduction import Reduction

Result = dict[str, Any]
STEPS = 8
BAD_STEP = 3
SCALE = 1024.0
Build = Callable[[Any], AutoParallel]


@functools.cache
def serial(dtype: torch.dtype | None, scale: float = 1.0, skipped: int | None = None) -> list[float]:
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


def trained(
    build: Build,
    dtype: torch.dtype,
    *,
    form: str = "module",
    scale: float = 1.0,
    strategies: dict[str, Any] | None = None,
    is_full: bool = False,
) -> Result:
    given = list(batches(torch.float32, STEPS))
    right, wide = serial(dtype, scale), serial(None)
    network = make_network(torch.float32)
    for name, strategy in (strategies or {}).items():
        shard(getattr(network, name), strategy)
    optimizer = momentum(network)
    step = build(WithLoss(network, F.cross_entropy) if form == "module" else step_function(network, optimizer))  # type: ignore[arg-type]
    losses = []
    types: list[str] = []
    for images, labels in given:
        traffic.reset()
        loss = step(*((images, labels) if is_full else (mine(images), mine(labels))))
        if form == "module":
            loss.backward()
            types = [str(parameter.grad.dtype) for parameter in network.parameters()]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "right": right,
        "float32": wide,
        "types": types,
        "weights": [str(parameter.dtype) for parameter in network.parameters()],
        "scale": step.loss_scale,
        "moved": dict(traffic.bytes),
        "program": step.plan.program,
        "notes": list(step.plan.notes),
    }


def overflow(build: Build, *, form: str = "module", is_shared: bool = True) -> Result:
    """One rank's gradients overflow in one step: nobody's weights change in it, and the next steps go on as if it had
    not been."""
    network = make_network(torch.float32)
    optimizer = momentum(network)
    step = build(WithLoss(network, F.cross_entropy) if form == "module" else step_function(network, optimizer))  # type: ignore[arg-type]
    given = list(batches(torch.float32, STEPS))
    scales, changed, losses = [], [], []
    for index, (images, labels) in enumerate(given):
        part = mine(images)
        if index == BAD_STEP and get_rank() == 1:
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
    right = serial(torch.float16, SCALE, BAD_STEP)
    moments = [state["momentum_buffer"] for state in optimizer.state.values()]
    return {
        "changed": changed,
        "scales": scales,
        "losses_after": losses[BAD_STEP + 1 :],
        "right_after": right[BAD_STEP:],
        "is_finite": all(bool(local(moment).isfinite().all()) for moment in moments),
        "is_shared": is_shared,
    }


class Amplified(nn.Module):
    """A network whose gradient overflows in one column of the first weight, while its loss stays finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_network(torch.float32)
        with torch.no_grad():
            self.inner.layer1.weight[0] = 0.0
            self.inner.layer1.bias[0] = 1e-6

    def forward(self, x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
        hidden = F.relu(self.inner.layer1(x)) * factors
        return F.cross_entropy(self.inner.layer2(hidden), y)


def overflow_that_one_rank_sees() -> Result:
    """Only the rank that holds the column can know, and still nobody steps."""
    ranks = get_group_size()
    network = Amplified()
    shard(network.inner.layer1, ((1, 1), (ranks, 1), (ranks,)))
    shard(network.inner.layer2, ((1, ranks), (1, ranks)))
    optimizer = momentum(network)
    step = AutoParallel(network).mixed_precision("float16", "dynamic").dataset_strategy("full_batch")
    changed, scales, sees = [], [], []
    for index, (images, labels) in enumerate(batches(torch.float32, STEPS)):
        factors = torch.ones(32)
        if index == BAD_STEP:
            factors[0] = 1e5
        before = [local(parameter).clone() for parameter in network.parameters()]
        step(images, labels, factors).backward()
        sees.append(any(not bool(local(p.grad).isfinite().all()) for p in network.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
        if index:  # the first call has cut the parameters
            pairs = zip(network.parameters(), before, strict=True)
            changed.append(any(not torch.equal(local(parameter), old) for parameter, old in pairs))
        scales.append(step.loss_scale)
    return {"changed": changed, "scales": scales, "sees": sees}


class Weighted(nn.Module):
    """Its gradient is the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def sum_of_short_gradients(mode: str, form: str, *, is_wide: bool) -> Result:
    """256 and three halves: 257.5 in float32, 256 in bfloat16, which has 8 bits."""
    network = Weighted()
    x = torch.full((1, 4), 256.0 if get_rank() == 0 else 0.5, dtype=torch.bfloat16)
    function = value_and_grad(lambda x: network(x), None, list(network.parameters()))
    step = AutoParallel(network if form == "module" else lambda x: function(x), mode.replace("fsdp", "data_parallel"))
    if mode == "fsdp":
        step.hsdp(threshold=0)
    step = step.enable_fp32_communication() if is_wide else step.disable_gradient_fp32_sync()
    with summed_types() as types:
        if form == "module":
            step(x).backward()
            gradient = network.weight.grad
            assert gradient is not None
        else:
            _, (gradient,) = step(x)
    whole = gradient.full_tensor() if mode == "fsdp" else gradient  # type: ignore[operator]
    return {"gradient": whole.tolist(), "dtype": str(gradient.dtype), "summed": sorted(types)}


@contextmanager
def summed_types() -> Iterator[set[str]]:
    """Give the types in which the ranks add up the gradient, the only message of four numbers."""
    types = set()
    reduce = Reduction.reduce

    def note(self: Reduction, parts: Sequence[Tensor], result: Tensor) -> None:
        if result.numel() == 4:
            types.add(str(result.dtype))
        reduce(self, parts, result)

    with mock.patch.object(Reduction, "reduce", note):
        yield types


def model_with_a_dynamic_scale() -> Result:
    given = list(batches(torch.float32, STEPS))
    network = make_network(torch.float32)
    parallel = AutoParallel(WithLoss(network, F.cross_entropy)).mixed_precision("float16", "dynamic").hsdp(threshold=1)
    Model(parallel, optimizer=momentum(network)).train(1, [(mine(x), mine(y)) for x, y in given])
    right = serial(torch.float16, 2.0**16)
    with torch.no_grad():
        loss = float(parallel(mine(given[0][0]), mine(given[0][1])))
    return {"loss": loss, "scale": parallel.loss_scale, "before": right[0]}


class Faint(nn.Module):
    """Its gradients are too small for float16, unless the backward pass begins with a loss scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return (self.second(hidden).float() * 2.0**-22).sum(-1).mean()


def faint_gradients(wrap: Callable[[nn.Module], nn.Module], mode: str, **settings: Any) -> Result:
    """Gradients of micro batches, which are computed inside the call."""
    x = torch.rand(32, 6, generator=torch.Generator().manual_seed(3))
    network, right = Faint(), Faint()
    step = AutoParallel(wrap(network), mode).mixed_precision("float16", "dynamic")
    if mode == "semi_auto":
        step.dataset_strategy("full_batch")
    for name, given in settings.items():
        getattr(step, name)(**given)
    given = x.clone().requires_grad_(mode == "semi_auto" and "pipeline" not in settings)
    for _ in range(2):  # from the second call on, the parameters have the hooks of the scale
        step.zero_grad()
        given.grad = None
        loss = step(mine(given) if mode == "data_parallel" else given)
        (loss * 3).backward()
    x.requires_grad_()
    (right(x) * 3).backward()
    held = [local(parameter.grad) for parameter in step.parameters() if parameter.grad is not None]
    gradients = [gradient for gradient in held if gradient.numel()]
    wanted = [p.grad for p in right.parameters()]
    if "pipeline" in settings:  # this rank's stage
        wanted = wanted[:2] if get_rank() < 2 else wanted[2:]
    pairs = list(zip(gradients, wanted, strict=True))
    if given.requires_grad:
        pairs.append((given.grad, x.grad))
    return {"differences": [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]}  # type: ignore[operator, union-attr]


def own_autocast_region() -> Result:
    """A network that says `torch.autocast` itself is captured with its casts and cut like any other."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_network(torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.inner.layer1(x)
                with torch.autocast("cpu", enabled=False):
                    hidden = F.relu(hidden.float())
                return self.inner.layer2(hidden).float()

    ranks = get_group_size()
    network, right = Own(), Own()
    shard(network.inner.layer1, ((1, 1), (ranks, 1), (ranks,)))
    step = AutoParallel(WithLoss(network, F.cross_entropy)).dataset_strategy("full_batch")
    images, labels = next(batches(torch.float32))
    loss = step(images, labels)
    expected = F.cross_entropy(right(images), labels)
    return {"losses": [float(loss.detach())], "right": [float(expected.detach())], "notes": list(step.plan.notes)}


def cases() -> dict[str, Callable[[], Result]]:
    ranks = 4
    columns = {"layer1": ((1, 1), (ranks, 1), (ranks,))}
    both = {**columns, "layer2": ((1, ranks), (1, ranks))}

    def mixed(name: str, dtype: str, scale: Any = None, **hsdp: Any) -> Build:
        def build(network: Any) -> AutoParallel:
            step = AutoParallel(network, name).mixed_precision(dtype, scale)
            return step.hsdp(**{"threshold": 1, **hsdp}) if hsdp else step

        return build

    def full(network: Any) -> AutoParallel:
        return mixed("semi_auto", "bfloat16")(network).dataset_strategy("full_batch")

    short, half = torch.bfloat16, torch.float16
    found: dict[str, Callable[[], Result]] = {
        "mixed/columns": lambda: trained(full, short, strategies=columns, is_full=True),
        "mixed/columns-rows": lambda: trained(full, short, strategies=both, is_full=True),
        "mixed/float16-unscaled": lambda: trained(mixed("semi_auto", "float16"), half),
        "region": own_autocast_region,
        "seen-by-one": overflow_that_one_rank_sees,
        "model": model_with_a_dynamic_scale,
        "overflow/stand-alone": lambda: overflow(mixed("stand_alone", "float16", "dynamic"), is_shared=False),
    }
    for name, mode, hsdp in (
        ("semi-auto", "semi_auto", {}),
        ("hsdp", "semi_auto", {"optimizer_level": "level1"}),
        ("hsdp-level3", "semi_auto", {"optimizer_level": "level3"}),
        ("data-parallel", "data_parallel", {}),
        ("fsdp", "data_parallel", {"threshold": 1}),
    ):
        for form in ("module", "step"):
            b = mixed(mode, "bfloat16", **hsdp)
            found[f"mixed/{name}-{form}"] = lambda b=b, form=form: trained(b, short, form=form)
            if name in ("semi-auto", "hsdp-level3", "data-parallel"):
                h = mixed(mode, "float16", SCALE, **hsdp)
                d = mixed(mode, "float16", "dynamic", **hsdp)
                found[f"scaled/{name}-{form}"] = lambda h=h, form=form: trained(h, half, form=form, scale=SCALE)
                found[f"overflow/{name}-{form}"] = lambda d=d, form=form: overflow(d, form=form)
    for mode in ("semi_auto", "data_parallel"):
        for form in ("module", "step"):
            for is_wide in (True, False):
                found[f"sum/{mode}-{form}-{is_wide}"] = lambda m=mode, f=form, w=is_wide: sum_of_short_gradients(
                    m, f, is_wide=w
                )
    for mode in ("semi_auto", "data_parallel", "stand_alone"):
        found[f"faint/{mode}"] = lambda m=mode: faint_gradients(lambda net: GradAccumulation(net, 4), m)
    found["faint/copies"] = lambda: faint_gradients(
        lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 2), "semi_auto"
    )
    for scheduler in ("1f1b", "zero_bubble"):
        found[f"faint/pipeline-{scheduler}"] = lambda s=scheduler: faint_gradients(
            lambda net: Pipeline(net, 4, {"first": 0, "second": 1}),
            "semi_auto",
            pipeline={"stages": 2, "scheduler": s},
        )
    found["sum/fsdp-module-True"] = lambda: sum_of_short_gradients("fsdp", "module", is_wide=True)
    return found


CASES = cases()
outcomes = on_all_ranks(CASES)
on_four = on_ranks(4)
pytestmark = pytest.mark.slow


def names(prefix: str) -> list[str]:
    return [name for name in CASES if name.startswith(prefix)]


@on_four
@pytest.mark.parametrize("case", [*names("mixed/"), *names("scaled/")])
def test_mixed_precision_trains_as_one_process_under_autocast_with_weights_in_float32(case: str) -> None:
    for rank in outcomes(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-3)
        assert rank["losses"] != pytest.approx(rank["float32"], rel=1e-6), "nothing was computed in 16 bits"
        assert set(rank["weights"]) == {"torch.float32"}
        assert set(rank["types"]) <= {"torch.float32"}


@on_four
@pytest.mark.parametrize("case", names("faint/"))
def test_gradients_of_micro_batches_too_small_for_float16_survive_with_a_loss_scale(case: str) -> None:
    for rank in outcomes(case):
        assert len(rank["differences"]) >= 2
        assert max(rank["differences"]) < 1e-2


@on_four
def test_columns_computed_in_16_bits_are_bit_by_bit_those_of_autocast() -> None:
    for rank in outcomes("mixed/columns"):
        assert rank["losses"][0] == pytest.approx(rank["right"][0], rel=1e-7)
        assert abs(rank["losses"][0] - rank["float32"][0]) > 1e-5


@on_four
def test_weights_are_gathered_in_16_bits_and_gradients_summed_in_32() -> None:
    elements = 32 * 24
    moved = outcomes("mixed/hsdp-module")[0]["moved"]
    assert moved["all_gather"] == elements // 4 * 2
    assert moved["reduce_scatter"] == elements * 4


@on_four
@pytest.mark.parametrize("case", names("scaled/data-parallel"))
def test_looking_for_overflows_costs_one_number(case: str) -> None:
    scaled, plain = outcomes(case)[0]["moved"], outcomes(case.replace("scaled", "mixed"))[0]["moved"]
    assert scaled["all_reduce"] - plain["all_reduce"] == 4


@on_four
def test_network_that_says_autocast_itself_is_captured_with_its_casts() -> None:
    for rank in outcomes("region"):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-6)
        assert rank["notes"] == []


@on_four
@pytest.mark.parametrize("case", [n for n in names("overflow/") if n != "overflow/stand-alone"])
def test_gradients_that_overflow_on_one_rank_are_skipped_by_all(case: str) -> None:
    bad = BAD_STEP
    for rank in outcomes(case):
        assert rank["changed"] == [step != bad for step in range(STEPS)]
        assert rank["scales"] == [2.0**16] * bad + [2.0**15] * (STEPS - bad)
        assert rank["losses_after"] == pytest.approx(rank["right_after"], rel=1e-3)
        assert rank["is_finite"]


@on_four
def test_overflow_that_only_one_rank_can_see_is_skipped_by_all() -> None:
    bad = BAD_STEP
    ranks = outcomes("seen-by-one")
    assert [rank["sees"][bad] for rank in ranks] == [True, False, False, False]
    for rank in ranks:
        assert rank["changed"] == [step != bad for step in range(1, STEPS)]
        assert rank["scales"] == [2.0**16] * bad + [2.0**15] * (STEPS - bad)


@on_four
def test_stand_alone_ranks_skip_their_own_overflows_only() -> None:
    bad = BAD_STEP
    for number, rank in enumerate(outcomes("overflow/stand-alone")):
        assert rank["changed"][bad] is (number != 1)
        assert rank["scales"][-1] == (2.0**15 if number == 1 else 2.0**16)


@on_four
def test_model_trains_with_a_dynamic_loss_scale() -> None:
    for rank in outcomes("model"):
        assert rank["scale"] == 2.0**16
        assert rank["loss"] < rank["before"] - 0.1


@on_four
def test_float16_without_a_scale_is_said_aloud() -> None:
    notes = outcomes("mixed/float16-unscaled")[0]["notes"]
    assert any('give mixed_precision(loss_scale="dynamic")' in note for note in notes)


@on_four
@pytest.mark.parametrize(
    "case", ["semi_auto-module", "semi_auto-step", "data_parallel-module", "data_parallel-step", "fsdp-module"]
)
def test_short_gradients_are_added_up_in_float32_unless_switched_off(case: str) -> None:
    share = 1.0 if case.startswith("semi_auto") else 0.25  # a sum of the network's own, or the mean of the ranks
    for rank in outcomes(f"sum/{case}-True"):
        assert rank["gradient"] == [258.0 * share] * 4
        assert rank["dtype"] == "torch.bfloat16"
        assert rank["summed"] == ["torch.float32"] or case == "fsdp-module"  # each rank adds up its part alone
    if case != "fsdp-module":
        for rank in outcomes(f"sum/{case}-False"):
            assert rank["summed"] == ["torch.bfloat16"]
