"""Clipping by the global norm in every layout, beside torch's in one process."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import difference, local
from mode_networks import batches, make_network, mine
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    clip_by_global_norm,
    clip_grad_norm_,
    layerwise_parallel,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

MAX_NORM, EXACT = 0.05, 1e-10
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


@on_four
@pytest.mark.parametrize(
    ("mode", "norm_type"), [*(("columns", norm) for norm in NORMS), *((mode, 2.0) for mode in list(MODES)[1:])]
)
def test_gradients_of_a_step_function_are_clipped_as_torch_clips_in_one_process(ranks, mode, norm_type):
    """A message of one number where the ranks hold parts, and none where they hold the whole."""
    network, right = make_network(), make_network()
    if mode == "columns":
        shard(network.layer1, ((1, 1), (ranks.size, 1), (ranks.size,)))
        shard(network.layer2, ((1, ranks.size), (1, ranks.size)))
    gradients_of = value_and_grad(lambda x, y: F.cross_entropy(network(x), y), None, list(network.parameters()))
    clipped = []

    def run(x, y):
        loss, gradients = gradients_of(x, y)
        before = sum(traffic.calls.values())
        clipped.extend(clip_by_global_norm(gradients, MAX_NORM, norm_type))
        assert sum(traffic.calls.values()) - before == (mode not in ("semi-auto", "data-parallel"))
        return loss

    images, labels = next(batches())
    MODES[mode](run)(mine(images), mine(labels))
    F.cross_entropy(right(images), labels).backward()
    assert nn.utils.clip_grad_norm_(right.parameters(), MAX_NORM, norm_type) > MAX_NORM
    for found, parameter, expected in zip(clipped, network.parameters(), right.parameters(), strict=True):
        assert difference(found, expected.grad, parameter) <= EXACT


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
