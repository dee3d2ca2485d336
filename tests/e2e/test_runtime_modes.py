"""Modes without capture: the numbers of one process, also with checkpoints of FSDP2 that other layouts go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import weight_difference
from mode_networks import batches, make_network, mine, momentum, serial, step_function, train
from on_ranks import on_all_ranks, on_ranks
from torch import nn

from msrun.runtime import (
    AutoParallel,
    Model,
    WithLoss,
    get_group_size,
    get_rank,
    no_init_parameters,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

Result = dict[str, Any]


def trained(
    build: Callable[[Any], AutoParallel],
    *,
    form: str = "module",
    factor: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seeds_differ: bool = False,
    deferred: bool = False,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
) -> Result:
    """Train one way and in one process; return both."""
    right, right_network = serial(factor, dtype)
    if deferred:
        with no_init_parameters():
            network = make_network(dtype)
    else:
        network = make_network(dtype)
    if seeds_differ and get_rank():
        for parameter in network.parameters():
            parameter.data.normal_()
    optimizer = make_optimizer(network)
    if form == "module":
        step = build(WithLoss(network, F.cross_entropy))
        losses = train(step, optimizer, mine, dtype)
    else:
        step = build(step_function(network, optimizer))  # type: ignore[arg-type]
        losses = [float(step(mine(images), mine(labels))) for images, labels in batches(dtype)]
    return {
        "losses": losses,
        "right": right,
        "difference": weight_difference(network, right_network),
        "plan": step.plan.to_json(),
        "explain": step.plan.explain(),
    }


def optimizer_between_the_passes(level: str) -> Result:
    """An optimizer that is made when FSDP2 shows gathered parameters trains the cut ones."""
    right, right_network = serial()
    network = make_network()
    step = mode("data_parallel", optimizer_level=level)(WithLoss(network, F.cross_entropy))
    optimizer, losses = None, []
    for images, labels in batches():
        loss = step(mine(images), mine(labels))
        optimizer = optimizer or momentum(network)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "right": right, "difference": weight_difference(network, right_network)}


def mode(name: str, compat: str = "torch", **hsdp: Any) -> Callable[[Any], AutoParallel]:
    def build(network: Any) -> AutoParallel:
        step = AutoParallel(network, name, compat=compat)  # type: ignore[arg-type]
        return step.hsdp(**{"threshold": 1, **hsdp}) if hsdp else step

    return build


def gradients_mean(network: Any) -> AutoParallel:
    return AutoParallel(network, "data_parallel", compat="mindspore").enable_gradients_mean()


def stand_alone() -> Result:
    """Every rank trains on its own part as if there were no other."""
    network, right = make_network(), make_network()
    step = AutoParallel(WithLoss(network, F.cross_entropy), "stand_alone")
    traffic.reset()
    losses = train(step, momentum(network), mine)
    expected = train(lambda x, y: F.cross_entropy(right(x), y), momentum(right), mine)
    calls = sum(traffic.calls.values())
    return {"losses": losses, "right": expected, "difference": weight_difference(network, right), "calls": calls}


def no_broadcast() -> Result:
    """Networks that differ stay different when nobody broadcasts, and the plan says so."""
    network = make_network()
    with torch.no_grad():
        network.layer2.bias += get_rank()
    step = AutoParallel(WithLoss(network, F.cross_entropy), "data_parallel").parameter_broadcast(is_on=False)
    images, labels = next(batches())
    step(mine(images), mine(labels)).backward()
    return {"notes": list(step.plan.notes), "bias": network.layer2.bias.tolist()}


def accumulated(**hsdp: Any) -> Result:
    """Two backward passes with one reduction give the gradient of both batches together."""
    network, right = make_network(), make_network()
    step = mode("data_parallel", **hsdp)(WithLoss(network, F.cross_entropy))
    whole = list(batches(steps=3))
    first, *rest = whole
    step(mine(first[0]), mine(first[1])).backward()  # places the parameters
    network.zero_grad()
    with step.no_sync():
        step(mine(rest[0][0]), mine(rest[0][1])).backward()
        waits = all(parameter.grad is None for parameter in network.parameters())
    step(mine(rest[1][0]), mine(rest[1][1])).backward()
    for images, labels in rest:
        F.cross_entropy(right(images), labels).backward()
    pairs = zip(network.parameters(), right.parameters(), strict=True)
    found = [(_whole(one.grad) - other.grad).abs().max() for one, other in pairs]
    return {"difference": float(max(found)), "waits": waits}


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def two_functions_of_one_step() -> Result:
    """A step that trains two networks in turn, each by its own function; one weight is never used."""
    first, second = make_network(), make_network()
    unused = nn.Linear(2, 2).double()
    first.add_module("unused", unused)
    of_first = value_and_grad(lambda x, y: F.cross_entropy(first(x), y), None, list(first.parameters()))
    of_second = value_and_grad(
        lambda x, y: F.cross_entropy(second(x) + first(x).detach(), y), None, list(second.parameters())
    )

    def both(x: Any, y: Any) -> Any:
        return of_first(x, y), of_second(x, y)

    step = AutoParallel(both, "data_parallel")
    images, labels = next(batches())
    (loss, gradients), (_, others) = step(mine(images), mine(labels))
    rights = make_network(), make_network()
    F.cross_entropy(rights[0](images), labels).backward()
    F.cross_entropy(rights[1](images) + rights[0](images).detach(), labels).backward()
    pairs = [
        *zip(gradients, [p.grad for p in rights[0].parameters()], strict=False),
        *zip(others, [p.grad for p in rights[1].parameters()], strict=True),
    ]
    return {
        "difference": max(float((one - other).abs().max()) for one, other in pairs),
        "of_unused": float(sum(gradient.abs().sum() for gradient in gradients[-2:])),
        "is_finite": bool(loss.isfinite()),
    }


def value_and_grad_of_a_parallel_module() -> Result:
    """torch's DDP reduces in backward() only; value_and_grad of a module under it must not pass it by."""
    network, right = make_network(), make_network()
    step = AutoParallel(WithLoss(network, F.cross_entropy), "data_parallel")
    images, labels = next(batches())
    kept = torch.full_like(network.layer2.bias, 7.0)
    network.layer2.bias.grad = kept
    _, gradients = value_and_grad(step, None, list(network.parameters()))(mine(images), mine(labels))
    F.cross_entropy(right(images), labels).backward()
    pairs = zip(gradients, [parameter.grad for parameter in right.parameters()], strict=True)
    return {
        "difference": max(float((one - other).abs().max()) for one, other in pairs),
        "is_kept": network.layer2.bias.grad is kept,
    }


def model_obeys_the_context() -> Result:
    """Model without AutoParallel, in the words of the documents."""
    right, right_network = serial()
    network = make_network()
    set_auto_parallel_context(
        device_num=get_group_size(), parallel_mode="data_parallel", gradients_mean=True, parameter_broadcast=True
    )
    try:
        model = Model(network, F.cross_entropy, momentum(network))
    finally:
        reset_auto_parallel_context()
    model.train(1, [(mine(images), mine(labels)) for images, labels in batches()])
    return {
        "losses": right,
        "right": right,
        "difference": weight_difference(network, right_network),
        "mode": model.network.plan.mode,
    }


def context_cuts_the_optimizer() -> Result:
    """The context's optimizer parallel and full batch, in semi_auto by its old name."""
    right, right_network = serial()
    network = make_network()
    set_auto_parallel_context(
        parallel_mode="semi_auto_parallel",
        gradients_mean=True,
        full_batch=True,
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 1, "gradient_accumulation_shard": True},
    )
    try:
        step = AutoParallel(WithLoss(network, F.cross_entropy))
    finally:
        reset_auto_parallel_context()
    losses = train(step, momentum(network), lambda tensor: tensor)
    return {
        "losses": losses,
        "right": right,
        "difference": weight_difference(network, right_network),
        "plan": step.plan.to_json(),
    }


def unused_parameters() -> Result:
    """A layer that only some steps of some ranks use; DDP by itself waits for it for ever."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = make_network()
            self.extra = nn.Linear(6, 6).double()

        def forward(self, x: Any, uses_extra: bool) -> Any:
            y = self.network(x)
            return self.extra(y).pow(2).mean() + y.sum() * 0 if uses_extra else y.pow(2).mean()

    torch.manual_seed(1)
    network, right = Branching(), Branching()
    right.load_state_dict(network.state_dict())
    step = AutoParallel(network, "data_parallel")
    found = []
    for index, (images, _) in enumerate(batches(steps=4)):
        step(mine(images), index % 2 == 1 and get_rank() == 0).backward()
        parts = images.chunk(get_group_size())
        losses = [right(part, index % 2 == 1 and rank == 0) for rank, part in enumerate(parts)]
        torch.stack(losses).mean().backward()
        for one, other in zip(network.parameters(), right.parameters(), strict=True):
            wanted = torch.zeros_like(other) if other.grad is None else other.grad
            mine_ = torch.zeros_like(one) if one.grad is None else one.grad
            found.append(float((mine_ - wanted).abs().max()))
        network.zero_grad()
        right.zero_grad()
    return {"difference": max(found)}


def buffers_of_every_form() -> Result:
    """A batch norm's running mean after a call without a backward pass, and two calls before one backward pass."""
    forms: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
        "module": lambda network: mode("data_parallel")(network),
        "hsdp": lambda network: mode("data_parallel", threshold=0)(network),
        "step": lambda network: mode("data_parallel")(
            _loss_of(value_and_grad(network, None, weights=network.parameters()))
        ),
    }
    found: Result = {}
    for name, build in forms.items():
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Flatten(0)).double()
        norm: Any = network[1]
        step = build(_Mean(network))
        for images, _ in batches(steps=3):
            step(mine(images) + get_rank())
        of_own_rows = norm.running_mean.tolist()
        network.eval()
        with torch.no_grad():
            step(mine(images))
        found[name] = {"trained": of_own_rows, "called again": norm.running_mean.tolist()}
    network.train()
    step = mode("data_parallel")(_Mean(network))
    sum(step(mine(images)) for images, _ in batches(steps=3)).backward()
    return found


def _loss_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)[0]


class _Mean(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        return self.network(x).square().mean()


LEVELS = ("level1", "level2", "level3")


def cases() -> dict[str, Callable[[], Result]]:
    ranks = 4
    data_parallel, mindspore = mode("data_parallel"), mode("data_parallel", "mindspore")
    found: dict[str, Callable[[], Result]] = {
        "train/data-parallel": lambda: trained(data_parallel, seeds_differ=True),
        "train/data-parallel-deferred": lambda: trained(data_parallel, deferred=True),
        "train/data-parallel-step": lambda: trained(data_parallel, form="step", seeds_differ=True),
        "train/data-parallel-float32": lambda: trained(data_parallel, dtype=torch.float32),
        "train/sum": lambda: trained(mindspore, factor=ranks),
        "train/sum-step": lambda: trained(mindspore, factor=ranks, form="step"),
        "train/mindspore-mean": lambda: trained(gradients_mean),
        "train/mindspore-mean-step": lambda: trained(gradients_mean, form="step"),
        "train/hybrid-without-marks": lambda: trained(mode("hybrid_parallel")),
        "train/fsdp-shard-size-2": lambda: trained(mode("data_parallel", shard_size=2, threshold=0)),
        "train/fsdp-sum": lambda: trained(mode("data_parallel", "mindspore", shard_size=2), factor=ranks),
        "train/fsdp-sum-step": lambda: trained(
            mode("data_parallel", "mindspore", threshold=1), factor=ranks, form="step"
        ),
        "train/fsdp-float32": lambda: trained(mode("data_parallel", optimizer_level="level3"), dtype=torch.float32),
        "train/fsdp-deferred": lambda: trained(mode("data_parallel", threshold=1), deferred=True),
        "train/fsdp-torch-optimizer": lambda: trained(
            mode("data_parallel", threshold=1),
            make_optimizer=lambda network: torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9),
        ),
        "stand-alone": stand_alone,
        "no-broadcast": no_broadcast,
        "accumulate/ddp": accumulated,
        "unused": unused_parameters,
        "buffers": buffers_of_every_form,
        "two-functions": two_functions_of_one_step,
        "value-and-grad-of-module": value_and_grad_of_a_parallel_module,
        "context/model": model_obeys_the_context,
        "context/hsdp": context_cuts_the_optimizer,
    }
    for level in LEVELS:
        found[f"train/fsdp-{level}"] = lambda level=level: trained(mode("data_parallel", optimizer_level=level))
        found[f"train/fsdp-{level}-step"] = lambda level=level: trained(
            mode("data_parallel", optimizer_level=level), form="step"
        )
        found[f"train/fsdp-{level}-late"] = lambda level=level: optimizer_between_the_passes(level)
        found[f"accumulate/{level}"] = lambda level=level: accumulated(optimizer_level=level)
    return found


EXACT, SINGLE = 1e-10, 1e-5
CASES = cases()
outcomes = on_all_ranks(CASES)
SLOW = {
    *(name for name in CASES if name.startswith("train/") and name.endswith(("-step", "float32", "deferred"))),
    *("train/hybrid-without-marks", "train/fsdp-torch-optimizer", "train/fsdp-sum"),
    *("train/fsdp-level1-late", "train/fsdp-level2-late"),
}
on_four = on_ranks(4)


def names(prefix: str) -> list[str]:
    return [name for name in CASES if name.startswith(prefix)]


def rows(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(c, id=c.replace("/", "-"), marks=() if c not in SLOW else pytest.mark.slow) for c in cases]


def assert_trained(outcome: list[dict[str, Any]], tolerance: float, *, has_own_losses: bool = False) -> None:
    means = [sum(losses) / len(outcome) for losses in zip(*(rank["losses"] for rank in outcome), strict=True)]
    assert has_own_losses is (outcome[0]["losses"] != outcome[1]["losses"])
    for rank in outcome:
        assert (means if has_own_losses else rank["losses"]) == pytest.approx(rank["right"], rel=tolerance, abs=0)
        assert rank["difference"] <= tolerance
        assert rank["losses"][0] != rank["losses"][-1]


# -- modes --------------------------------------------------------------------------------------------------------


@on_four
@pytest.mark.parametrize("case", rows(names("train/")))
def test_every_mode_trains_as_one_process_does(case: str) -> None:
    means_mindspore = "sum" in case or "mindspore" in case
    assert_trained(outcomes(case), SINGLE if case.endswith("float32") else EXACT, has_own_losses=means_mindspore)


@on_four
def test_stand_alone_ranks_train_for_themselves_and_exchange_nothing() -> None:
    ranks = outcomes("stand-alone")
    for rank in ranks:
        assert rank["losses"] == rank["right"]
        assert rank["difference"] == 0.0
        assert rank["losses"][0] != rank["losses"][-1]
    assert [rank["calls"] for rank in ranks] == [0, 0, 0, 0]
    assert len({rank["losses"][0] for rank in ranks}) == 4


@on_four
def test_ranks_that_differ_get_the_values_of_rank_0_and_the_plan_says_so() -> None:
    notes = outcomes("train/data-parallel")[0]["plan"]["notes"]
    assert notes == ["4 parameters or buffers differed between ranks (layer1.weight, ...): rank 0's are used"]
    assert outcomes("train/mindspore-mean")[0]["plan"]["notes"] == []


@on_four
def test_without_broadcast_ranks_keep_their_own_values_and_the_plan_says_so() -> None:
    ranks = outcomes("no-broadcast")
    (note,) = ranks[0]["notes"]
    assert "layer2.bias" in note
    assert note.endswith("parameter_broadcast is off: the ranks train different networks")
    assert [round(rank["bias"][0] - ranks[0]["bias"][0], 9) for rank in ranks] == [0.0, 1.0, 2.0, 3.0]


@on_four
def test_plan_says_whether_gradients_are_means_or_sums() -> None:
    assert "gradients are means over the ranks (torch)" in outcomes("train/data-parallel")[0]["explain"]
    assert "added up over the ranks (MindSpore's gradients_mean=False)" in outcomes("train/sum")[0]["explain"]
    assert "means over the ranks" in outcomes("train/mindspore-mean")[0]["explain"]


@on_four
def test_every_form_of_a_call_begins_with_the_buffers_of_rank_0() -> None:
    ranks = outcomes("buffers")
    forms = ("module", "hsdp", "step")
    assert ranks[1]["module"]["trained"] != ranks[0]["module"]["trained"], "every rank has rows of its own"
    for rank in ranks:
        for form in forms:
            assert rank[form]["trained"] == pytest.approx(rank["module"]["trained"], rel=EXACT)
            assert rank[form]["called again"] == ranks[0][form]["trained"]


@on_four
@pytest.mark.parametrize("level", LEVELS)
def test_hsdp_without_capture_names_what_is_cut_and_what_stays_whole(level: str) -> None:
    plan = outcomes(f"train/fsdp-{level}")[0]["plan"]
    found = {p["name"]: (p["local_shape"], p["shard_ranks"], p["reason"]) for p in plan["parameters"]}
    assert found == {
        "layer1.weight": ([8, 24], 4, "rows cut over 4 ranks"),
        "layer1.bias": ([32], 1, "256 B is under the threshold of 1 KB"),
        "layer2.weight": ([2, 32], 4, "rows cut over 4 ranks, in unequal parts"),
        "layer2.bias": ([6], 1, "48 B is under the threshold of 1 KB"),
    }
    assert f"hsdp {level}" in plan["optimizer_parallel"]
    assert any("optimizers made before follow" in note for note in plan["notes"])


@on_four
def test_shard_size_says_how_many_ranks_share_a_weight() -> None:
    plan = outcomes("train/fsdp-shard-size-2")[0]["plan"]
    assert {p["name"]: p["local_shape"] for p in plan["parameters"]} == {
        "layer1.weight": [16, 24],
        "layer1.bias": [16],
        "layer2.weight": [3, 32],
        "layer2.bias": [3],
    }


@on_four
@pytest.mark.parametrize("case", names("accumulate/"))
def test_gradients_of_two_backward_passes_are_those_of_both_batches(case: str) -> None:
    for rank in outcomes(case):
        assert rank["difference"] <= EXACT
        assert rank["waits"] is (case == "accumulate/level1"), "level2 and level3 hold cut gradients at once"


@on_four
@pytest.mark.parametrize("case", ["two-functions", "value-and-grad-of-module", "unused"])
def test_gradients_without_capture_are_those_of_one_process(case: str) -> None:
    assert all(rank["difference"] <= EXACT for rank in outcomes(case))


@on_four
def test_value_and_grad_leaves_gradients_that_were_there_alone() -> None:
    assert all(rank["is_kept"] for rank in outcomes("value-and-grad-of-module"))


@on_four
def test_model_runs_in_the_mode_of_the_context() -> None:
    ranks = outcomes("context/model")
    assert_trained(ranks, EXACT)
    assert {rank["mode"] for rank in ranks} == {"data_parallel"}


@pytest.mark.slow
@on_four
def test_context_turns_on_optimizer_parallel_and_full_batch() -> None:
    ranks = outcomes("context/hsdp")
    assert_trained(ranks, EXACT)
    plan = ranks[0]["plan"]
    assert plan["dataset_strategy"] == "full_batch"
    assert plan["optimizer_parallel"].startswith("hsdp level2")
    assert [p["shard_ranks"] for p in plan["parameters"] if p["name"] == "layer1.weight"] == [4]
    assert any("gradients_mean changes nothing" in note for note in plan["notes"])
