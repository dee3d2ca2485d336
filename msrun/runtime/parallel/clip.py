"""Clipping by the global norm: every element of the network counts once, wherever its copies and its parts are.

Parts are known from AutoParallel's placement, from a DTensor's (tensor parallel), and from the mark
`layerwise_parallel`; any mixture of them will do. The factor is torch's: min(1, max_norm / (norm + 1e-6)).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import world
from msrun.runtime.execute.placement import placement_of
from msrun.runtime.parallel.auto_parallel import AutoParallel
from msrun.runtime.parallel.modes.own_gradients import is_layerwise
from msrun.runtime.parts.norms import norms_of_each
from msrun.runtime.parts.on_servers import refuse_on_servers
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
    given: Iterable[Tensor] = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = list({id(parameter): parameter for parameter in given}.values())
    norm = _global_norm([parameter.grad for parameter in unique], unique, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise ParallelError(f"clip_grad_norm_: the norm is {float(norm)}: lower the learning rate, or scale the loss")
    _scale_([parameter.grad for parameter in unique], max_norm, norm)
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
    owners = list(weights) if weights is not None else [_find(i, g) for i, g in enumerate(gradients)]
    if len(owners) != len(gradients):
        raise StrategyError(f"clip_by_global_norm: {len(owners)} weights for {len(gradients)} gradients; give one each")
    norm = _global_norm(gradients, owners, norm_type)
    clipped = tuple(gradient.detach().clone() for gradient in gradients)
    _scale_(clipped, max_norm, norm)
    for value, owner in zip(clipped, owners, strict=True):
        note_weight(value, owner)
    return clipped


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


@torch.no_grad()
def _scale_(gradients: Iterable[Tensor | None], max_norm: float, norm: Tensor) -> None:
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for local in (local_part(gradient) for gradient in gradients if gradient is not None):
        memory = local._values() if local.is_sparse else local
        memory.mul_(factor.to(memory.device, torch.float64 if memory.dtype == torch.float64 else torch.float32))


def _global_norm(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients together, in float64 where the device has it."""
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type >= 1:
        raise StrategyError(f"norm_type={norm_type!r}: must be 1 or more, or infinity")
    is_alone = world.get_group_size() == 1
    if not is_alone:
        refuse_on_servers(parameters, "the norm of the gradient")
    own = [is_layerwise(parameter) and not is_alone for parameter in parameters]
    norms = norms_of_each(parameters, gradients, float(norm_type), own=own)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
