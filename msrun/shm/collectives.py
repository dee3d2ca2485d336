"""The collectives, each as what a rank writes into its slots and what it takes out of the others', step by step.

A message longer than a slot takes several steps. Every rank reads all that it needs (`Exchange`), but for long sums
that all ranks need (`LongSum`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.shm.segment import NOTE, SLOT_BYTES, Segment

_ReduceOp: Any = dist.ReduceOp.RedOpType
_STEPS: dict[Any, Callable[..., Tensor]] = {
    _ReduceOp.SUM: torch.add,
    _ReduceOp.AVG: torch.add,
    _ReduceOp.PREMUL_SUM: torch.add,
    _ReduceOp.PRODUCT: torch.mul,
    _ReduceOp.MIN: torch.minimum,
    _ReduceOp.MAX: torch.maximum,
    _ReduceOp.BAND: torch.bitwise_and,
    _ReduceOp.BOR: torch.bitwise_or,
    _ReduceOp.BXOR: torch.bitwise_xor,
}
_found: dict[tuple[int, torch.dtype], Reduction] = {}
_NARROW = (torch.bfloat16, torch.float16)


def op_of(opts: Any) -> Any:
    """Return the reduce operation that torch's options name, or that stands in their place; by default the sum."""
    return getattr(opts, "reduceOp", opts if opts is not None else _ReduceOp.SUM)


def kind_of(op: Any) -> Any:
    """Return which operation it is, without a factor."""
    return getattr(op, "op", op)


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """Return what torch's operation means for numbers of a type."""
    key = int(kind_of(op)), dtype
    found = _found.get(key)
    if found is None:
        found = Reduction(op, dtype)
        if found.factor is None:
            _found[key] = found
    return found


class Reduction:
    """One of torch's reduce operations."""

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        kind = kind_of(op)
        self.number = int(kind)
        self._is_mean = kind == _ReduceOp.AVG
        self._step = _STEPS[kind]
        self.factor = op.__getstate__()[1] if kind == _ReduceOp.PREMUL_SUM else None
        """What each rank's numbers are multiplied with before."""
        self.is_narrow = dtype in _NARROW and self._step in (torch.add, torch.mul)
        """Whether it is computed in float32 and rounded once."""
        if self._step in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor) and dtype.is_floating_point:
            raise ValueError(f"{kind.name} works on integers and booleans, not on {dtype}")
        if dtype.is_complex and self._step in (torch.minimum, torch.maximum):
            raise ValueError(f"{kind.name} has no sense for {dtype}")

    def prepare(self, value: Tensor) -> Tensor:
        """Return what a rank contributes."""
        return value if self.factor is None else value * self.factor

    def reduce(self, parts: Sequence[Tensor], result: Tensor) -> None:
        """Write the reduction of the ranks' parts; 16-bit sums are rounded once, at the end."""
        total = parts[0].float() if self.is_narrow else result
        if len(parts) == 1:
            total.copy_(parts[0])
        elif self.is_narrow:
            for part in parts[1:]:
                self._step(total, part, out=total)
        else:
            self._step(parts[0], parts[1], out=total)
            for part in parts[2:]:
                self._step(total, part, out=total)
        self._divide(total, len(parts))
        if total is not result:
            result.copy_(total)

    def reduce_next(self, total: Tensor, rank: int, part: Tensor, ranks: int) -> None:
        """Bring a rank's part into the reduction of those before it; the same bits as `reduce`, but for narrow sums."""
        if rank:
            self._step(total, part, out=total)
        else:
            total.copy_(part)
        if rank == ranks - 1:
            self._divide(total, ranks)

    def _divide(self, total: Tensor, ranks: int) -> None:
        """Make a sum a mean, where that was asked for."""
        if not self._is_mean:
            return
        if total.dtype.is_floating_point or total.dtype.is_complex:
            total /= ranks
        else:
            total.copy_(torch.div(total, ranks, rounding_mode="trunc"))


NAMES = (
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "all_to_all", "reduce_scatter", "scatter"
)  # fmt: skip
_TYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_TYPES)}
_REDUCTION = 1 << 16
"""Numbers of types are below it, those of reductions above"""
_SHORT_BYTES = 64 << 10
"""Most that every rank adds up whole."""
_ALIGNED = 64
"""Numbers: parts begin at multiples of it."""
Rows = Tensor | Sequence[Tensor]
"""A tensor for each rank: [rank, count], or one after the other where they differ in size."""


class Collective:
    """One operation of all ranks of a group; by itself a barrier.

    Args:
        name: one of `NAMES`.
        count: numbers of the whole message, equal on all ranks.
        steps: how often slots are written.
        root: the rank that gives, or takes, alone.
        gives_alone: only the root writes; else only the root reads, if there is one.
    """

    is_settled = True
    """False until the number of steps is known."""
    in_turn = False
    """Whether each rank writes after the rank before it has."""

    def __init__(
        self,
        segment: Segment,
        name: str,
        dtype: torch.dtype = torch.uint8,
        count: int = 0,
        steps: int = 1,
        *,
        op: Reduction | None = None,
        root: int | None = None,
        gives_alone: bool = False,
    ) -> None:
        self.segment, self.dtype, self.root, self.gives_alone = segment, dtype, root, gives_alone
        self.steps = max(1, steps)
        kind = _TYPE_NUMBERS[dtype] + (op.number * _REDUCTION if op is not None else 0)
        self.note = NOTE.pack(NAMES.index(name), count, kind, -1 if root is None else root)
        """What all ranks must agree on: operation, numbers, their type and how they are reduced, root."""
        self.first = 0
        """Number of the first step, in all that the group does."""
        self.posted = self.taken = 0
        is_root = root == segment.rank
        self.reads = root is None or is_root is not gives_alone
        """Whether this rank needs what others write."""
        self.writes = root is None or is_root is gives_alone
        """Whether others need what this rank writes."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is over."""
        return self.taken == self.steps and self.is_settled

    def can_put(self, step: int) -> bool:  # noqa: ARG002
        """Return whether this rank has taken what a step is made of."""
        return True

    def put(self, step: int, slot: int) -> None:
        """Write this rank's part of a step."""

    def take(self, step: int, slot: int) -> None:
        """Read what this rank needs of a step."""

    def describe(self) -> str:
        """Return what to call it."""
        return describe(self.note, self.segment.size)


def describe(note: bytes, size: int) -> str:
    """Return what to call the operation of a note."""
    name, count, kind, root = NOTE.unpack(note)
    if not 0 <= name < len(NAMES):
        return "another operation"
    dtype = str(_TYPES[kind % _REDUCTION]).removeprefix("torch.")
    return (
        f"{NAMES[name]} of {size} ranks{f', root {root}' if root >= 0 else ''}{f', {count} x {dtype}' if count else ''}"
    )


class Exchange(Collective):
    """Gives each rank what is for it of every rank's tensors, or of the root's: as it is, or reduced.

    Args:
        values: what this rank writes, for each rank or one for all; empty: nothing.
        results: what it reads, from each rank that writes, or one reduction; empty: nothing.
        longest: numbers of the longest value.
        per_rank: whether there is a value for each rank.
        is_even: all values of all ranks have one size; else the first step tells how many there are.
    """

    def __init__(
        self,
        segment: Segment,
        name: str,
        values: Rows,
        results: Rows,
        dtype: torch.dtype,
        count: int,
        longest: int,
        *,
        per_rank: bool = False,
        is_even: bool = True,
        op: Reduction | None = None,
        root: int | None = None,
        gives_alone: bool = False,
    ) -> None:
        self._length = SLOT_BYTES // (segment.size if per_rank else 1) // dtype.itemsize
        steps = -(-longest // self._length)
        super().__init__(segment, name, dtype, count, steps, op=op, root=root, gives_alone=gives_alone)
        self._is_even = is_even
        if not is_even:
            self.is_settled, self._wanted, self.steps = False, steps, 1
        self._values, self._results, self._op = values, results, op
        self._begin = segment.rank * self._length if per_rank else 0
        self._sources: Sequence[int] = range(segment.size) if root is None or not gives_alone else (root,)

    def _piece(self, value: Tensor, step: int) -> Tensor:
        return value if self.steps == 1 else value[..., step * self._length : (step + 1) * self._length]

    def put(self, step: int, slot: int) -> None:
        segment, rank = self.segment, self.segment.rank
        if not self._is_even:
            if not step:
                segment.rows(slot, torch.int64, 0, 1)[rank][0] = self._wanted
                return
            step -= 1
        if isinstance(self._values, Tensor):
            piece = self._piece(self._values, step)
            piece = piece if self._op is None else self._op.prepare(piece)
            segment.own_rows(slot, self.dtype, self._length, piece.shape[1]).copy_(piece)
            return
        for column, value in enumerate(self._values):
            piece = self._piece(value, step)
            piece = piece if self._op is None else self._op.prepare(piece)
            segment.rows(slot, self.dtype, column * self._length, piece.numel())[rank].copy_(piece)

    def take(self, step: int, slot: int) -> None:
        segment, begin, results = self.segment, self._begin, self._results
        if not self._is_even:
            if not step:
                self.steps = 1 + int(segment.stack(slot, torch.int64, 0, 1).max())
                self.is_settled = True
                return
            step -= 1
        if self._op is not None and len(results):
            piece = self._piece(results[0], step)
            self._op.reduce(segment.rows(slot, self.dtype, begin, piece.numel()), piece)
        elif isinstance(results, Tensor):
            piece = self._piece(results, step)
            piece.copy_(segment.stack(slot, self.dtype, begin, piece.shape[1]))
        else:
            for source, result in zip(self._sources, results, strict=False):
                piece = self._piece(result, step)
                piece.copy_(segment.rows(slot, self.dtype, begin, piece.numel())[source])


class LongSum(Collective):
    """Reduces a long tensor for all ranks, in place.

    Where each rank has a core of its own, each reduces one part of a piece, and a second step gives the parts to all.
    Where ranks share cores, one after the other brings its numbers into one sum, which stays in the cache.
    """

    def __init__(self, segment: Segment, value: Tensor, op: Reduction) -> None:
        self._pieces = value.split(SLOT_BYTES // value.element_size())
        self.in_turn = segment.is_crowded and not op.is_narrow
        steps = len(self._pieces) * (1 if self.in_turn else 2)
        super().__init__(segment, "all_reduce", value.dtype, value.numel(), steps, op=op)
        self._op = op
        pieces = range(len(self._pieces) + 2)
        self._order = [at for k in pieces for at in ((k, False), (k - 2, True)) if 0 <= at[0] < len(self._pieces)]
        """In parts: the piece of each step, and whether it is reduced; the next two are under way meanwhile."""

    def can_put(self, step: int) -> bool:
        if self.in_turn:
            return True
        piece, is_reduced = self._order[step]
        return not is_reduced or self.taken > self._order.index((piece, False))

    def _own_part(self, piece: Tensor) -> tuple[int, Tensor]:
        size, rank = self.segment.size, self.segment.rank
        part = -(-piece.numel() // (size * _ALIGNED)) * _ALIGNED
        return part, piece[rank * part : (rank + 1) * part]

    def put(self, step: int, slot: int) -> None:
        segment, rank = self.segment, self.segment.rank
        if self.in_turn:
            piece = self._op.prepare(self._pieces[step])
            total = segment.rows(slot, self.dtype, 0, piece.numel())[0]
            self._op.reduce_next(total, rank, piece, segment.size)
            return
        number, is_reduced = self._order[step]
        piece = self._own_part(self._pieces[number])[1] if is_reduced else self._op.prepare(self._pieces[number])
        segment.rows(slot, self.dtype, 0, piece.numel())[rank].copy_(piece)

    def take(self, step: int, slot: int) -> None:
        segment, dtype = self.segment, self.dtype
        if self.in_turn:
            piece = self._pieces[step]
            piece.copy_(segment.rows(slot, dtype, 0, piece.numel())[0])
            return
        number, is_reduced = self._order[step]
        piece = self._pieces[number]
        part, own = self._own_part(piece)
        if is_reduced:
            full, rest = divmod(piece.numel(), part)
            piece[: full * part].view(full, part).copy_(segment.stack(slot, dtype, 0, part)[:full])
            if rest:
                piece[full * part :].copy_(segment.rows(slot, dtype, 0, rest)[full])
        elif own.numel():
            self._op.reduce(segment.rows(slot, dtype, segment.rank * part, own.numel()), own)


def _longest(rows: Rows) -> int:
    return rows.shape[-1] if isinstance(rows, Tensor) else max(map(Tensor.numel, rows), default=0)


def all_reduce(segment: Segment, value: Tensor, op: Reduction, root: int | None = None) -> Collective:
    """Reduce a tensor in place; for the root alone, if there is one."""
    if root is None and segment.size > 2 and value.nbytes > _SHORT_BYTES:
        return LongSum(segment, value, op)
    name, results = "all_reduce" if root is None else "reduce", [value] if root in (None, segment.rank) else []
    count = value.numel()
    return Exchange(segment, name, [value], results, value.dtype, count, count, op=op, root=root)


def broadcast(segment: Segment, value: Tensor, root: int) -> Collective:
    """Give the root's tensor to all."""
    values, results = ([value], []) if segment.rank == root else ([], [value])
    count = value.numel()
    return Exchange(segment, "broadcast", values, results, value.dtype, count, count, root=root, gives_alone=True)


def all_gather(segment: Segment, results: Rows | None, value: Tensor, root: int | None = None) -> Collective:
    """Give every rank's tensor to all, or to the root, whatever their sizes; without results this rank reads none."""
    name, into = "all_gather" if root is None else "gather", [] if results is None else results
    if root is not None or results is None:
        count = value.numel() * segment.size
    else:
        count = results.numel() if isinstance(results, Tensor) else sum(map(Tensor.numel, results))
    longest = max(value.numel(), _longest(into))
    return Exchange(segment, name, [value], into, value.dtype, count, longest, root=root)


def scatter(segment: Segment, result: Tensor, values: Rows | None, root: int) -> Collective:
    """Give each rank its tensor of the root's; all have one size."""
    count, longest, given = result.numel() * segment.size, result.numel(), [] if values is None else values
    return Exchange(
        segment, "scatter", given, [result], result.dtype, count, longest, per_rank=True, root=root, gives_alone=True
    )


def all_to_all(segment: Segment, results: Rows, values: Rows, *, is_even: bool) -> Collective:
    """Give each rank its tensor of every rank's."""
    count = values[0].numel() * segment.size if is_even else 0
    longest, dtype = max(_longest(values), _longest(results)), values[0].dtype
    return Exchange(segment, "all_to_all", values, results, dtype, count, longest, per_rank=True, is_even=is_even)


def reduce_scatter(segment: Segment, result: Tensor, values: Rows, op: Reduction) -> Collective:
    """Give each rank the reduction of its tensor of every rank's."""
    count = values[0].numel() * segment.size
    longest = _longest(values)
    return Exchange(segment, "reduce_scatter", values, [result], result.dtype, count, longest, per_rank=True, op=op)
