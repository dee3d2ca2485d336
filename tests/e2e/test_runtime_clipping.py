"""Clipping by the global norm in every layout, beside torch's in one process."""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local, weight_difference
from mode_networks import batches, make_network, mine, momentum, train
from on_ranks import on_ranks
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
    layerwise_parallel,
    optim,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

MAX_NORM, STEPS, EXACT = 0.05, 4, 1e-10
NORMS = (2.0, float("inf"), 1.0, 3.0)
MODES = {
    "columns": AutoParallel,
    "semi-auto": AutoParallel,
    "hsdp": lambda net: AutoParallel(net).hsdp(threshold=1),
    "data-parallel": lambda net: AutoParallel(net, "data_parallel"),
    "fsdp": lambda net: AutoParallel(net, "data_parallel").hsdp(threshold=1),
    "fsdp-in-pairs": lambda net: AutoParallel(net, "data_parallel").hsdp(shard_size=2, threshold=0),
}
on_four = on_ranks(4)
pytestmark = pytest.mark.slow


@functools.cache
def serial(norm_type):
    network = make_network()
    norms = []

    def clip():
        norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM, norm_type)))

    losses = train(
        lambda x, y: F.cross_entropy(network(x), y), momentum(network), lambda t: t, steps=STEPS, before_step=clip
    )
    return losses, network, norms


@on_four
@pytest.mark.parametrize(
    ("mode", "norm_type", "form"),
    [
        *(("columns", norm, "module") for norm in NORMS),
        ("fsdp", float("inf"), "module"),
        *((mode, 2.0, form) for mode in list(MODES)[1:] for form in ("module", "step")),
    ],
)
def test_clipped_training_is_that_of_torchs_clipping_in_one_process(mode, norm_type, form):
    """A message of one number where the ranks hold parts, and none where they hold the whole."""
    right, right_network, right_norms = serial(norm_type)
    network, ranks = make_network(), get_group_size()
    if mode == "columns":
        shard(network.layer1, ((1, 1), (ranks, 1), (ranks,)))
        shard(network.layer2, ((1, ranks), (1, ranks)))
    optimizer = optim.Momentum(network.parameters(), 0.05, 0.9)
    norms = []
    moved = []

    def clip(given):
        before = sum(traffic.calls.values())
        if form == "module":
            norms.append(float(clip_grad_norm_(given, MAX_NORM, norm_type)))
        else:
            given = clip_by_global_norm(given, MAX_NORM, norm_type)
        moved.append(sum(traffic.calls.values()) - before)
        return given

    if form == "module":
        step = MODES[mode](WithLoss(network, F.cross_entropy))
        losses = train(step, optimizer, mine, steps=STEPS, before_step=lambda: clip(step))
        assert norms == pytest.approx(right_norms, rel=EXACT)
    else:
        gradients_of = value_and_grad(lambda x, y: F.cross_entropy(network(x), y), None, list(network.parameters()))

        def run(x, y):
            loss, gradients = gradients_of(x, y)
            optimizer(clip(gradients))
            return loss

        step = MODES[mode](run)
        losses = [float(step(mine(x), mine(y))) for x, y in batches(steps=STEPS)]
    assert losses == pytest.approx(right, rel=EXACT, abs=0)
    assert weight_difference(network, right_network) <= EXACT
    assert losses[0] != losses[-1]
    assert min(right_norms) > MAX_NORM
    assert moved == [0 if mode in ("semi-auto", "data-parallel") else 1] * STEPS


@on_four
@pytest.mark.parametrize("norm_type", NORMS)
def test_one_list_may_mix_meshes_marked_parts_and_whole_parameters(ranks, norm_type):
    """A DTensor on two meshes, a marked part, a whole parameter and a tied one."""
    generator = torch.Generator().manual_seed(8)
    values, gradients = (
        [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(4)] for _ in range(2)
    )
    flat, square = init_device_mesh("cpu", (ranks.size,)), init_device_mesh("cpu", (ranks.size // 2, 2))

    def on(mesh, placements, index):
        parameter = nn.Parameter(distribute_tensor(values[index], mesh, placements))
        parameter.grad = distribute_tensor(gradients[index], mesh, placements)
        return parameter

    marked = layerwise_parallel(nn.Parameter(ranks.part(values[2]).clone()))
    marked.grad = ranks.part(gradients[2]).clone()
    whole, without = nn.Parameter(values[3].clone()), nn.Parameter(values[3].clone())
    whole.grad = gradients[3].clone()
    mixed = [on(flat, [Shard(0)], 0), on(square, [Replicate(), Shard(1)], 1), marked, whole, whole, without]
    traffic.reset()
    norm = clip_grad_norm_(mixed, MAX_NORM, norm_type)
    assert sum(traffic.calls.values()) == 1
    rights = [nn.Parameter(value.clone()) for value in values]
    for right, gradient in zip(rights, gradients, strict=True):
        right.grad = gradient.clone()
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(rights, MAX_NORM, norm_type)), rel=EXACT)
    expected = [right.grad for right in rights]
    expected[2] = ranks.part(expected[2])
    for mine_, grad in zip(mixed, expected, strict=False):
        found = mine_.grad
        torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, grad)


@on_four
def test_changed_gradients_need_their_weights():
    """They have lost their layout."""
    network = make_network()
    gradients_of = value_and_grad(lambda x, y: F.cross_entropy(network(x), y), None, list(network.parameters()))

    def run(x, y):
        loss, gradients = gradients_of(x, y)
        halves = [gradient / 2 for gradient in gradients]
        with pytest.raises(StrategyError, match=r"is not one that value_and_grad returned, .* give weights="):
            clip_by_global_norm(halves, MAX_NORM)
        named = clip_by_global_norm(halves, 1e9, weights=list(network.parameters()))
        assert all(torch.equal(local(a), local(b)) for a, b in zip(named, halves, strict=True))
        clip_by_global_norm(clip_by_global_norm(gradients, MAX_NORM), 1e9)
        return loss

    images, labels = next(batches())
    MODES["hsdp"](run)(mine(images), mine(labels))
