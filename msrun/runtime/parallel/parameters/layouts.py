"""How every parameter of a network is cut, in MindSpore's terms: device matrix, tensor map, optimizer shards, stages.

A tensor map has one number k for each dimension, which is cut along axis `len(dev_matrix) - 1 - k` of the device
matrix; several numbers where several axes cut it, -1 where none does. Of what that leaves, optimizer parallel cuts
dimension 0 further, over `opt_weight_shard_size` ranks that stand `opt_weight_shard_step` apart
(mindspore.parallel.checkpoint_transform; `parallel_layout_item` in its strategy files).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.errors import CheckpointError, near_miss
from msrun.runtime.execute.placement import Placement, chunk_bounds, placement_of
from msrun.runtime.parallel.parameters.network_state import find_box, find_network_state
from msrun.runtime.sharding.layout import Box
from msrun.runtime.world import world

Map = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter is cut; what a strategy file says of it.

    Raises:
        CheckpointError: numbers that contradict each other.
    """

    dev_matrix: tuple[int, ...]
    """Ranks of one stage as a grid, the last axis changing fastest."""
    tensor_map: Map
    """For each dimension the axes that cut it, counted from the last one; () where it is whole."""
    tensor_shape: tuple[int, ...]
    """Of the whole."""
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0
    opt_weight_shard_axes: tuple[int, ...] = ()
    """The same as axes counted from the last one, where a step cannot say it; () asks the step."""
    pipeline_stages: int = 1
    stages: tuple[int, ...] = ()
    """Stages that hold it; () for all."""
    field: int = 0
    """MindSpore's field size, for tables that are cut in unequal parts; always 0 here."""

    def __post_init__(self) -> None:
        axes = list(itertools.chain(*self.tensor_map, self.opt_weight_shard_axes))
        parts = [
            math.prod(self._extent(k) for k in split)
            for split in self.tensor_map
            if max(split, default=-1) < len(self.dev_matrix)
        ]
        if (
            len(self.tensor_map) != len(self.tensor_shape)
            or len(set(axes)) != len(axes)
            or any(not 0 <= k < len(self.dev_matrix) for k in axes)
            or any(size % count for size, count in zip(self.tensor_shape, parts, strict=True))
        ):
            raise CheckpointError(
                f"layout of a tensor of shape {self.tensor_shape}: tensor map {self.tensor_map} does not fit it and "
                f"device matrix {self.dev_matrix}; write the strategy file again"
            )

    def _extent(self, k: int) -> int:
        return self.dev_matrix[len(self.dev_matrix) - 1 - k]

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return math.prod(self.dev_matrix)

    @property
    def world_size(self) -> int:
        """Ranks that the layout speaks of."""
        return self.stage_size * self.pipeline_stages

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of one rank's part before optimizer parallel cuts it further."""
        splits = zip(self.tensor_shape, self.tensor_map, strict=True)
        return tuple(size // math.prod(map(self._extent, split)) for size, split in splits)

    def box(self, global_rank: int) -> Box | None:
        """Return the part that a rank holds; None when its stage holds none.

        Raises:
            CheckpointError: the layout speaks of fewer ranks.
        """
        if global_rank >= self.world_size:
            raise CheckpointError(f"rank {global_rank}: the layout is one of {self.world_size} ranks; give that file")
        stage, rank = divmod(global_rank, self.stage_size)
        if self.stages and stage not in self.stages:
            return None
        offsets, sizes = [], []
        for size, split in zip(self.slice_shape, self.tensor_map, strict=True):
            offsets.append(self._index(rank, split) * size)
            sizes.append(size)
        count, index = self._optimizer_shard(rank)
        if count > 1:  # as torch.chunk, where they cannot be equal
            begin, end = chunk_bounds(sizes[0], count)[index : index + 2]
            offsets[0], sizes[0] = offsets[0] + begin, end - begin
        return Box(self.tensor_shape, tuple(offsets), tuple(sizes))

    def _optimizer_shard(self, rank: int) -> tuple[int, int]:
        if self.opt_weight_shard_axes:
            return math.prod(map(self._extent, self.opt_weight_shard_axes)), self._index(
                rank, self.opt_weight_shard_axes
            )
        if self.opt_weight_shard_size > 1:
            return self.opt_weight_shard_size, rank // max(1, self.opt_weight_shard_step) % self.opt_weight_shard_size
        return 1, 0

    def _index(self, rank: int, split: Sequence[int]) -> int:
        """Return a rank's place along axes read as one number, the first one most significant."""
        index = 0
        for k in split:
            stride = math.prod(self.dev_matrix[len(self.dev_matrix) - k :])
            index = index * self._extent(k) + rank // stride % self._extent(k)
        return index

    def to_json(self) -> dict[str, Any]:
        """Return what a strategy file holds."""
        shards = {"opt_weight_shard_axes": list(self.opt_weight_shard_axes)} if self.opt_weight_shard_axes else {}
        return {
            "dev_matrix": list(self.dev_matrix),
            "tensor_map": [_shortened(split) for split in self.tensor_map],
            "tensor_shape": list(self.tensor_shape),
            "slice_shape": list(self.slice_shape),
            "field": self.field,
            "opt_weight_shard_step": self.opt_weight_shard_step,
            "opt_weight_shard_size": self.opt_weight_shard_size,
            **shards,
        }

    @classmethod
    def from_json(
        cls, item: Mapping[str, Any], pipeline_stages: int = 1, stages: tuple[int, ...] = ()
    ) -> ParameterLayout:
        """Return the layout that an item of a strategy file says.

        Raises:
            KeyError, TypeError, ValueError: it is none.
            CheckpointError: numbers that contradict each other.
        """
        return cls(
            tuple(map(int, item["dev_matrix"])),
            tuple(
                tuple(k for k in (split if isinstance(split, list) else [split]) if k >= 0)
                for split in item["tensor_map"]
            ),
            tuple(map(int, item["tensor_shape"])),
            max(0, int(item.get("opt_weight_shard_step", 0))),
            max(0, int(item.get("opt_weight_shard_size", 0))),
            tuple(map(int, item.get("opt_weight_shard_axes", ()))),
            pipeline_stages,
            stages,
            int(item.get("field", 0)),
        )


def _shortened(split: tuple[int, ...]) -> int | list[int]:
    return -1 if not split else split[0] if len(split) == 1 else list(split)


def find_layouts(network: Any) -> dict[str, ParameterLayout]:
    """Return parameter name -> how it is cut. Before AutoParallel's first call every parameter is whole everywhere.

    Parameters marked `layerwise_parallel` are left out: nobody knows the whole of them.

    Args:
        network: a module, or an AutoParallel of one.

    Raises:
        CheckpointError: not a network, or one cut over a device mesh that is not all ranks in their order.
    """
    state = find_network_state(network)
    placed = filter(None, map(placement_of, state.tensors.values()))
    stages = max((_count_stages(placement) for placement in placed), default=1)
    return {name: _find_layout(name, tensor, stages) for name, tensor in state.tensors.items() if name not in state.own}


def _count_stages(placed: Placement) -> int:
    return placed.world_size // placed.mesh.size


def _find_layout(name: str, tensor: Tensor, stages: int) -> ParameterLayout:
    placed = placement_of(tensor)
    if placed is not None:
        return _layout_of(placed)
    if isinstance(tensor, DTensor):
        return _layout_of_dtensor(name, tensor)
    matrix = (world().world_size // stages,)
    return ParameterLayout(matrix, ((),) * tensor.dim(), tuple(tensor.shape), pipeline_stages=stages)


def _layout_of(placed: Placement) -> ParameterLayout:
    if not placed.is_even:
        raise CheckpointError(
            f"{placed.name}: its {placed.shape[0]} rows are not cut evenly, which a strategy file cannot say: "
            "load_checkpoint needs none"
        )
    last = len(placed.mesh.shape) - 1
    axes = placed.shard_axes
    size = placed.mesh.extent(axes) if axes else 0
    is_even = bool(axes) and axes == tuple(range(axes[0], axes[-1] + 1))
    return ParameterLayout(
        placed.mesh.shape or (1,),
        tuple(tuple(last - axis for axis in split) for split in placed.used.split),
        placed.shape,
        placed.mesh.stride(axes[-1]) if is_even else 0,
        size,
        () if is_even else tuple(last - axis for axis in axes),
        _count_stages(placed),
        placed.holders if placed.stages else (),
    )


def _layout_of_dtensor(name: str, tensor: DTensor) -> ParameterLayout:
    grid = tensor.device_mesh.mesh
    if grid.reshape(-1).tolist() != list(range(world().world_size)):
        raise CheckpointError(
            f"{name} is a DTensor on ranks {grid.reshape(-1).tolist()}: a strategy file speaks of all ranks, in order"
        )
    last = grid.dim() - 1
    cut: list[tuple[int, ...]] = [() for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            cut[placement.dim] += (last - axis,)  # type: ignore[attr-defined]
    return ParameterLayout(tuple(grid.shape), tuple(cut), tuple(tensor.shape))


def check_layouts(network: Any, layouts: Mapping[str, ParameterLayout]) -> None:
    """Refuse layouts of another network."""
    state = find_network_state(network)
    for name, layout in layouts.items():
        tensor = state.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"layout of {name}: the network has no such parameter{near_miss(name, state.tensors)}; give the "
                "layouts of this network"
            )
        if find_box(tensor).shape != layout.tensor_shape:
            raise CheckpointError(
                f"layout of {name}: it is one of shape {layout.tensor_shape}, the network's has "
                f"{find_box(tensor).shape}; give the layouts of this network"
            )
