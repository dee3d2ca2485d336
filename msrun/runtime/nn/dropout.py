"""Dropout with masks from `keep_mask`: what the partitioned graph and a network that runs as it is have in common."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"]
_ALPHA = 1.7580993408473766
"""SELU's limit for very negative inputs, times its scale: alpha dropout (Klambauer et al. 2017) sets values to it."""


class _Scaled(torch.autograd.Function):
    """value * mask * scale; keeps only the mask, one byte for each element, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _scaled(value, mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _Scaled.apply(gradient, mask, ctx.scale), None, None


def _scaled(value: Tensor, mask: Tensor, scale: float) -> Tensor:
    if mask.shape == value.shape:
        return torch.ops.aten.native_dropout_backward.default(value, mask, scale)
    return value * mask.to(value.dtype).mul_(scale)


def mask_shape(kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the mask: whole channels fall together in feature dropout, dimensions 0 and 1 apart."""
    return (*shape[:2], *(1,) * (len(shape) - 2)) if kind.startswith("feature") else shape


def drop(value: Tensor, mask: Tensor, p: float, kind: Kind) -> Tensor:
    """Return `value` where the mask keeps it, scaled by 1 / (1 - p); alpha dropout keeps mean and variance instead."""
    if kind in ("dropout", "feature_dropout"):
        return _Scaled.apply(value, mask, 1.0 / (1.0 - p) if p < 1 else 0.0)
    if p >= 1:
        return value * 0
    scale = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    noise = mask.to(value.dtype)
    return value * (noise * scale) + (noise - 1) * (_ALPHA * scale) + _ALPHA * scale * p
