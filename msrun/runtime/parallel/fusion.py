"""Communication fusion: which parameters travel in one message.

`set_comm_fusion(module, id)` writes a number on the module's parameters; equal numbers travel together and 0 means
"never fuse" (MindSpore's `Cell.set_comm_fusion`). Parameters without a number are fused by size, in order of use.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from msrun.errors import StrategyError
from msrun.runtime.graph.parameters import NEVER_FUSE, StoredParameter
from msrun.runtime.layout import Axes

BUCKET_BYTES = 25 * 1024 * 1024
"""A message carries at most this much of parameters without a number; DDP's default bucket."""
_ATTRIBUTE = "comm_fusion"


def set_comm_fusion(module: nn.Module, fusion_id: int, recurse: bool = True) -> nn.Module:
    """Let the trainable parameters of `module` travel with those of equal `fusion_id`; 0 = each alone.

    Later calls win. Returns the module.

    Raises:
        StrategyError: not a whole number of 0 or more.
    """
    if isinstance(fusion_id, bool) or not isinstance(fusion_id, int) or fusion_id < 0:
        raise StrategyError(f"set_comm_fusion({fusion_id!r}): must be a whole number, 0 or more; 0 never fuses")
    for parameter in module.parameters(recurse):
        if parameter.requires_grad:
            setattr(parameter, _ATTRIBUTE, fusion_id)
    return module


def fusion_id_of(parameter: nn.Parameter) -> int | None:
    """Return a parameter's number, or None when it has none."""
    return getattr(parameter, _ATTRIBUTE, None)


def group_parameters(parameters: Sequence[tuple[StoredParameter, Axes]]) -> list[list[int]]:
    """Return lists of indexes that travel together, in order of first use.

    Only parameters that are cut alike, summed alike and of one type can share a message.

    Args:
        parameters: in order of use, each with the axes along which its gradient is a partial sum.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[object, ...], int] = {}
    sizes: dict[int, int] = {}
    for index, (stored, partial_axes) in enumerate(parameters):
        value = stored.parameter
        size = value.numel() * value.element_size()
        key = (stored.shard_axes, partial_axes, value.dtype, value.requires_grad, stored.fusion_id)
        number = open_groups.get(key)
        fits = number is not None and (stored.fusion_id is not None or sizes[number] + size <= BUCKET_BYTES)
        if number is None or not fits or stored.fusion_id == NEVER_FUSE:
            number = len(groups)
            groups.append([])
            sizes[number] = 0
            open_groups[key] = number
        groups[number].append(index)
        sizes[number] += size
    return groups
