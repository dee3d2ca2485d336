"""Collectives of a graph: strides of what they take, the dimensions they cut."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from call_patterns.pattern import WORLD_SIZE, assert_close, batch, pattern, seeded
from msrun.runtime import AutoParallel, WithLoss, get_rank, shard
from msrun.runtime.execute.transfers import start_backward, start_forward
from msrun.runtime.sharding.collective import Collective, Kind
from msrun.runtime.sharding.layout import build_mesh


@pattern
def collectives_of_a_graph_take_values_of_any_strides() -> None:
    mesh = build_mesh(WORLD_SIZE)
    generator = torch.Generator().manual_seed(get_rank())
    value = torch.randn(4, 4, 8, 4, generator=generator)
    orders = itertools.permutations(range(4))
    strided = [value.permute(order).contiguous().permute([order.index(dim) for dim in range(4)]) for order in orders]
    strided += [value[:, :1].expand(4, 4, 8, 4), value.repeat(1, 1, 1, 2)[..., ::2]]
    kinds: list[Kind] = ["all_reduce", "enter", "gather", "gather_enter", "slice", "reduce_scatter"]
    collectives = [Collective(kind, mesh.axes, dim) for kind in kinds for dim in range(4)]
    collectives += [Collective("exchange", mesh.axes, dim, other) for dim, other in itertools.permutations(range(4), 2)]
    for collective, given in itertools.product(collectives, strided):
        for start in (start_forward, start_backward):
            strided_one, plain_one = (start(collective, x, mesh, get_rank()) for x in (given, given.contiguous()))
            assert_close(strided_one.wait(), plain_one.wait())


@pattern
def summed_dimension_may_be_cut_by_any_axes_afterwards() -> None:
    x, y = batch()[0].reshape(4, 4, 8).contiguous(), torch.ones(4, 4, 8)
    outcomes = [(1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 1, 1)]
    for out in outcomes:
        serial = seeded(lambda: nn.Linear(8, 8))
        network = shard(copy.deepcopy(serial), ((1, 1, 4), (1, 4)), out_strategy=(out,))
        given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")(given, y)
        right = F.mse_loss(serial(expected), y)
        loss.backward()
        right.backward()
        assert_close(loss.detach(), right.detach())
        assert_close(given.grad, expected.grad)
