"""Communication between ranks that is written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.ops.table import Primitive

__all__ = ["AllGather", "AllReduce", "Broadcast", "ReduceOp", "ReduceScatter"]

WORLD_GROUPS = (None, "", "hccl_world_group", "nccl_world_group", "mccl_world_group")
"""Names of the group of all ranks."""


class ReduceOp:
    """What AllReduce and ReduceScatter do with the ranks' values."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class _Collective(Primitive):
    """Communication between the ranks of a group, for parts that are cut by hand."""

    def shard(self, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None) -> Self:
        """Refuse: what travels is what the operator says.

        Raises:
            UsageError: always.
        """
        del in_strategy, out_strategy
        raise UsageError(f"{self.name}.shard: communication written by hand has no strategy; shard operators")


class AllReduce(_Collective):
    """The sum (or another ReduceOp) of the ranks' tensors, on every rank."""

    settings = ("op", "group")

    @staticmethod
    def function(input_x: Any, op: str = ReduceOp.SUM, group: str | None = None) -> Any:
        """Return the reduced tensor."""
        return runtime.all_reduce(input_x, op, _group(group))


class AllGather(_Collective):
    """The ranks' tensors, joined along dimension 0, on every rank."""

    settings = ("group",)

    @staticmethod
    def function(input_x: Any, group: str | None = None) -> Any:
        """Return the joined tensor."""
        return runtime.all_gather(input_x, group=_group(group))


class ReduceScatter(_Collective):
    """The sum of the ranks' tensors, of which each rank gets its part of dimension 0."""

    settings = ("op", "group")

    @staticmethod
    def function(input_x: Any, op: str = ReduceOp.SUM, group: str | None = None) -> Any:
        """Return this rank's part."""
        return runtime.reduce_scatter(input_x, op, group=_group(group))


class Broadcast(_Collective):
    """The tensors of one rank, on every rank: takes and returns a tuple."""

    settings = ("root_rank", "group")

    @staticmethod
    def function(inputs: Any, root_rank: int, group: str | None = None) -> Any:
        """Return the tensors of the root."""
        return tuple(runtime.broadcast(one, root_rank, _group(group)) for one in inputs)


def _group(name: str | None) -> str | None:
    return None if name in WORLD_GROUPS else name
