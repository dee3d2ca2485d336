"""How the parts of several ranks become one: in rank order, so that all ranks and all runs get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
