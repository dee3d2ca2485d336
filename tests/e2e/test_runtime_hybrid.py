"""Hybrid parallel and its communication operators, beside one process that knows every rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from local_parts import local
from mode_networks import STEPS
from on_ranks import on_all_ranks, on_ranks
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    WithLoss,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    create_group,
    destroy_group,
    get_group_size,
    get_rank,
    layerwise_parallel,
    load_checkpoint,
    optim,
    reduce_scatter,
    save_checkpoint,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

Result = dict[str, Any]
ROWS, COLUMNS, BATCH = 512, 128, 8
LEARNING_RATE = 1e-6


def whole_weight() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64) / ROWS


class HybridParallelNet(nn.Module):
    """The document's network: each rank has some columns of the weight and sums what all of them give."""

    def __init__(self) -> None:
        super().__init__()
        part = whole_weight().chunk(get_group_size(), 1)[get_rank()].clone()
        self.weight = layerwise_parallel(nn.Parameter(part))
        self.scale = nn.Parameter(torch.ones(ROWS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(torch.matmul(x * self.scale, self.weight).sum(-1))


class Columns(nn.Module):
    """The MatMul that the document cuts with ((1, 1), (1, 2))."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole_weight())

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)


class SemiAutoParallelNet(nn.Module):
    """The same network whole, as the document writes it for semi_auto."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = Columns()
        self.scale = nn.Parameter(torch.ones(ROWS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.scale).sum(-1)


def trained(network: nn.Module, wrap: Callable[[nn.Module], Any], form: str = "module") -> tuple[list[float], Any]:
    """Train on the same batch on every rank."""
    optimizer = optim.Momentum(network.parameters(), LEARNING_RATE, 0.9)
    whole = WithLoss(network, F.mse_loss)
    gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = gradients_of(x, y)
        optimizer(gradients)
        return loss

    step = wrap(whole) if form == "module" else AutoParallel(train, "hybrid_parallel")
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, ROWS, generator=generator, dtype=torch.float64)
        y = torch.randn(BATCH, generator=generator, dtype=torch.float64)
        loss = step(x, y)
        if form == "module":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, step


def hybrid(form: str) -> Result:
    """The hand-cut network, its semi_auto twin and one process."""
    serial = SemiAutoParallelNet()
    right, _ = trained(serial, lambda whole: whole)
    network = HybridParallelNet()
    losses, step = trained(network, lambda whole: AutoParallel(whole, "hybrid_parallel"), form)
    part = serial.fc.weight.detach().chunk(get_group_size(), 1)[get_rank()]
    return {
        "losses": losses,
        "right": right,
        "difference": max(
            float((network.weight.detach() - part).abs().max() / part.abs().max()),
            float((network.scale - serial.scale).detach().abs().max()),
        ),
        "reasons": {parameter.name: parameter.reason for parameter in step.plan.parameters},
    }


def semi_auto() -> Result:
    serial = SemiAutoParallelNet()
    right, _ = trained(serial, lambda whole: whole)
    network = SemiAutoParallelNet()
    shard(network.fc, ((1, 1), (1, get_group_size())))
    losses, step = trained(network, lambda whole: AutoParallel(whole).dataset_strategy("full_batch"))
    part = serial.fc.weight.detach().chunk(get_group_size(), 1)[get_rank()]
    return {
        "losses": losses,
        "right": right,
        "difference": float((local(network.fc.weight) - part).abs().max() / part.abs().max()),
        "plan": step.plan.to_json(),
    }


def sums_leave_marked_gradients_alone() -> Result:
    """compat="mindspore": marked parameters keep the gradient of all ranks' losses, gradients_mean or not."""
    found = {}
    for name, wrap in (
        ("mean", lambda n: AutoParallel(n, "hybrid_parallel", compat="mindspore").enable_gradients_mean()),
        ("sum", lambda n: AutoParallel(n, "hybrid_parallel", compat="mindspore")),
    ):
        serial, network = SemiAutoParallelNet(), HybridParallelNet()
        x, y = torch.ones(2, ROWS, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        F.mse_loss(serial(x), y).backward()
        wrap(WithLoss(network, F.mse_loss))(x, y).backward()
        assert serial.scale.grad is not None
        part = serial.fc.weight.grad.chunk(get_group_size(), 1)[get_rank()]  # type: ignore[union-attr]
        found[name] = [
            float((network.weight.grad / part).mean()),  # type: ignore[operator]
            float((network.scale.grad / serial.scale.grad).mean()),  # type: ignore[operator]
        ]
    return found


def refusals() -> Result:
    """What a marked network cannot do."""
    network = HybridParallelNet()
    texts = {}
    for mode in ("data_parallel", "semi_auto"):
        try:
            AutoParallel(WithLoss(network, F.mse_loss), mode)(torch.ones(2, ROWS).double(), torch.zeros(2).double())
        except StrategyError as error:
            texts[mode] = str(error)
    return texts


def resumed() -> Result:
    """Saved by every rank, in one directory and in directories of their own, and gone on from."""
    found: Result = {}
    for form, folder in (("shared", "hybrid"), ("apart", f"hybrid-{get_rank()}")):
        runs = []
        for is_second in (False, True):
            network = HybridParallelNet()
            optimizer = optim.Momentum(network.parameters(), LEARNING_RATE, 0.9)
            step = AutoParallel(WithLoss(network, F.mse_loss), "hybrid_parallel")
            if is_second:
                with torch.no_grad():
                    network.weight.zero_()
                load_checkpoint(f"{folder}/a", step, optimizer)
            losses = []
            for number in range(2 if is_second else 0, 4):
                if number == 2 and not is_second:
                    save_checkpoint(step, f"{folder}/a", optimizer)
                x = torch.full((BATCH, ROWS), number + 1.0, dtype=torch.float64)
                loss = step(x, x[:, 0])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            runs.append((losses[-2:], network.weight.detach().clone()))
        found[form] = {"losses": [run[0] for run in runs], "is_same": torch.equal(runs[0][1], runs[1][1])}
        found[form]["files"] = sorted(path.name for path in Path(folder).iterdir())
        whole = load_checkpoint(f"{folder}/a")
        found[form]["shape"] = list(whole["weight"].shape)
    return found


# -- operators ----------------------------------------------------------------------------------------------------

Call = Callable[[Tensor], Tensor]
Whole = Callable[[list[Tensor], int], Tensor]
"""Every rank's input, and a rank -> the result on that rank."""


def operator(call: Call, whole: Whole, ranks: list[int], shape: tuple[int, ...] = (4, 8)) -> Result:
    """Compare result and gradient with those of one process: the loss is the sum of all ranks' losses."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in ranks]
    with torch.no_grad():
        inputs[-1][0, 0] = inputs[0][0, 0] = 9.0  # a tie of the largest
    place = ranks.index(get_rank())
    x = inputs[place].detach().clone().requires_grad_()
    traffic.reset()
    mine = call(x)
    results = [whole(inputs, rank) for rank in range(len(ranks))]
    weights = [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results]
    (mine * weights[place]).sum().backward()
    torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum().backward()
    given = inputs[place].grad
    right = torch.zeros_like(x) if given is None else given
    assert x.grad is not None
    return {
        "difference": float((mine - results[place]).detach().abs().max()),
        "of_gradient": float((x.grad - right).abs().max()),
        "moved": sorted(traffic.calls),
    }


class _Extreme(torch.autograd.Function):
    """MindSpore's gradient: every rank that has the extreme gets all of the gradient."""

    @staticmethod
    def forward(ctx: Any, is_max: bool, *inputs: Tensor) -> Tensor:
        stacked = torch.stack(inputs)
        result = stacked.amax(0) if is_max else stacked.amin(0)
        ctx.save_for_backward(stacked == result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *(gradient * ctx.saved_tensors[0]).unbind(0)


def operators(group: str | None, ranks: list[int]) -> dict[str, Callable[[], Result]]:
    count = len(ranks)

    def exchange(inputs: list[Tensor], rank: int, split: int, concat: int) -> Tensor:
        return torch.cat([x.chunk(count, split)[rank] for x in inputs], concat)

    table: dict[str, tuple[Call, Whole]] = {
        "all-reduce": (lambda x: all_reduce(x, group=group), lambda xs, _: torch.stack(xs).sum(0)),
        "all-reduce-max": (lambda x: all_reduce(x, "max", group), lambda xs, _: _Extreme.apply(True, *xs)),  # noqa: FBT003
        "all-reduce-min": (lambda x: all_reduce(x, "min", group), lambda xs, _: _Extreme.apply(False, *xs)),  # noqa: FBT003
        "all-gather": (lambda x: all_gather(x, group=group), lambda xs, _: torch.cat(xs)),
        "all-gather-last": (lambda x: all_gather(x, -1, group), lambda xs, _: torch.cat(xs, -1)),
        "reduce-scatter": (
            lambda x: reduce_scatter(x, group=group),
            lambda xs, r: torch.stack(xs).sum(0).chunk(count)[r],
        ),
        "reduce-scatter-last": (
            lambda x: reduce_scatter(x, dim=1, group=group),
            lambda xs, r: torch.stack(xs).sum(0).chunk(count, 1)[r],
        ),
        "broadcast": (lambda x: broadcast(x, ranks[1], group), lambda xs, _: xs[1] * 1.0),
        "all-to-all": (lambda x: all_to_all(x, group=group), lambda xs, r: exchange(xs, r, 0, 0)),
        "all-to-all-across": (lambda x: all_to_all(x, 1, 0, group), lambda xs, r: exchange(xs, r, 1, 0)),
    }
    return {name: lambda entry=entry: operator(*entry, ranks) for name, entry in table.items()}


def in_two_groups() -> Result:
    """Every operator in groups of ranks that do not follow each other: 0, 2 and 1, 3."""
    create_group("even", [0, 2])
    create_group("odd", [1, 3])
    try:
        group, ranks = ("even", [0, 2]) if get_rank() % 2 == 0 else ("odd", [1, 3])
        return {name: case() for name, case in operators(group, ranks).items()}
    finally:
        destroy_group("even")
        destroy_group("odd")


CASES: dict[str, Callable[[], Result]] = {
    "hybrid/module": lambda: hybrid("module"),
    "hybrid/step": lambda: hybrid("step"),
    "hybrid/semi-auto": semi_auto,
    "hybrid/mindspore": sums_leave_marked_gradients_alone,
    "hybrid/refusals": refusals,
    "hybrid/resumed": resumed,
    "operators/groups": in_two_groups,
    **{f"operators/{name}": case for name, case in operators(None, list(range(4))).items()},
}
outcomes = on_all_ranks(CASES)
EXACT = 1e-10
on_four = on_ranks(4)


# -- hybrid parallel ----------------------------------------------------------------------------------------------


@on_ranks(4, pytest.param(8, marks=pytest.mark.slow))
@pytest.mark.parametrize("case", one_fast("hybrid/module", "hybrid/step", "hybrid/semi-auto"))
def test_hand_cut_network_of_the_document_equals_its_semi_auto_twin_and_one_process(case: str) -> None:
    for rank in outcomes(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=EXACT, abs=0)
        assert rank["difference"] <= EXACT
        assert rank["losses"][0] != rank["losses"][-1]


@on_four
def test_plan_names_parameters_that_are_a_ranks_own() -> None:
    assert outcomes("hybrid/module")[0]["reasons"] == {"weight": "this rank's own part", "scale": "hsdp is off"}


@on_four
def test_mindspores_sums_leave_marked_gradients_as_the_operators_give_them() -> None:
    for rank in outcomes("hybrid/mindspore"):
        assert rank["mean"] == pytest.approx([4.0, 1.0])
        assert rank["sum"] == pytest.approx([4.0, 4.0])


@on_four
def test_marked_parameters_are_refused_where_they_would_be_reduced_or_cut() -> None:
    for rank in outcomes("hybrid/refusals"):
        for mode in ("data_parallel", "semi_auto"):
            assert "parameter weight is marked layerwise_parallel" in rank[mode]
            assert 'use parallel_mode="hybrid_parallel"' in rank[mode]


@on_four
def test_hand_cut_network_is_saved_by_every_rank_and_goes_on() -> None:
    for rank in outcomes("hybrid/resumed"):
        for form in ("shared", "apart"):
            right, resumed = rank[form]["losses"]
            assert resumed == right
            assert rank[form]["is_same"]
            assert rank[form]["files"] == ["a"]
            assert rank[form]["shape"] == [512, 128 // 4]


MOVES = {
    "all-reduce": ["all_reduce"],
    "all-reduce-max": ["all_reduce"],
    "all-reduce-min": ["all_reduce"],
    "all-gather": ["all_gather", "reduce_scatter"],
    "all-gather-last": ["all_gather", "reduce_scatter"],
    "reduce-scatter": ["all_gather", "reduce_scatter"],
    "reduce-scatter-last": ["all_gather", "reduce_scatter"],
    "broadcast": ["all_reduce", "broadcast"],
    "all-to-all": ["all_to_all"],
    "all-to-all-across": ["all_to_all"],
}


@on_four
@pytest.mark.parametrize("name", MOVES)
def test_communication_operator_has_the_result_and_the_gradient_of_the_sum_of_losses(name: str) -> None:
    in_groups = [rank[name] for rank in outcomes("operators/groups")]
    for rank in [*outcomes(f"operators/{name}"), *in_groups]:
        assert rank["difference"] <= EXACT
        assert rank["of_gradient"] <= EXACT
        assert rank["moved"] == MOVES[name]
