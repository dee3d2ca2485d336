"""The collectives, each as what a rank writes into its slots and what it takes out of the others', step by step.

A message longer than a slot takes several steps. Short messages, and those of two ranks, are read whole by every rank;
of long ones that are reduced and needed by all, each rank adds up one part and the others take it from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msrun.runtime.shm.reduction import Reduction
from msrun.runtime.shm.segment import SLOT_BYTES, Segment

NAMES = (
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "all_to_all", "reduce_scatter", "scatter"
)  # fmt: skip
_TYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_REDUCTION = 1 << 16
"""Numbers of types are below it, those of reductions above"""
_SHORT_BYTES = 16 << 10
"""Most that every rank adds up whole."""


class Collective:
    """One operation of all ranks of a group."""

    name = "collective"
    root: int | None = None
    """The rank that gives, or takes, alone."""
    gives_alone = False
    """Only the root writes; else only the root reads, if there is one."""
    is_settled = True
    """False until the number of steps is known."""

    def __init__(self, segment: Segment, dtype: torch.dtype, count: int, steps: int) -> None:
        """
        Args:
            count: numbers of the whole message, equal on all ranks.
        """
        self.segment = segment
        self.slots = segment.slots(dtype)
        self.steps = max(1, steps)
        self.dtype = dtype
        self.note = (NAMES.index(self.name), count, _TYPES.index(dtype), -1 if self.root is None else self.root)
        """What all ranks must agree on: operation, numbers, their type and how they are reduced, root."""
        self.first = 0
        """Number of the first step, in all that the group does."""
        self.posted = self.added = self.taken = 0

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is over."""
        return self.is_settled and self.taken == self.steps

    @property
    def reads(self) -> bool:
        """Whether this rank needs what others write."""
        return self.root is None or (self.root != self.segment.rank) is self.gives_alone

    @property
    def writes(self) -> bool:
        """Whether others need what this rank writes."""
        return self.root is None or (self.root == self.segment.rank) is self.gives_alone

    def adds_up(self, step: int) -> bool:  # noqa: ARG002
        """Return whether each rank reduces a part of this step for all."""
        return False

    def put(self, step: int, slot: int) -> None:
        """Write this rank's part of a step."""

    def add_up(self, step: int, slot: int) -> None:
        """Reduce this rank's part of a step."""

    def take(self, step: int, slot: int) -> None:
        """Read what this rank needs of a step."""

    def describe(self) -> str:
        """Return what to call it."""
        return describe(self.note, self.segment.size)


def describe(note: Sequence[int], size: int) -> str:
    """Return what to call the operation of a note."""
    name, count, kind, root = note
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
        self.root = root
        if root is not None:
            self.name = "reduce"
        self._length = SLOT_BYTES // value.element_size()
        super().__init__(segment, value.dtype, value.numel(), -(-value.numel() // self._length))
        self.note = (*self.note[:2], self.note[2] + op.number * _REDUCTION, self.note[3])
        self._value, self._op = value, op

    def _span(self, step: int) -> tuple[int, int]:
        begin = step * self._length
        return begin, min(begin + self._length, self._value.numel())

    def adds_up(self, step: int) -> bool:
        begin, end = self._span(step)
        is_long = (end - begin) * self._value.element_size() > _SHORT_BYTES
        return self.root is None and is_long and self.segment.size > 2

    def put(self, step: int, slot: int) -> None:
        begin, end = self._span(step)
        self.slots[self.segment.rank][slot][: end - begin].copy_(self._op.prepare(self._value[begin:end]))

    def _parts(self, count: int) -> list[int]:
        """Return where the parts of the ranks begin, and the end."""
        return [count * rank // self.segment.size for rank in range(self.segment.size + 1)]

    def add_up(self, step: int, slot: int) -> None:
        begin, end = self._span(step)
        rank = self.segment.rank
        low, high = self._parts(end - begin)[rank : rank + 2]
        result = self._value[begin + low : begin + high]
        self._op.reduce([self.slots[other][slot][low:high] for other in range(self.segment.size)], result)
        self.slots[rank][slot][low:high].copy_(result)

    def take(self, step: int, slot: int) -> None:
        if not self.reads:
            return
        begin, end = self._span(step)
        given = [self.slots[other][slot] for other in range(self.segment.size)]
        if not self.adds_up(step):
            self._op.reduce([part[: end - begin] for part in given], self._value[begin:end])
            return
        bounds = self._parts(end - begin)
        for other in range(self.segment.size):
            if other != self.segment.rank:
                low, high = bounds[other], bounds[other + 1]
                self._value[begin + low : begin + high].copy_(given[other][low:high])


class Broadcast(Collective):
    """Gives the root's tensor to all."""

    name = "broadcast"
    gives_alone = True

    def __init__(self, segment: Segment, value: Tensor, root: int) -> None:
        self.root = root
        self._length = SLOT_BYTES // value.element_size()
        super().__init__(segment, value.dtype, value.numel(), -(-value.numel() // self._length))
        self._value = value

    def put(self, step: int, slot: int) -> None:
        if self.writes:
            part = self._value[step * self._length : (step + 1) * self._length]
            self.slots[self.segment.rank][slot][: len(part)].copy_(part)

    def take(self, step: int, slot: int) -> None:
        if self.reads:
            part = self._value[step * self._length : (step + 1) * self._length]
            assert self.root is not None
            part.copy_(self.slots[self.root][slot][: len(part)])


class AllGather(Collective):
    """Gives every rank's tensor to all, or to the root; they may differ in size."""

    name = "all_gather"

    def __init__(
        self, segment: Segment, results: Sequence[Tensor] | None, value: Tensor, root: int | None = None
    ) -> None:
        """
        Args:
            results: per rank; None where this rank reads nothing.
        """
        self.root = root
        if root is not None:
            self.name = "gather"
        self._length = SLOT_BYTES // value.element_size()
        longest = max([value.numel(), *(len(result) for result in results or ())])
        count = value.numel() * segment.size if root is not None else sum(len(result) for result in results or ())
        super().__init__(segment, value.dtype, count, -(-longest // self._length))
        self._value, self._results = value, results

    def put(self, step: int, slot: int) -> None:
        part = self._value[step * self._length : (step + 1) * self._length]
        self.slots[self.segment.rank][slot][: len(part)].copy_(part)

    def take(self, step: int, slot: int) -> None:
        for rank, result in enumerate(self._results or ()):
            part = result[step * self._length : (step + 1) * self._length]
            part.copy_(self.slots[rank][slot][: len(part)])


class Exchange(Collective):
    """Gives each rank its piece of every rank's tensors: all of them (all-to-all), their reduction (reduce-scatter)."""

    name = "all_to_all"

    def __init__(
        self,
        segment: Segment,
        results: Sequence[Tensor],
        values: Sequence[Tensor],
        op: Reduction | None = None,
        *,
        is_even: bool = True,
    ) -> None:
        """
        Args:
            results: per rank what it sends here; for a reduction one.
            values: per rank what it gets from here.
            op: how what arrives is reduced; None: not at all.
            is_even: all pieces of all ranks have one size; else the first step tells how many there are.
        """
        size, self._is_even = segment.size, is_even
        if op is not None:
            self.name = "reduce_scatter"
        self._length = SLOT_BYTES // size // values[0].element_size()
        longest = max(len(piece) for piece in (*values, *results))
        steps = -(-longest // self._length)
        count = len(values[0]) * size if is_even else 0
        super().__init__(segment, values[0].dtype, count, steps)
        if op is not None:
            self.note = (*self.note[:2], self.note[2] + op.number * _REDUCTION, self.note[3])
        if not is_even:
            self.is_settled, self._wanted, self.steps = False, steps, 1
            self._counts = segment.slots(torch.int64)
        self._values, self._results, self._op = values, results, op

    def _piece(self, piece: Tensor, step: int) -> Tensor:
        number = step if self._is_even else step - 1
        return piece[number * self._length : (number + 1) * self._length]

    def put(self, step: int, slot: int) -> None:
        rank = self.segment.rank
        if not self._is_even and not step:
            self._counts[rank][slot][0] = self._wanted
            return
        for other, value in enumerate(self._values):
            part = self._piece(value, step)
            part = part if self._op is None else self._op.prepare(part)
            self.slots[rank][slot][other * self._length : other * self._length + len(part)].copy_(part)

    def take(self, step: int, slot: int) -> None:
        ranks, begin = range(self.segment.size), self.segment.rank * self._length
        if not self._is_even and not step:
            self.steps = 1 + max(int(self._counts[rank][slot][0]) for rank in ranks)
            self.is_settled = True
            return
        if self._op is not None:
            result = self._piece(self._results[0], step)
            self._op.reduce([self.slots[rank][slot][begin : begin + len(result)] for rank in ranks], result)
            return
        for rank, given in enumerate(self._results):
            result = self._piece(given, step)
            result.copy_(self.slots[rank][slot][begin : begin + len(result)])


class Scatter(Collective):
    """Gives each rank its tensor of the root's; all have one size."""

    name = "scatter"
    gives_alone = True

    def __init__(self, segment: Segment, result: Tensor, values: Sequence[Tensor] | None, root: int) -> None:
        self.root = root
        self._length = SLOT_BYTES // segment.size // result.element_size()
        super().__init__(segment, result.dtype, result.numel() * segment.size, -(-result.numel() // self._length))
        self._result, self._values = result, values

    def put(self, step: int, slot: int) -> None:
        for other, value in enumerate(self._values or ()):
            part = value[step * self._length : (step + 1) * self._length]
            self.slots[self.segment.rank][slot][other * self._length : other * self._length + len(part)].copy_(part)

    def take(self, step: int, slot: int) -> None:
        part = self._result[step * self._length : (step + 1) * self._length]
        assert self.root is not None
        begin = self.segment.rank * self._length
        part.copy_(self.slots[self.root][slot][begin : begin + len(part)])
