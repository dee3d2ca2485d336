"""Placement: which part of a parameter a rank holds. One record for every parameter that AutoParallel placed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import ParallelError
from msrun.runtime import world
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.tensors.plain_tensors import plain


def chunk_bounds(rows: int, parts: int) -> tuple[int, ...]:
    """Return where the parts begin that torch.chunk makes of rows, and the end: the last ones are smaller, or empty."""
    size = -(-rows // parts)
    return tuple(min(rows, size * place) for place in range(parts + 1))


@dataclass(frozen=True)
class Placement:
    """How a parameter is stored; holds whoever calls its network, with its loss or without, to the same."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    used: TensorLayout
    """Of the part that operators read."""
    shard_axes: Axes
    """Further cut of dimension 0 by optimizer parallel; empty when left whole."""
    reason: str
    """Why it is cut, or why it is left whole."""
    mesh: Mesh
    rank: int
    world_size: int
    stages: tuple[int, ...] = ()
    """Stages of the pipeline that hold it; () when every rank does."""
    holders: tuple[int, ...] = ()
    """Pipeline ranks of these stages, ascending."""
    is_held: bool = True
    """False on the ranks of other stages: their parameter object is empty."""
    on_host: bool = False
    """Whether it lies in the host's memory."""
    bounds: tuple[int, ...] = ()
    """Where the parts of dimension 0 begin, and the end, when they are not equal."""
    exchanges_rows: bool = False
    """Its operator exchanges rows between the ranks: no mode cuts it or reduces its gradient."""

    @cached_property
    def stored(self) -> TensorLayout:
        """The layout at rest."""
        if not self.shard_axes:
            return self.used
        return TensorLayout((self.used.split[0] + self.shard_axes, *self.used.split[1:]))

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where this rank's part lies in the whole."""
        slices = self.stored.slices(self.mesh, self.shape, self.rank)
        if not self.bounds:
            return slices
        place = self.mesh.index(self.rank, self.stored.split[0])
        return (slice(*self.bounds[place : place + 2]), *slices[1:])

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's part; without rows, but of as many dimensions, where another stage holds it."""
        return tuple(part.stop - part.start for part in self.slices) if self.is_held else (0, *self.shape[1:])

    @cached_property
    def sent_numel(self) -> int:
        """Elements of a part in messages, which are equally large on all ranks: those of the largest part."""
        largest = (self.bounds[1], *self.local_shape[1:]) if self.bounds and self.shard_axes else self.local_shape
        return math.prod(largest)

    @property
    def is_cut(self) -> bool:
        """True when some rank holds less than the whole."""
        return bool(self.stages) or self.local_shape != self.shape

    @property
    def copies(self) -> int:
        """Ranks of the world that hold each element."""
        groups = len(self.holders) if self.stages else self.world_size // self.mesh.size
        return groups * self.mesh.size // math.prod(self.mesh.extent(axes) for axes in self.stored.split)

    def check_world(self, what: str) -> None:
        """Refuse what needs the ranks of the world in which the parameter was placed."""
        if self.world_size != world.get_group_size():
            raise ParallelError(
                f"{self.name}: {what} needs the {self.world_size} ranks that hold it, but this process has left their "
                "world: call it before release()"
            )

    def is_same_cut(self, other: Placement) -> bool:
        """Return whether a tensor placed so lies on every rank as this one does."""
        return self is other or (self.shape, self.slices, self.stages, self.is_held) == (
            other.shape,
            other.slices,
            other.stages,
            other.is_held,
        )

    @property
    def is_even(self) -> bool:
        """Whether the parts are those that torch makes of a tensor: of equal size, the last ones smaller."""
        if not self.bounds:
            return True
        return self.bounds == chunk_bounds(self.shape[0], len(self.bounds) - 1)

    def describe(self) -> str:
        """Return what this rank holds, for messages."""
        whole = tuple(self.shape)
        if not self.is_held:
            return f"{self.name}: this rank holds nothing of {whole}, which is in stage {self.stages[0]}"
        stage = f", in stage {self.stages[0]} of a pipeline" if self.stages else ""
        return f"{self.name}: this rank holds {self.local_shape} of {whole}{stage}"

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, which shares its memory; none on the ranks of other stages."""
        return whole[self.slices] if self.is_held else whole.new_empty(self.local_shape)


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter of a network with its placement."""

    name: str
    """In the network."""
    parameter: nn.Parameter
    """The user's object; holds this rank's part once it is in place."""
    placement: Placement
    fusion_id: int | None = None
    """Of `set_comm_fusion`; None: fused by size."""

    @property
    def part(self) -> Tensor:
        """This rank's part as a plain tensor that shares the parameter's memory."""
        return plain(self.parameter)

    @property
    def sent_numel(self) -> int:
        """Elements of this rank's part in messages; of the whole before it is cut."""
        placed = self.placement
        return placed.sent_numel if placed.bounds and placed.shard_axes else self.part.numel()


placements: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> its placement"""


def placement_of(parameter: Tensor) -> Placement | None:
    """Return a parameter's placement, or that of a copy of a cut one; None before AutoParallel placed it."""
    own: Placement | None = getattr(parameter, "placement", None)
    if own is not None:
        return own
    found: Placement | None = placements.get(parameter)
    return found


def find_stages(parameter: Tensor) -> tuple[int, ...]:
    """Return the stages of a pipeline that hold a parameter; () when every rank does."""
    placed = placement_of(parameter)
    return () if placed is None else placed.stages


def is_held(parameter: Tensor) -> bool:
    """Return False when a parameter is empty here because other stages of a pipeline hold it."""
    placed = placement_of(parameter)
    if placed is None or not placed.stages:
        return True
    if placed.world_size != world.get_group_size():
        raise ParallelError(
            f"a parameter of shape {placed.shape} is in stage {placed.stages[0]} of a pipeline, but this process has "
            "left its world: call save_checkpoint and load_checkpoint before release()"
        )
    return placed.is_held
