"""Clipping by the global norm in every layout, beside torch's in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local, weight_difference
from mode_networks import batches, make_network, mine, momentum, train
from on_ranks import on_all_ranks, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    WithLoss,
    clip_by_global_norm,
    clip_grad_norm_,
    get_group_size,
    get_rank,
    layerwise_parallel,
    optim,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

Result = dict[str, Any]
MAX_NORM = 0.05
STEPS = 4
NORMS = (2.0, float("inf"), 1.0, 3.0)


@functools.cache
def serial(norm_type: float) -> tuple[list[float], nn.Module, list[float]]:
    network = make_network()
    norms: list[float] = []

    def clip() -> None:
        norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM, norm_type)))

    losses = train(
        lambda x, y: F.cross_entropy(network(x), y), momentum(network), lambda t: t, steps=STEPS, before_step=clip
    )
    return losses, network, norms


def clipped(
    build: Callable[[Any], AutoParallel],
    norm_type: float,
    *,
    strategies: dict[str, Any] | None = None,
    form: str = "module",
) -> Result:
    """Train with clipping; the collectives of clipping are counted apart."""
    right, right_network, right_norms = serial(norm_type)
    network = make_network()
    for name, strategy in (strategies or {}).items():
        shard(getattr(network, name), strategy)
    optimizer = optim.Momentum(network.parameters(), 0.05, 0.9)
    norms: list[float] = []
    moved: list[int] = []

    def clip(given: Any) -> Any:
        before = sum(traffic.calls.values())
        if form == "module":
            norms.append(float(clip_grad_norm_(given, MAX_NORM, norm_type)))
        else:
            given = clip_by_global_norm(given, MAX_NORM, norm_type)
        moved.append(sum(traffic.calls.values()) - before)
        return given

    if form == "module":
        step = build(WithLoss(network, F.cross_entropy))
        losses = train(step, optimizer, mine, steps=STEPS, before_step=lambda: clip(step))
    else:
        gradients_of = value_and_grad(lambda x, y: F.cross_entropy(network(x), y), None, list(network.parameters()))

        def run(x: Any, y: Any) -> Any:
            loss, gradients = gradients_of(x, y)
            optimizer(clip(gradients))
            return loss

        step = build(run)
        losses = [float(step(mine(x), mine(y))) for x, y in batches(steps=STEPS)]
    return {
        "losses": losses,
        "right": right,
        "difference": weight_difference(network, right_network),
        "norms": norms or right_norms,
        "right_norms": right_norms,
        "moved": moved,
    }


def semi_auto(network: Any) -> AutoParallel:
    return AutoParallel(network)


def hsdp(network: Any) -> AutoParallel:
    return AutoParallel(network).hsdp(threshold=1)


def data_parallel(network: Any) -> AutoParallel:
    return AutoParallel(network, "data_parallel")


def fsdp(network: Any) -> AutoParallel:
    return AutoParallel(network, "data_parallel").hsdp(threshold=1)


def fsdp_in_pairs(network: Any) -> AutoParallel:
    return AutoParallel(network, "data_parallel").hsdp(shard_size=2, threshold=0)


def mixture(norm_type: float) -> Result:
    """A DTensor on two meshes, a marked part, a whole parameter and a tied one in a single list."""
    ranks, rank = get_group_size(), get_rank()
    generator = torch.Generator().manual_seed(8)
    values = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    gradients = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    flat = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (ranks // 2, 2))

    def on(mesh: Any, placements: Any, index: int) -> nn.Parameter:
        parameter = nn.Parameter(distribute_tensor(values[index], mesh, placements))
        parameter.grad = distribute_tensor(gradients[index], mesh, placements)
        return parameter

    marked = layerwise_parallel(nn.Parameter(values[2].chunk(ranks)[rank].clone()))
    marked.grad = gradients[2].chunk(ranks)[rank].clone()
    whole = nn.Parameter(values[3].clone())
    whole.grad = gradients[3].clone()
    without = nn.Parameter(values[3].clone())
    mixed = [on(flat, [Shard(0)], 0), on(square, [Replicate(), Shard(1)], 1), marked, whole, whole, without]
    traffic.reset()
    norm = clip_grad_norm_(mixed, MAX_NORM, norm_type)
    calls = sum(traffic.calls.values())
    rights = [nn.Parameter(value.clone()) for value in values]
    for right, gradient in zip(rights, gradients, strict=True):
        right.grad = gradient.clone()
    right_norm = nn.utils.clip_grad_norm_(rights, MAX_NORM, norm_type)
    found = [
        mixed[0].grad.full_tensor() - rights[0].grad,  # type: ignore[union-attr,operator]
        mixed[1].grad.full_tensor() - rights[1].grad,  # type: ignore[union-attr,operator]
        marked.grad - rights[2].grad.chunk(ranks)[rank],  # type: ignore[union-attr]
        whole.grad - rights[3].grad,  # type: ignore[operator]
    ]
    return {
        "norm": float(norm),
        "right_norm": float(right_norm),
        "difference": max(float(part.abs().max()) for part in found),
        "moved": calls,
    }


def changed_gradients() -> Result:
    """Gradients that were changed since have lost their layout, and are refused unless the weights are given."""
    network = make_network()
    gradients_of = value_and_grad(lambda x, y: F.cross_entropy(network(x), y), None, list(network.parameters()))
    found: Result = {}

    def run(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(x, y)
        halves = [gradient / 2 for gradient in gradients]
        try:
            clip_by_global_norm(halves, MAX_NORM)
        except StrategyError as error:
            found["error"] = ""
            found["text"] = str(error)
        named = clip_by_global_norm(halves, 1e9, weights=list(network.parameters()))
        found["difference"] = max(float(local(a - b).abs().sum()) for a, b in zip(named, halves, strict=True))
        again = clip_by_global_norm(clip_by_global_norm(gradients, MAX_NORM), 1e9)
        found["still"] = len(again)
        return loss

    images, labels = next(batches())
    hsdp(run)(mine(images), mine(labels))
    del found["error"]
    return found


def cases() -> dict[str, Callable[[], Result]]:
    ranks = 4
    columns = {"layer1": ((1, 1), (ranks, 1), (ranks,)), "layer2": ((1, ranks), (1, ranks))}
    found: dict[str, Callable[[], Result]] = {"clip/changed": changed_gradients}
    for norm in NORMS:
        found[f"clip/columns-{norm}"] = lambda norm=norm: clipped(semi_auto, norm, strategies=columns)
        found[f"mixture/{norm}"] = lambda norm=norm: mixture(norm)
    for name, build in {
        "semi-auto": semi_auto,
        "hsdp": hsdp,
        "data-parallel": data_parallel,
        "fsdp": fsdp,
        "fsdp-in-pairs": fsdp_in_pairs,
    }.items():
        found[f"clip/{name}"] = lambda build=build: clipped(build, 2.0)
        found[f"clip/{name}-step"] = lambda build=build: clipped(build, 2.0, form="step")
    found["clip/fsdp-inf"] = lambda: clipped(fsdp, float("inf"))
    return found


EXACT = 1e-10
CASES = cases()
outcomes = on_all_ranks(CASES)
on_four = on_ranks(4)
pytestmark = pytest.mark.slow


def names(prefix: str) -> list[str]:
    return [name for name in CASES if name.startswith(prefix)]


@on_four
@pytest.mark.parametrize("case", [name for name in names("clip/") if name != "clip/changed"])
def test_clipped_training_is_that_of_torchs_clipping_in_one_process(case: str) -> None:
    is_whole = case.startswith(("clip/semi-auto", "clip/data-parallel"))
    for rank in outcomes(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=EXACT, abs=0)
        assert rank["difference"] <= EXACT
        assert rank["losses"][0] != rank["losses"][-1]
        assert rank["norms"] == pytest.approx(rank["right_norms"], rel=EXACT)
        assert min(rank["norms"]) > MAX_NORM
        assert rank["moved"] == [0 if is_whole else 1] * STEPS


@on_four
@pytest.mark.parametrize("case", names("mixture/"))
def test_one_list_may_mix_meshes_marked_parts_and_whole_parameters(case: str) -> None:
    for rank in outcomes(case):
        assert rank["norm"] == pytest.approx(rank["right_norm"], rel=EXACT)
        assert rank["difference"] <= EXACT
        assert rank["moved"] == 1


@on_four
def test_changed_gradients_need_their_weights() -> None:
    for rank in outcomes("clip/changed"):
        assert "is not one that value_and_grad returned, so its layout is not known: give weights=" in rank["text"]
        assert rank["difference"] == 0.0
