"""Collectives: started now, waited for later, with their gradients, counted.

Every collective of a partitioned graph is one `Collective`: what it does to a value on the way forward and to the
gradient on the way back. The pairs follow from one convention: the gradient of a tensor has the tensor's own layout.

    kind            forward          backward
    all_reduce      all-reduce       -                  partial sums become the whole
    enter           -                all-reduce         copies are used for different parts of the work
    gather          all-gather       slice
    gather_enter    all-gather       reduce-scatter     gather, then enter
    slice           slice            all-gather
    reduce_scatter  reduce-scatter   all-gather         all_reduce, then slice
    exchange        all-to-all       all-to-all
    halo            all-to-all       all-to-all         borders of neighbours' parts; their gradients are added
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from msrun.runtime.graph.halo import Window, add_gradients, gradient_message, join_window, window_message
from msrun.runtime.graph.pending import Pending
from msrun.runtime.graph.transfers import (
    start_all_reduce,
    start_exchange,
    start_gather,
    start_halo,
    start_reduce_scatter,
)
from msrun.runtime.groups import axes_group
from msrun.runtime.layout import Axes, Mesh

Kind = Literal["all_reduce", "enter", "gather", "gather_enter", "slice", "reduce_scatter", "exchange", "halo"]


@dataclass(frozen=True)
class Collective:
    """One collective of a partitioned graph."""

    kind: Kind
    axes: Axes
    dim: int = 0
    from_dim: int = 0
    window: Window | None = None
    """What each rank reads; of a halo."""

    def __str__(self) -> str:
        where = "" if self.kind in ("all_reduce", "enter") else f" dim {self.dim}"
        if self.kind == "exchange":
            where = f" dim {self.from_dim} -> {self.dim}"
        if self.window is not None:
            where += f", {self.window.length} rows from {self.window.offset} every {self.window.step}"
        return f"{self.kind}{where} over axes {','.join(map(str, self.axes))}"

    @property
    def is_local(self) -> bool:
        """True when nothing moves on the way forward."""
        return self.kind in ("enter", "slice")

    @property
    def moves_backward(self) -> bool:
        """True when data moves on the way back."""
        return self.kind not in ("all_reduce", "gather")

    def start_forward(self, value: Tensor, mesh: Mesh, rank: int, *, in_place: bool = False) -> Pending:
        """Start what happens to a value.

        Args:
            in_place: nobody else reads it; an all-reduce may write to it.
        """
        group = axes_group(mesh, self.axes)
        match self.kind:
            case "all_reduce":
                return start_all_reduce(value, group, in_place=in_place)
            case "enter":
                return Pending(value)
            case "gather" | "gather_enter":
                return start_gather(value, group, self.dim)
            case "slice":
                return Pending(self._part(value, mesh, rank))
            case "reduce_scatter":
                return start_reduce_scatter(value, group, self.dim)
            case "exchange":
                return start_exchange(value, group, self.dim, self.from_dim)
            case "halo":
                place = self._place(mesh, rank)
                message = window_message(value, *place)
                return start_halo(message, group, lambda pieces: join_window(value, pieces, *place))

    def start_backward(self, grad: Tensor, mesh: Mesh, rank: int, *, in_place: bool = False) -> Pending:
        """Start what happens to the gradient of the result; gives the gradient of the value. `in_place`: see there."""
        group = axes_group(mesh, self.axes)
        match self.kind:
            case "all_reduce":
                return Pending(grad)
            case "enter":
                return start_all_reduce(grad, group, in_place=in_place)
            case "gather":
                return Pending(self._part(grad, mesh, rank))
            case "gather_enter":
                return start_reduce_scatter(grad, group, self.dim)
            case "slice" | "reduce_scatter":
                return start_gather(grad, group, self.dim)
            case "exchange":
                return start_exchange(grad, group, self.from_dim, self.dim)
            case "halo":
                place = self._place(mesh, rank)
                message = gradient_message(grad, *place)
                return start_halo(message, group, lambda pieces: add_gradients(grad, pieces, *place))

    def _place(self, mesh: Mesh, rank: int) -> tuple[int, Window, int, int]:
        """Return dimension, window, this rank's index and the number of parts."""
        assert self.window is not None
        return self.dim, self.window, mesh.index(rank, self.axes), mesh.extent(self.axes)

    def _part(self, value: Tensor, mesh: Mesh, rank: int) -> Tensor:
        length = value.shape[self.dim] // mesh.extent(self.axes)
        return value.narrow(self.dim, mesh.index(rank, self.axes) * length, length).contiguous()
