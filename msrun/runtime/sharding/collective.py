"""Collective: one of a partitioned graph, as data; `execute/transfers.py` runs it.

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
    ring            all-to-all       all-to-all         keys and values passed round inside an attention
    to_host         copy to host     copy to device     between the memories of one rank, over no axes
    to_device       copy to device   copy to host
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msrun.runtime.sharding.halo import Window
from msrun.runtime.sharding.layout import Axes

Kind = Literal[
    "all_reduce",
    "enter",
    "gather",
    "gather_enter",
    "slice",
    "reduce_scatter",
    "exchange",
    "halo",
    "ring",
    "to_host",
    "to_device",
]


@dataclass(frozen=True)
class Ring:
    """What attention passes round while it computes: the keys and values of one rank after the other."""

    heads: int
    """Of the queries on one rank."""
    width: int
    """Of a query and a key."""
    key_heads: int
    value_width: int
    is_balanced: bool
    """Causal: every rank computes for rows of the beginning and of the end, which are exchanged first."""

    def elements(self, sent: int, ranks: int, *, is_gradient: bool, gradient_bytes: int) -> int:
        """Return the elements that a rank sends, of the type of the keys.

        Args:
            sent: elements of its keys and values.
            gradient_bytes: size of an element of the gradients that travel, divided by that of a key.
        """
        rows = sent // (self.key_heads * (self.width + self.value_width))
        query, result = rows * self.heads * self.width, rows * self.heads * self.value_width
        to_balance = 0 if not self.is_balanced else query + sent + result
        if not is_gradient:
            return (ranks - 1) * sent + to_balance
        delta = rows * self.heads * gradient_bytes if self.is_balanced else 0
        return (ranks - 1) * sent + ranks * sent * gradient_bytes + to_balance + delta


@dataclass(frozen=True)
class Collective:
    """One collective of a partitioned graph."""

    kind: Kind
    axes: Axes
    dim: int = 0
    from_dim: int = 0
    window: Window | None = None
    """What each rank reads; of a halo."""
    ring: Ring | None = None

    def __str__(self) -> str:
        if self.is_copy:
            return self.kind
        where = "" if self.kind in ("all_reduce", "enter") else f" dim {self.dim}"
        if self.kind == "exchange":
            where = f" dim {self.from_dim} -> {self.dim}"
        if self.window is not None:
            where += f", {self.window.length} rows from {self.window.offset} every {self.window.step}"
        if self.ring is not None:
            where += f", the next keys and values travel while a block is computed{self._balanced}"
        return f"{self.kind}{where} over axes {','.join(map(str, self.axes))}"

    @property
    def _balanced(self) -> str:
        return ", causal work balanced" if self.ring is not None and self.ring.is_balanced else ""

    @property
    def is_copy(self) -> bool:
        """True when it moves between the memories of this rank alone."""
        return self.kind in ("to_host", "to_device")

    @property
    def is_local(self) -> bool:
        """True when nothing moves on the way forward."""
        return self.kind in ("enter", "slice")

    @property
    def moves_backward(self) -> bool:
        """True when data moves on the way back."""
        return self.kind not in ("all_reduce", "gather")
