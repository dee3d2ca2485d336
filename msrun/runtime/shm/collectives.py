"""The collectives, each as what a rank writes into its slots and what it takes out of the others', step by step.

A message longer than a slot takes several steps. Short messages, and those of two ranks, are read whole by every rank.
Long sums that all ranks need: where each rank has a core of its own, each adds up one part and the others take it from
there; where ranks share cores, one after the other adds its numbers to one sum, which stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msrun.runtime.shm.reduction import Reduction
from msrun.runtime.shm.segment import NOTE, SLOT_BYTES, Segment

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
    """One operation of all ranks of a group.

    Args:
        count: numbers of the whole message, equal on all ranks.
        steps: how often slots are written.
        root: the rank that gives, or takes, alone.
    """

    name = "collective"
    gives_alone = False
    """Only the root writes; else only the root reads, if there is one."""
    is_settled = True
    """False until the number of steps is known."""
    in_turn = False
    """Whether each rank writes after the rank before it has."""
    summed_steps = 0
    """So many of the first steps are reduced in parts: each rank one, for all."""

    def __init__(
        self,
        segment: Segment,
        dtype: torch.dtype,
        count: int,
        steps: int,
        op: Reduction | None = None,
        root: int | None = None,
    ) -> None:
        self.segment, self.dtype, self.root = segment, dtype, root
        self.steps = max(1, steps)
        kind = _TYPE_NUMBERS[dtype] + (op.number * _REDUCTION if op is not None else 0)
        self.note = NOTE.pack(NAMES.index(self.name), count, kind, -1 if root is None else root)
        """What all ranks must agree on: operation, numbers, their type and how they are reduced, root."""
        self.first = 0
        """Number of the first step, in all that the group does."""
        self.posted = self.added = self.taken = 0
        is_root = root == segment.rank
        self.reads = root is None or is_root is not self.gives_alone
        """Whether this rank needs what others write."""
        self.writes = root is None or is_root is self.gives_alone
        """Whether others need what this rank writes."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is over."""
        return self.taken == self.steps and self.is_settled

    def put(self, step: int, slot: int) -> None:
        """Write this rank's part of a step."""

    def add_up(self, step: int, slot: int) -> None:
        """Reduce this rank's part of a step."""

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


class Barrier(Collective):
    """Waits for all."""

    name = "barrier"

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment, torch.uint8, 0, 1)


class AllReduce(Collective):
    """Reduces a tensor in place; to the root alone, if there is one."""

    name = "all_reduce"

    def __init__(self, segment: Segment, value: Tensor, op: Reduction, root: int | None = None) -> None:
        if root is not None:
            self.name = "reduce"
        self._pieces = _cut(value)
        super().__init__(segment, value.dtype, value.numel(), len(self._pieces), op, root)
        self._op = op
        is_long = value.numel() * value.element_size() > _SHORT_BYTES
        if root is None and segment.size > 2 and is_long:
            self.in_turn = segment.is_crowded and not op.is_narrow
            self.summed_steps = 0 if self.in_turn else len(self._pieces)

    def put(self, step: int, slot: int) -> None:
        piece, rank = self._op.prepare(self._pieces[step]), self.segment.rank
        rows = self.segment.rows(slot, self.dtype, 0, piece.numel())
        if self.in_turn:
            self._op.reduce_next(rows[0], rank, piece, self.segment.size)
        else:
            rows[rank].copy_(piece)

    def _part(self, count: int) -> int:
        """Return how many numbers each rank adds up; the last ranks may have less."""
        return -(-count // (self.segment.size * _ALIGNED)) * _ALIGNED

    def add_up(self, step: int, slot: int) -> None:
        piece, rank = self._pieces[step], self.segment.rank
        part = self._part(piece.numel())
        result = piece[rank * part : (rank + 1) * part]
        if result.numel():
            rows = self.segment.rows(slot, self.dtype, rank * part, result.numel())
            self._op.reduce(rows, result)
            rows[rank].copy_(result)

    def take(self, step: int, slot: int) -> None:
        if not self.reads:
            return
        piece = self._pieces[step]
        count = piece.numel()
        if self.in_turn:
            piece.copy_(self.segment.rows(slot, self.dtype, 0, count)[0])
            return
        if step >= self.summed_steps:
            self._op.reduce(self.segment.rows(slot, self.dtype, 0, count), piece)
            return
        part = self._part(count)
        full, rest = divmod(count, part)
        piece[: full * part].view(full, part).copy_(self.segment.diagonal(slot, self.dtype, full, part))
        if rest:
            piece[full * part :].copy_(self.segment.rows(slot, self.dtype, full * part, rest)[full])


class Broadcast(Collective):
    """Gives the root's tensor to all."""

    name = "broadcast"
    gives_alone = True

    def __init__(self, segment: Segment, value: Tensor, root: int) -> None:
        self._pieces = _cut(value)
        super().__init__(segment, value.dtype, value.numel(), len(self._pieces), root=root)
        self._root = root

    def put(self, step: int, slot: int) -> None:
        if self.writes:
            piece = self._pieces[step]
            self.segment.rows(slot, self.dtype, 0, piece.numel())[self._root].copy_(piece)

    def take(self, step: int, slot: int) -> None:
        if self.reads:
            piece = self._pieces[step]
            piece.copy_(self.segment.rows(slot, self.dtype, 0, piece.numel())[self._root])


class AllGather(Collective):
    """Gives every rank's tensor to all, or to the root; they may differ in size.

    Args:
        results: None where this rank reads nothing.
    """

    name = "all_gather"

    def __init__(self, segment: Segment, results: Rows | None, value: Tensor, root: int | None = None) -> None:
        if root is not None:
            self.name = "gather"
        self._length = SLOT_BYTES // value.element_size()
        longest = value.numel() if results is None else max(value.numel(), _longest(results))
        count = value.numel() * segment.size if root is not None or results is None else _count(results)
        super().__init__(segment, value.dtype, count, -(-longest // self._length), root=root)
        self._value, self._results = value, results

    def put(self, step: int, slot: int) -> None:
        piece = self._value if self.steps == 1 else _piece(self._value, step, self._length)
        self.segment.rows(slot, self.dtype, 0, piece.numel())[self.segment.rank].copy_(piece)

    def take(self, step: int, slot: int) -> None:
        if self._results is not None:
            _take_rows(self.segment, self._results, step, self._length, slot, 0)


class Exchange(Collective):
    """Gives each rank its piece of every rank's tensors: all of them (all-to-all), or their reduction (reduce-scatter).

    Args:
        results: per rank what it sends here; for a reduction the one tensor.
        values: per rank what it gets from here.
        op: how what arrives is reduced; None: not at all.
        is_even: all pieces of all ranks have one size; else the first step tells how many there are.
    """

    name = "all_to_all"

    def __init__(
        self, segment: Segment, results: Rows, values: Rows, op: Reduction | None = None, *, is_even: bool = True
    ) -> None:
        if op is not None:
            self.name = "reduce_scatter"
        self._is_even, dtype = is_even, values[0].dtype
        self._length = SLOT_BYTES // segment.size // values[0].element_size()
        longest = _longest(values) if op is not None else max(_longest(values), _longest(results))
        steps = -(-longest // self._length)
        super().__init__(segment, dtype, values[0].numel() * segment.size if is_even else 0, steps, op)
        if not is_even:
            self.is_settled, self._wanted, self.steps = False, steps, 1
        self._values, self._results, self._op = values, results, op

    def put(self, step: int, slot: int) -> None:
        segment, rank = self.segment, self.segment.rank
        if not self._is_even:
            if not step:
                segment.rows(slot, torch.int64, 0, 1)[rank][0] = self._wanted
                return
            step -= 1
        if isinstance(self._values, Tensor):
            piece = _piece(self._values, step, self._length)
            piece = piece if self._op is None else self._op.prepare(piece)
            segment.own_rows(slot, self.dtype, self._length, piece.shape[1]).copy_(piece)
            return
        for other, value in enumerate(self._values):
            piece = _piece(value, step, self._length)
            piece = piece if self._op is None else self._op.prepare(piece)
            segment.rows(slot, self.dtype, other * self._length, piece.numel())[rank].copy_(piece)

    def take(self, step: int, slot: int) -> None:
        segment, begin = self.segment, self.segment.rank * self._length
        if not self._is_even:
            if not step:
                self.steps = 1 + int(segment.stack(slot, torch.int64, 0, 1).max())
                self.is_settled = True
                return
            step -= 1
        if self._op is None:
            _take_rows(segment, self._results, step, self._length, slot, begin)
        elif isinstance(self._results, Tensor):
            result = _piece(self._results, step, self._length)
            self._op.reduce(segment.rows(slot, self.dtype, begin, result.numel()), result)


class Scatter(Collective):
    """Gives each rank its tensor of the root's; all have one size."""

    name = "scatter"
    gives_alone = True

    def __init__(self, segment: Segment, result: Tensor, values: Sequence[Tensor] | None, root: int) -> None:
        self._length = SLOT_BYTES // segment.size // result.element_size()
        steps = -(-result.numel() // self._length)
        super().__init__(segment, result.dtype, result.numel() * segment.size, steps, root=root)
        self._result, self._values, self._root = result, values, root

    def put(self, step: int, slot: int) -> None:
        for other, value in enumerate(self._values or ()):
            piece = _piece(value, step, self._length)
            self.segment.rows(slot, self.dtype, other * self._length, piece.numel())[self._root].copy_(piece)

    def take(self, step: int, slot: int) -> None:
        piece, begin = _piece(self._result, step, self._length), self.segment.rank * self._length
        piece.copy_(self.segment.rows(slot, self.dtype, begin, piece.numel())[self._root])


def _cut(value: Tensor) -> Sequence[Tensor]:
    """Cut a flat tensor into pieces that fit into a slot."""
    length = SLOT_BYTES // value.element_size()
    return (value,) if value.numel() <= length else value.split(length)


def _piece(value: Tensor, step: int, length: int) -> Tensor:
    """Return the numbers of one step, of a flat tensor or of rows."""
    return value[..., step * length : (step + 1) * length]


def _longest(rows: Rows) -> int:
    return rows.shape[-1] if isinstance(rows, Tensor) else max(row.numel() for row in rows)


def _count(rows: Rows) -> int:
    return rows.numel() if isinstance(rows, Tensor) else sum(row.numel() for row in rows)


def _take_rows(segment: Segment, results: Rows, step: int, length: int, slot: int, begin: int) -> None:
    """Copy what every rank has written for this one."""
    if isinstance(results, Tensor):
        piece = _piece(results, step, length)
        piece.copy_(segment.stack(slot, piece.dtype, begin, piece.shape[1]))
        return
    for rank, result in enumerate(results):
        piece = _piece(result, step, length)
        piece.copy_(segment.rows(slot, piece.dtype, begin, piece.numel())[rank])
