"""Optimizer parallel (hsdp): which parameters are stored cut over the ranks that hold copies of them.

The rule is MindSpore's (`TensorLayout::GenerateOptShardSliceShape` and AutoParallel.hsdp): a parameter of at least
`threshold` KB is cut along dimension 0 over its copies, in groups of `shard_size` if given. Where that dimension cannot
be cut evenly, MindSpore leaves it whole; here the last parts are smaller, or empty, as torch.chunk and FSDP2 cut. What
operators have cut already, and fewer rows than ranks, are cut evenly or not at all. The plan says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msrun.errors import StrategyError
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout

Level = Literal["level1", "level2", "level3"]
KB = 1024
ZERO_WORDS = {
    "level1": "weights and optimizer state sharded",
    "level2": "weights, gradients and optimizer state sharded (ZeRO-2)",
    "level3": "as level2, and gathered again for the backward pass (ZeRO-3)",
}


@dataclass(frozen=True)
class HsdpSpec:
    """Settings of `AutoParallel.hsdp`."""

    shard_size: int = -1
    """Ranks that share one parameter; -1 = all that hold copies of it."""
    threshold: int = 64
    """Smaller parameters stay whole; KB of the whole parameter."""
    optimizer_level: Level = "level1"

    def __post_init__(self) -> None:
        if not isinstance(self.shard_size, int) or (self.shard_size < 1 and self.shard_size != -1):
            raise StrategyError(f"hsdp(shard_size={self.shard_size!r}): must be a whole number above 0, or -1 for all")
        if not isinstance(self.threshold, int) or self.threshold < 0:
            raise StrategyError(f"hsdp(threshold={self.threshold!r}): must be a whole number of KB, 0 or more")
        if self.optimizer_level not in ZERO_WORDS:
            raise StrategyError(
                f"hsdp(optimizer_level={self.optimizer_level!r}): must be one of {', '.join(ZERO_WORDS)}"
            )

    def check_world(self, world_size: int) -> None:
        """Refuse a shard size that the world cannot have."""
        if self.shard_size > world_size:
            raise StrategyError(
                f"hsdp(shard_size={self.shard_size}): there are only {world_size} ranks; give at most that, or -1"
            )


def choose_shard_axes(
    spec: HsdpSpec | None,
    mesh: Mesh,
    layout: TensorLayout,
    shape: Sequence[int],
    itemsize: int,
    *,
    opted_out: bool,
    partial_axes: Axes,
) -> tuple[Axes, str]:
    """Return the axes that cut dimension 0 further, and the reason for cutting or not cutting.

    Axes along which the gradient is equal on all ranks stand before those along which it is a partial sum, so that
    the gradient can be cut first and reduce-scattered then.
    """
    if spec is None:
        return (), "hsdp is off"
    if opted_out:
        return (), "parallel_optimizer is False"
    copies = layout.copies(mesh)
    if not copies:
        return (), "no rank holds a copy of it"
    nbytes = math.prod(shape) * itemsize
    if nbytes < spec.threshold * KB:
        size = f"{nbytes} B" if nbytes < KB else f"{nbytes / KB:g} KB"
        return (), f"{size} is under the threshold of {spec.threshold} KB"
    if not shape:
        return (), "it is a single number"
    axes = copies if spec.shard_size == -1 else _subset(mesh, copies, spec.shard_size)
    if axes is None:
        return (), f"shard_size {spec.shard_size} cannot be made of its {mesh.extent(copies)} copies"
    rows, parts = layout.local_shape(mesh, shape)[0], mesh.extent(axes)
    if rows % parts and (layout.split[0] or rows < parts):
        return (), f"its {rows} rows cannot be cut into {parts} equal parts"
    ordered = (*(a for a in axes if a not in partial_axes), *(a for a in axes if a in partial_axes))
    return ordered, f"rows cut over {parts} ranks{', in unequal parts' if rows % parts else ''}"


def _subset(mesh: Mesh, axes: Axes, size: int) -> Axes | None:
    """Return axes of exactly this extent, nearest ranks first; all of them when there are fewer copies."""
    if mesh.extent(axes) < size:
        return axes
    taken: list[int] = []
    for axis in reversed(axes):
        if size % (mesh.extent(tuple(taken)) * mesh.shape[axis]) == 0:
            taken.insert(0, axis)
    return tuple(taken) if mesh.extent(tuple(taken)) == size else None
