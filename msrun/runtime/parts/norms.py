"""Norms of whole tensors, also where ranks hold parts of them: every element counts once, wherever its copies are.

A rank adds up the powers of its own elements, each divided by the number of ranks that hold it; one all-reduce makes
the norms of the wholes. Where every tensor is whole on every rank there is nothing to exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.execute.gradients import coalesced
from msrun.runtime.execute.placement import placement_of
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.progress import waiting_in
from msrun.runtime.tensors.plain_tensors import local_part


def norms_of_each(
    owners: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    power: float = 2.0,
    dtype: torch.dtype | None = None,
    *,
    own: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Return the norm of each tensor, of parts that of its whole, in a pipeline too. All ranks call it together.

    Args:
        owners: the parameters, the same ones on every rank.
        tensors: what lies as its parameter does; None where this rank has nothing. One all-reduce for all of them.
        own: which of them are another tensor on every rank, of whose elements none is anywhere else; None: none.
    """
    is_max = math.isinf(power)
    wide = torch.float32 if world.device().type == "npu" else torch.float64
    zero = torch.zeros((), dtype=wide, device=world.device())
    norms = [zero if tensor is None else _own_norm(tensor, power, dtype).to(zero) for tensor in tensors]
    shares = [1.0 if own is not None and own[i] else _share_of(owner) for i, owner in enumerate(owners)]
    cut = [index for index, share in enumerate(shares) if share is not None]
    if not cut:
        return norms
    totals = torch.stack([norms[index] for index in cut])  # also of gradients on the host
    if not is_max:
        totals = totals**power * torch.tensor([shares[index] for index in cut]).to(zero)
    traffic.add("all_reduce", totals)
    with waiting_in(lambda: "the all_reduce of norms of parts"):
        dist.all_reduce(totals, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)
    for index, total in zip(cut, totals if is_max else totals ** (1.0 / power), strict=True):
        norms[index] = total
    return norms


def _share_of(owner: Tensor) -> float | None:
    """Return by what this rank's powers count in the sum over all ranks; None where each rank has the whole."""
    placed = placement_of(owner)
    if placed is not None and placed.copies != placed.world_size:
        placed.check_world("a norm")
        return 1.0 / placed.copies if placed.is_held else 0.0
    if placed is None and isinstance(owner, DTensor):
        mesh = owner.device_mesh
        parts = math.prod(mesh.size(dim) for dim, place in enumerate(owner.placements) if place.is_shard())
        return parts / world.get_group_size() if parts > 1 else None
    return None


def _own_norm(tensor: Tensor, power: float, dtype: torch.dtype | None) -> Tensor:
    """Return the norm of this rank's elements, of 16 bits in float32; 0 of none, which torch refuses of the largest."""
    if isinstance(tensor, DTensor) and any(isinstance(place, Partial) for place in tensor.placements):
        raise StrategyError(
            "a gradient is a DTensor of partial sums: redistribute it, gradient.redistribute(placements=...), first"
        )
    local = local_part(tensor)
    local = coalesced(local).values() if local.is_sparse else local
    dtype = dtype or torch.promote_types(local.dtype, torch.float32)
    return torch.linalg.vector_norm(local, power if local.numel() else 2.0, dtype=dtype)
