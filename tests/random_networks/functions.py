"""Custom autograd Functions whose backward is not the derivative of their forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversal(torch.autograd.Function):
    """The identity; the gradient comes back with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * -ctx.factor, None


class Clamp(torch.autograd.Function):
    """Clamps; outside of the limits a tenth of the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= ctx.limit, gradient, gradient * 0.1), None


class TwoResults(torch.autograd.Function):
    """Two results, whose gradients are exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + 0.5 * second


class OwnScale(torch.autograd.Function):
    """x * scale, where the scale, one number, learns at half speed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, 0.5 * (gradient * x).sum()


class OwnLinear(torch.autograd.Function):
    """x @ weight.T with a backward pass written by hand; the weight learns at half speed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        return gradient @ weight, 0.5 * rows.t() @ columns
