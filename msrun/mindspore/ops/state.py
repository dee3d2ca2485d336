"""Operators that change a parameter in place: assignment, scattered rows, and the steps of optimizers. The table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msrun.mindspore.ops.shapes import scatter_into
from msrun.mindspore.ops.table import define


@torch.no_grad()
def assign(variable: Tensor, value: Any) -> Tensor:
    """Give a parameter another value, and return the parameter."""
    return variable.copy_(torch.as_tensor(value))


@torch.no_grad()
def _assign_add(variable: Tensor, value: Any) -> Tensor:
    return variable.add_(value)


@torch.no_grad()
def _assign_sub(variable: Tensor, value: Any) -> Tensor:
    return variable.sub_(value)


def _scatter(change: str, is_nd: bool = False) -> Any:
    @torch.no_grad()
    def run(input_x: Tensor, indices: Tensor, updates: Tensor, use_locking: bool = False) -> Tensor:
        del use_locking
        return scatter_into(change)(input_x, indices if is_nd else indices.unsqueeze(-1), updates)

    return run


@torch.no_grad()
def _adam_weight_decay(
    var: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    decay: Any,
    gradient: Tensor,
    use_locking: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g g; w = w - lr (m / (sqrt(v) + eps) + decay w), all in place."""
    del use_locking
    gradient = gradient.to(m.dtype)
    m.copy_(m * beta1 + gradient * (1 - beta1))
    v.copy_(v * beta2 + gradient * gradient * (1 - beta2))
    return var.sub_(lr * (m / (v.sqrt() + epsilon) + decay * var)), m, v


@torch.no_grad()
def _adam(
    var: Tensor,
    m: Tensor,
    v: Tensor,
    beta1_power: Any,
    beta2_power: Any,
    lr: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    gradient: Tensor,
    use_locking: bool = False,
    use_nesterov: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's step with epsilon where MindSpore has it; the powers are beta ** step."""
    del use_locking
    rate = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    m.copy_(m * beta1 + gradient * (1 - beta1))
    v.copy_(v * beta2 + gradient * gradient * (1 - beta2))
    ahead = m * beta1 + gradient * (1 - beta1) if use_nesterov else m
    return var.sub_(rate * ahead / (v.sqrt() + epsilon)), m, v


def _sparse_adam(is_lazy: bool) -> Any:
    @torch.no_grad()
    def run(
        var: Tensor,
        m: Tensor,
        v: Tensor,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        gradient: Tensor,
        indices: Tensor,
        use_locking: bool = False,
        use_nesterov: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adam's step of the rows that `indices` name, repeated ones summed; lazy: of these rows alone."""
        del use_locking
        powers = (beta1_power, beta2_power, lr, beta1, beta2, epsilon)
        rows, place = torch.unique(indices.long(), return_inverse=True)
        summed = torch.zeros(len(rows), *gradient.shape[1:], dtype=gradient.dtype).index_add_(0, place, gradient)
        if not is_lazy:
            whole = torch.zeros_like(var).index_copy_(0, rows, summed)
            return _adam(var, m, v, *powers, whole, use_nesterov=use_nesterov)
        some, first, second = (table[rows] for table in (var, m, v))
        _adam(some, first, second, *powers, summed, use_nesterov=use_nesterov)
        for table, part in zip((var, m, v), (some, first, second), strict=True):
            table.index_copy_(0, rows, part)
        return var, m, v

    return run


@torch.no_grad()
def _apply_momentum(
    variable: Tensor,
    accumulation: Tensor,
    learning_rate: Any,
    gradient: Tensor,
    momentum: Any,
    use_nesterov: bool = False,
    use_locking: bool = False,
    gradient_scale: float = 1.0,
) -> Tensor:
    """v = momentum v + g; w = w - lr v."""
    del use_locking
    gradient = gradient * gradient_scale
    accumulation.copy_(accumulation * momentum + gradient)
    return variable.sub_((gradient + accumulation * momentum if use_nesterov else accumulation) * learning_rate)


OPERATORS: dict[str, Any] = {}
for _row in (
    ("Assign assign", assign),
    ("AssignAdd assign_add", _assign_add),
    ("AssignSub assign_sub", _assign_sub),
    ("ScatterUpdate scatter_update", _scatter("update"), "use_locking"),
    ("ScatterAdd scatter_add", _scatter("add"), "use_locking"),
    ("ScatterSub scatter_sub", _scatter("sub"), "use_locking"),
    ("ScatterMul scatter_mul", _scatter("mul"), "use_locking"),
    ("ScatterDiv scatter_div", _scatter("div"), "use_locking"),
    ("ScatterMax scatter_max", _scatter("max"), "use_locking"),
    ("ScatterMin scatter_min", _scatter("min"), "use_locking"),
    ("ScatterNdUpdate scatter_nd_update", _scatter("update", is_nd=True), "use_locking"),
    ("ScatterNdAdd scatter_nd_add", _scatter("add", is_nd=True), "use_locking"),
    ("ScatterNdSub scatter_nd_sub", _scatter("sub", is_nd=True), "use_locking"),
    ("AdamWeightDecay", _adam_weight_decay, "use_locking"),
    ("Adam", _adam, "use_locking use_nesterov"),
    ("FusedSparseAdam", _sparse_adam(is_lazy=False), "use_locking use_nesterov"),
    ("FusedSparseLazyAdam", _sparse_adam(is_lazy=True), "use_locking use_nesterov"),
    ("ApplyMomentum", _apply_momentum, "use_nesterov use_locking gradient_scale"),
):  # fmt: skip
    OPERATORS |= define(*_row)
