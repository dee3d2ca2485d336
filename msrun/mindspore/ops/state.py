"""Operators that act on more than their result: on parameters in place, and between the ranks. The table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.ops.shapes import CHANGES, scatter_into
from msrun.mindspore.ops.table import Primitive, define_all, taking


def _scatter(change: str, is_nd: bool = False) -> Any:
    @torch.no_grad()
    def run(input_x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        return scatter_into(change)(input_x, indices if is_nd else indices.unsqueeze(-1), updates)

    return taking("input_x indices updates use_locking>=False", run)


@torch.no_grad()
def _adam_weight_decay(
    var: Tensor, m: Tensor, v: Tensor, lr: Any, beta1: Any, beta2: Any, epsilon: Any, decay: Any, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g g; w = w - lr (m / (sqrt(v) + eps) + decay w), all in place."""
    gradient = gradient.to(m.dtype)
    m.copy_(m * beta1 + gradient * (1 - beta1))
    v.copy_(v * beta2 + gradient * gradient * (1 - beta2))
    return var.sub_(lr * (m / (v.sqrt() + epsilon) + decay * var)), m, v


@torch.no_grad()
def _adam(
    var: Tensor, m: Tensor, v: Tensor, lr: Any, beta1: Any, beta2: Any, epsilon: Any, gradient: Tensor, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's step with epsilon where MindSpore has it; the powers are beta ** step."""
    rate = lr * (1 - settings["beta2_power"]) ** 0.5 / (1 - settings["beta1_power"])
    m.copy_(m * beta1 + gradient * (1 - beta1))
    v.copy_(v * beta2 + gradient * gradient * (1 - beta2))
    ahead = m * beta1 + gradient * (1 - beta1) if settings["use_nesterov"] else m
    return var.sub_(rate * ahead / (v.sqrt() + epsilon)), m, v


def _sparse_adam(is_lazy: bool) -> Any:
    @torch.no_grad()
    def run(
        var: Tensor, m: Tensor, v: Tensor, gradient: Tensor, indices: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adam's step of the rows that `indices` name, repeated ones summed; lazy: of these rows alone."""
        rows, place = torch.unique(indices.long(), return_inverse=True)
        summed = torch.zeros(len(rows), *gradient.shape[1:], dtype=gradient.dtype).index_add_(0, place, gradient)
        if not is_lazy:
            return _adam(var, m, v, gradient=torch.zeros_like(var).index_copy_(0, rows, summed), **settings)
        parts = _adam(var[rows], m[rows], v[rows], gradient=summed, **settings)
        for table, part in zip((var, m, v), parts, strict=True):
            table.index_copy_(0, rows, part)
        return var, m, v

    return taking(f"{_OF_ADAM} gradient indices {_SETTINGS}", run)


@torch.no_grad()
def _apply_momentum(
    variable: Tensor, accumulation: Tensor, learning_rate: Any, gradient: Tensor, momentum: Any, **settings: Any
) -> Tensor:
    """v = momentum v + g; w = w - lr v."""
    gradient = gradient * settings["gradient_scale"]
    accumulation.copy_(accumulation * momentum + gradient)
    ahead = gradient + accumulation * momentum if settings["use_nesterov"] else accumulation
    return variable.sub_(ahead * learning_rate)


_OF_ADAM = "var m v beta1_power beta2_power lr beta1 beta2 epsilon"
_SETTINGS = "use_locking>=False use_nesterov=False"
OPERATORS = define_all((
    ("Assign assign", torch.no_grad()(lambda variable, value: variable.copy_(torch.as_tensor(value)))),
    ("AssignAdd assign_add", torch.no_grad()(lambda variable, value: variable.add_(value))),
    ("AssignSub assign_sub", torch.no_grad()(lambda variable, value: variable.sub_(value))),
    *((f"Scatter{change.title()} scatter_{change}", _scatter(change), "use_locking")
      for change in ("update", *CHANGES)),
    *((f"ScatterNd{change.title()} scatter_nd_{change}", _scatter(change, is_nd=True), "use_locking")
      for change in ("update", "add", "sub")),
    ("AdamWeightDecay", taking("var m v lr beta1 beta2 epsilon decay gradient use_locking>=False", _adam_weight_decay),
     "use_locking"),
    ("Adam", taking(f"{_OF_ADAM} gradient {_SETTINGS}", _adam), "use_locking use_nesterov"),
    ("FusedSparseAdam", _sparse_adam(is_lazy=False), "use_locking use_nesterov"),
    ("FusedSparseLazyAdam", _sparse_adam(is_lazy=True), "use_locking use_nesterov"),
    ("ApplyMomentum", taking("variable accumulation learning_rate gradient momentum use_nesterov=False "
                             "use_locking>=False gradient_scale=1.0", _apply_momentum),
     "use_nesterov use_locking gradient_scale"),
))  # fmt: skip

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
        raise UsageError(f"{self.name}.shard: communication written by hand has no strategy; shard operators")


def _group(name: str | None) -> str | None:
    return None if name in WORLD_GROUPS else name


OPERATORS |= define_all((
    ("AllReduce", lambda input_x, op="sum", group=None: runtime.all_reduce(input_x, op, _group(group)), "op group",
     "The sum (or another ReduceOp) of the ranks' tensors, on every rank."),
    ("AllGather", lambda input_x, group=None: runtime.all_gather(input_x, group=_group(group)), "group",
     "The ranks' tensors, joined along dimension 0, on every rank."),
    ("ReduceScatter", lambda input_x, op="sum", group=None: runtime.reduce_scatter(input_x, op, group=_group(group)),
     "op group", "The sum of the ranks' tensors, of which each rank gets its part of dimension 0."),
    ("Broadcast", lambda inputs, root_rank, group=None: tuple(
        runtime.broadcast(one, root_rank, _group(group)) for one in inputs), "root_rank group",
     "The tensors of one rank, on every rank: takes and returns a tuple."),
), _Collective)  # fmt: skip
OPERATORS["ReduceOp"] = ReduceOp
