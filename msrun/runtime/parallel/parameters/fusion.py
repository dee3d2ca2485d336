"""Communication fusion: which parameters travel in one message.

`set_comm_fusion(module, id)` writes a number on the module's parameters; equal numbers travel together and 0 means
"never fuse" (MindSpore's `Cell.set_comm_fusion`). Parameters without a number are fused in order of use, by size or as
`AutoParallel.comm_fusion` says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Literal

from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.execute.parameters import NEVER_FUSE
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.parallel.parameters.fusion_config import FusionConfig, MessageRule
from msrun.runtime.sharding.layout import Axes

Way = Literal["gather", "reduce"]
"""To the use of parameters, or their gradients back from it."""
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


def group_parameters(
    parameters: Sequence[tuple[PlacedParameter, Axes]],
    way: Way = "gather",
    config: FusionConfig | None = None,
    *,
    regathered: Collection[str] = (),
    alone: Collection[str] = (),
) -> list[list[int]]:
    """Return lists of indexes that travel together, in order of first use.

    Only parameters that are cut alike, summed alike and of one type can share a message.

    Args:
        parameters: in order of use, each with the axes along which its gradient is a partial sum.
        way: to their use, or their gradients back from it.
        regathered: names of those whose gathered parts are freed and gathered again.
        alone: names of those that share no message.
    """
    config = config or FusionConfig()
    groups: list[list[int]] = []
    open_groups: dict[tuple[object, ...], int] = {}
    sizes: dict[int, int] = {}
    reduced = 0
    for index, (stored, partial_axes) in enumerate(parameters):
        value, is_trained = stored.part, stored.parameter.requires_grad
        size = value.numel() * value.element_size()
        rule = _rule_of(stored, way, config)
        is_large = stored.name in alone or (stored.fusion_id is None and _is_large(value, size, rule))
        is_alone = not config.is_open or stored.fusion_id == NEVER_FUSE or is_large
        fused_by = bisect_right(rule.boundaries, reduced) if stored.fusion_id is None else ("id", stored.fusion_id)
        placed = stored.placement
        if not placed.shard_axes and partial_axes and is_trained:
            reduced += 1
        is_regathered = stored.name in regathered
        key = (placed.shard_axes, partial_axes, value.dtype, is_trained, fused_by, is_regathered, placed.on_host)
        number = open_groups.get(key)
        is_small = number is not None and (rule.most_bytes is None or sizes[number] + size <= rule.most_bytes)
        if number is None or is_alone or not (is_small or stored.fusion_id is not None):
            number = len(groups)
            groups.append([])
            sizes[number] = 0
            if not is_large:
                open_groups[key] = number
        groups[number].append(index)
        sizes[number] += size
    return groups


def _is_large(value: Tensor, size: int, rule: MessageRule) -> bool:
    return rule.alone_bytes is not None and size >= rule.alone_bytes and value.device.type == "cpu"


def _rule_of(stored: PlacedParameter, way: Way, config: FusionConfig) -> MessageRule:
    if not stored.placement.shard_axes:
        return config.allreduce
    return config.allgather if way == "gather" else config.reducescatter
