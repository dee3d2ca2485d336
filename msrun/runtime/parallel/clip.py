"""Clipping by the global norm: every element of the network counts once, wherever its copies and its parts are.

A rank adds up the powers of its own elements, each divided by the number of ranks that hold it; one all-reduce makes
the norm of the whole. Where every parameter is whole on every rank there is nothing to exchange. Parts are known from
AutoParallel's placement, from a DTensor's (FSDP2, tensor parallel), and from the mark `layerwise_parallel`; any mixture
of them will do. The factor is torch's: min(1, max_norm / (norm + 1e-6)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import world
from msrun.runtime.execute.gradients import coalesced
from msrun.runtime.execute.placement import placement_of
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.nn.replaced import current
from msrun.runtime.parallel.auto_parallel import AutoParallel
from msrun.runtime.parallel.modes.own_gradients import is_layerwise
from msrun.runtime.parts.on_servers import refuse_on_servers
from msrun.runtime.progress import waiting_in
from msrun.runtime.tensors.plain_tensors import local_part

_EPSILON = 1e-6
_weight_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""gradient that value_and_grad has returned -> its weight"""


def clip_grad_norm_(
    parameters: AutoParallel | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; returns the norm before.

    torch's `clip_grad_norm_` for networks whose parameters are cut: the result is that of one process. All ranks call
    it together, after `backward()` and before the optimizer's step.

    Args:
        parameters: an AutoParallel, or parameters in any layouts; those without a gradient are passed over.
        norm_type: 1 or more, or infinity.

    Raises:
        StrategyError: a norm that is none.
        ParallelError: `error_if_nonfinite`, and the norm is infinite or not a number.
    """
    if isinstance(parameters, AutoParallel):
        parameters.check_gradients_stay("clip_grad_norm_")
        parameters = parameters.parameters()
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = list({id(parameter): parameter for parameter in map(current, given)}.values())
    norm = _global_norm([parameter.grad for parameter in unique], unique, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise ParallelError(f"clip_grad_norm_: the norm is {float(norm)}: lower the learning rate, or scale the loss")
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    with torch.no_grad():
        for parameter in unique:
            if parameter.grad is not None:
                _scale_(parameter.grad, factor)
    return norm


def clip_by_global_norm(
    gradients: Sequence[Tensor], max_norm: float, norm_type: float = 2.0, weights: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Return gradients scaled so that their global norm is at most `max_norm`; for step functions.

    `optimizer(clip_by_global_norm(gradients, 1.0))` with the gradients that `value_and_grad` returned.

    Args:
        weights: whose gradients these are, in the same order; needed only when they were changed since.

    Raises:
        StrategyError: gradients whose weights are not known, another number of weights, or a norm that is none.
    """
    gradients = list(gradients)
    owners = (
        [current(weight) for weight in weights]
        if weights is not None
        else [_find(i, g) for i, g in enumerate(gradients)]
    )
    if len(owners) != len(gradients):
        raise StrategyError(f"clip_by_global_norm: {len(owners)} weights for {len(gradients)} gradients; give one each")
    norm = _global_norm(gradients, owners, norm_type)
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    clipped = []
    with torch.no_grad():
        for gradient, owner in zip(gradients, owners, strict=True):
            value = gradient.detach().clone()
            _scale_(value, factor)
            note_weight(value, owner)
            clipped.append(value)
    return tuple(clipped)


def note_weight(gradient: Tensor, weight: Tensor) -> None:
    """Remember whose gradient a tensor is."""
    _weight_of[gradient] = weight


def _find(index: int, gradient: Tensor) -> Tensor:
    if placement_of(gradient) is not None:
        return gradient
    weight = _weight_of.get(gradient)
    if weight is not None:
        return weight
    if world.get_group_size() == 1:
        return gradient
    raise StrategyError(
        f"clip_by_global_norm: gradient {index} of shape {tuple(gradient.shape)} is not one that value_and_grad "
        "returned, so its layout is not known: give weights=..."
    )


def _scale_(gradient: Tensor, factor: Tensor) -> None:
    local = local_part(gradient)
    local = local._values() if local.is_sparse else local  # the memory itself
    local.mul_(factor.to(device=local.device, dtype=factor.dtype if local.dtype == torch.float64 else torch.float32))


def _global_norm(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients together, in float64 where the device has it."""
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type >= 1:
        raise StrategyError(f"norm_type={norm_type!r}: must be 1 or more, or infinity")
    power = float(norm_type)
    device = world.device()
    dtype = torch.float32 if device.type == "npu" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    ranks = world.get_group_size()
    if ranks > 1:
        refuse_on_servers(parameters, "the norm of the gradient")
    copies = [_copies(parameter, ranks) for parameter in parameters]
    for gradient, count in zip(gradients, copies, strict=True):
        if gradient is None:
            continue
        local = _whole_sums(gradient)
        if not local.numel():
            continue
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(local.detach(), power, dtype=wide).to(total)
        total = torch.maximum(total, norm) if math.isinf(power) else total + norm**power * (ranks / count)
    if any(count != ranks for count in copies):
        traffic.add("all_reduce", total)
        with waiting_in(lambda: "the all_reduce of the gradients' norm"):
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM)
        total = total if math.isinf(power) else total / ranks
    return total if math.isinf(power) else total ** (1.0 / power)


def _copies(parameter: Tensor, ranks: int) -> int:
    """Return how many ranks hold each element of a parameter."""
    if is_layerwise(parameter):
        return 1
    placed = placement_of(parameter)
    if placed is None and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        shards = math.prod(mesh.size(dim) for dim, place in enumerate(parameter.placements) if place.is_shard())
        return ranks // shards
    return ranks if placed is None else placed.copies


def _whole_sums(gradient: Any) -> Tensor:
    """Return this rank's elements; of a DTensor with partial sums the sums first."""
    if isinstance(gradient, DTensor) and any(isinstance(place, Partial) for place in gradient.placements):
        raise StrategyError(
            "a gradient is a DTensor of partial sums: redistribute it, gradient.redistribute(placements=...), first"
        )
    local = local_part(gradient)
    return coalesced(local).values() if local.is_sparse else local
