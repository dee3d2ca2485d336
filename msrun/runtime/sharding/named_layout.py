"""Layout: the ranks as a matrix whose axes have names, and a tensor's dimensions cut along those names.

MindSpore's `mindspore.parallel.Layout`, with its checks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msrun.errors import LayoutTypeError, StrategyError, UsageError, near_miss
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout, build_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

WHOLE = "None"
"""The word for a dimension that is not cut."""
INTERLEAVED = "interleaved_parallel"
Cut = tuple[str, ...]
"""Names that cut one dimension, most significant first; none = whole."""


@dataclass(frozen=True)
class _Axis:
    """One axis of a device matrix among the ranks in their natural order."""

    size: int
    stride: int
    """Ranks between two neighbours along it."""


class Layout:
    """The ranks as a matrix with named axes; called with names, the layout of a tensor.

        layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
        layout("dp", ("sp", "mp"), "None")    # dimension 0 cut by dp, dimension 1 by sp and then mp, dimension 2 whole

    Args:
        device_matrix: sizes of the axes; their product is the number of ranks.
        alias_name: one name for each axis.
        rank_list: the ranks in the matrix's order, row by row; None = ascending. Any order that exchanges axes of the
            ranks' natural order is understood.

    Raises:
        LayoutTypeError: a wrong type (a TypeError too).
        StrategyError: a wrong length, a repeated, empty or unknown name, `"None"` as a name, a rank list that is not
            as long as the matrix is large or has ranks twice (a ValueError too).
    """

    def __init__(
        self, device_matrix: tuple[int, ...], alias_name: tuple[str, ...], rank_list: list[int] | None = None
    ) -> None:
        _check_matrix(device_matrix)
        _check_names(device_matrix, alias_name)
        self.device_matrix = device_matrix
        self.alias_name = alias_name
        self.rank_list = list(range(math.prod(device_matrix))) if rank_list is None else _check_ranks(rank_list)
        self.tensor_map: tuple[Cut, ...] | None = None
        """Names per dimension; None until the layout is called with names."""
        self._axes = self._find_axes()

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Layout:
        """Return the layout with the axes of torch's device mesh.

        Raises:
            StrategyError: the mesh has no `mesh_dim_names`.
        """
        if not mesh.mesh_dim_names:
            raise StrategyError("Layout.from_mesh: the device mesh has no names; make it with mesh_dim_names=(...)")
        return cls(tuple(mesh.shape), tuple(mesh.mesh_dim_names), mesh.mesh.flatten().tolist())

    def __call__(self, *tensor_map: str | tuple[str, ...]) -> Layout:
        """Return the layout of a tensor: for each dimension a name, several names, or "None"."""
        cuts = tuple(self._cut(entry) for entry in tensor_map)
        used = list(itertools.chain.from_iterable(cuts))
        twice = [name for name in used if used.count(name) > 1]
        if twice:
            raise StrategyError(f"Layout{tensor_map}: {twice[0]!r} cuts twice; an axis may be used once for a tensor")
        layout = Layout(self.device_matrix, self.alias_name, self.rank_list)
        layout.tensor_map = cuts
        return layout

    def _cut(self, entry: str | tuple[str, ...]) -> Cut:
        names = (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise LayoutTypeError(f"Layout(...)({entry!r}): give a name, a tuple of names or 'None' for each dimension")
        if names == (WHOLE,):
            return ()
        for name in names:
            if name not in self.alias_name:
                raise StrategyError(
                    f"Layout(...)({entry!r}): there is no axis {name!r}{near_miss(name, self.alias_name)}; "
                    f"the axes are {', '.join(self.alias_name)}, and 'None' for a dimension that stays whole"
                )
        return names

    # -- as ranks -----------------------------------------------------------------------------------------------

    def _find_axes(self) -> dict[str, _Axis]:
        """Return every axis with its stride among the ranks.

        Raises:
            StrategyError: the rank list is no exchange of axes.
        """
        first = min(self.rank_list)
        if len(self.rank_list) != math.prod(self.device_matrix):
            raise StrategyError(
                f"Layout({self.device_matrix}): rank_list has {len(self.rank_list)} ranks and the matrix "
                f"{math.prod(self.device_matrix)} places; give one rank for each place"
            )
        axes = {}
        for index, (name, size) in enumerate(zip(self.alias_name, self.device_matrix, strict=True)):
            step = math.prod(self.device_matrix[index + 1 :])
            axes[name] = _Axis(size, abs(self.rank_list[step] - self.rank_list[0]) if size > 1 else 1)
        places = itertools.product(*(range(axis.size) for axis in axes.values()))
        strides = [axis.stride for axis in axes.values()]
        natural = [first + sum(i * s for i, s in zip(place, strides, strict=True)) for place in places]
        if natural != self.rank_list or sorted(natural) != list(range(first, first + len(natural))):
            raise StrategyError(
                f"Layout({self.device_matrix}): rank_list {self.rank_list} is no exchange of axes of neighbouring "
                "ranks; give ranks in an order such as that of a transposed matrix"
            )
        return axes

    @property
    def numbers(self) -> tuple[int, ...]:
        """MindSpore's tuple: parts per dimension; empty until the layout is called with names."""
        return tuple(math.prod(self._axes[name].size for name in cut) for cut in self.tensor_map or ())

    @property
    def strides(self) -> set[int]:
        """Numbers of neighbouring ranks at which an axis begins or ends."""
        return {n for axis in self._axes.values() for n in (axis.stride, axis.stride * axis.size)}

    def axes_of(self, name: str, mesh: Mesh) -> Axes:
        """Return the axes of a mesh that make up a named axis."""
        axis = self._axes[name]
        return tuple(a for a in mesh.axes if axis.stride <= mesh.stride(a) < axis.stride * axis.size)

    def resolve(self, mesh: Mesh) -> TensorLayout:
        """Return the tensor's layout on a mesh that has the axes of the matrix.

        Raises:
            StrategyError: the layout was not called with names.
        """
        if self.tensor_map is None:
            raise StrategyError(f"{self}: say which axes cut the tensor, e.g. layout({self.alias_name[0]!r}, 'None')")
        return TensorLayout(
            tuple(tuple(itertools.chain.from_iterable(self.axes_of(n, mesh) for n in cut)) for cut in self.tensor_map)
        )

    def names(self, layout: TensorLayout, mesh: Mesh) -> tuple[str, ...] | None:
        """Return a tensor's layout in the names of this matrix, e.g. ("dp", "sp+mp", "None"); None if they cannot."""
        words = []
        for axes in layout.split:
            rest, found = axes, []
            while rest:
                name = next((n for n in self.alias_name if (a := self.axes_of(n, mesh)) and rest[: len(a)] == a), None)
                if name is None:
                    return None
                found.append(name)
                rest = rest[len(self.axes_of(name, mesh)) :]
            words.append("+".join(found) or WHOLE)
        return tuple(words)

    # -- for torch ----------------------------------------------------------------------------------------------

    def placements(self) -> tuple[Placement, ...]:
        """Return torch's placements of the tensor, one for each axis of the device matrix.

        Raises:
            StrategyError: no tensor yet, or one dimension is cut by axes against the matrix's order, which torch's
                placements cannot say.
        """
        from torch.distributed.tensor.placement_types import Replicate, Shard

        if self.tensor_map is None:
            raise StrategyError(f"{self}: say which axes cut the tensor before asking for its placements")
        for cut in self.tensor_map:
            if [self.alias_name.index(name) for name in cut] != sorted(self.alias_name.index(name) for name in cut):
                raise StrategyError(
                    f"{self}: torch cuts a dimension in the order of the mesh, not by {cut}; name the axes in the "
                    f"order of {self.alias_name}"
                )
        dim_of = {name: dim for dim, cut in enumerate(self.tensor_map) for name in cut}
        return tuple(Shard(dim_of[name]) if name in dim_of else Replicate() for name in self.alias_name)

    # -- as a value ---------------------------------------------------------------------------------------------

    def _key(self) -> tuple[Any, ...]:
        return self.device_matrix, self.alias_name, tuple(self.rank_list), self.tensor_map

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        text = f"Layout({self.device_matrix}, {self.alias_name})"
        if self.tensor_map is None:
            return text
        entries = [cut[0] if len(cut) == 1 else cut or WHOLE for cut in self.tensor_map]
        return f"{text}({', '.join(map(repr, entries))})"


def choose_mesh(world_size: int, layouts: Iterable[Layout], first_rank: int = 0) -> Mesh:
    """Return the mesh that has the axes of every layout; without any, the prime factors of the world."""
    strides: set[int] = set()
    seen: list[Layout] = []
    for layout in dict.fromkeys(layouts):
        if len(layout.rank_list) != world_size:
            raise StrategyError(
                f"{layout}: the matrix has {len(layout.rank_list)} places for {world_size} ranks; "
                "the product of device_matrix must be the number of ranks"
            )
        for earlier in seen:
            _check_together(earlier, layout)
        seen.append(layout)
        strides |= layout.strides
    return build_mesh(world_size, first_rank, strides=strides)


def _check_together(left: Layout, right: Layout) -> None:
    chain = sorted(left.strides | right.strides)
    if any(outer % inner for inner, outer in itertools.pairwise(chain)):
        raise StrategyError(
            f"device matrices {left.device_matrix} {left.alias_name} and {right.device_matrix} {right.alias_name} cut "
            "the ranks at places that contradict each other; use one device matrix, or two whose axes divide each other"
        )


def _check_matrix(device_matrix: Any) -> None:
    if not isinstance(device_matrix, tuple) or not all(
        isinstance(size, int) and not isinstance(size, bool) for size in device_matrix
    ):
        raise LayoutTypeError(f"Layout(device_matrix={device_matrix!r}): must be a tuple of whole numbers")
    if not device_matrix or min(device_matrix) < 1:
        raise StrategyError(f"Layout(device_matrix={device_matrix!r}): needs one or more sizes, each above 0")


def _check_names(device_matrix: tuple[int, ...], alias_name: Any) -> None:
    if not isinstance(alias_name, tuple) or not all(isinstance(name, str) for name in alias_name):
        raise LayoutTypeError(f"Layout(alias_name={alias_name!r}): must be a tuple of words")
    if len(alias_name) != len(device_matrix):
        raise StrategyError(
            f"Layout: {len(alias_name)} names {alias_name} for {len(device_matrix)} axes {device_matrix}; "
            "give one name for each axis"
        )
    if len(set(alias_name)) != len(alias_name):
        raise StrategyError(f"Layout(alias_name={alias_name!r}): a name stands twice; each axis needs its own")
    wrong = [name for name in alias_name if name in ("", WHOLE)]
    if wrong:
        raise StrategyError(f"Layout(alias_name={alias_name!r}): {wrong[0]!r} is no name for an axis")
    if INTERLEAVED in alias_name:
        copies = device_matrix[alias_name.index(INTERLEAVED)]
        raise StrategyError(
            f"Layout: an axis {INTERLEAVED!r} cuts the batch into copies, not the ranks; "
            f"leave it out and use MicroBatchInterleaved(network, {copies})"
        )


def _check_ranks(rank_list: Any) -> list[int]:
    if not isinstance(rank_list, list) or not all(
        isinstance(rank, int) and not isinstance(rank, bool) for rank in rank_list
    ):
        raise LayoutTypeError(f"Layout(rank_list={rank_list!r}): must be a list of ranks")
    if not rank_list or len(set(rank_list)) != len(rank_list) or min(rank_list) < 0:
        raise StrategyError(f"Layout(rank_list={rank_list!r}): needs ranks of 0 or more, each once")
    return list(rank_list)


def gathered_layouts(
    what: str, given: Sequence[Any] | None, transposed: Sequence[Any]
) -> tuple[tuple[Layout, ...], tuple[Layout]]:
    """Return how a product is computed whose inputs are cut more than it can be, and how its result is left.

    2D: (rows, (x, y)) with (x, y); 3D: ((z, y), x) with ((x, z), y). Axes that cut both inputs' common dimension stay
    there, those of the result's columns and the others are gathered first; the sum over the common axes is scattered
    over the columns in 2D and the rows in 3D.

    Args:
        what: names the product in errors.
        given: two Layouts.
        transposed: whether each of the inputs is.
    """
    layouts = tuple(given or ())
    maps = [list(one.tensor_map) for one in layouts if isinstance(one, Layout) and one.tensor_map]
    if len(maps) != 2:
        raise UsageError(f"{what}: give shard two Layouts, called with names")
    left, right = ([-1, -2] if is_transposed else [-2, -1] for is_transposed in transposed)
    rows, inner = (maps[0][place] for place in left)
    weight, columns = (maps[1][place] for place in right)
    shared = tuple(axis for axis in inner if axis in weight)
    if not shared:
        raise UsageError(f"{what}: no axis cuts the dimension that both inputs have, {inner} and {weight}")
    kept = tuple(axis for axis in rows if axis not in columns)
    result = (kept, columns + shared) if inner != shared else (kept + shared, columns)
    maps[0][left[0]], maps[0][left[1]], maps[1][right[0]] = kept, shared, shared
    made = [layouts[index](*(cut or "None" for cut in cuts)) for index, cuts in enumerate(maps)]
    return tuple(made), (layouts[0](*(cut or "None" for cut in (*maps[0][:-2], *result))),)
