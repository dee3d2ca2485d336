"""Dropout with masks from `keep_mask`: what the partitioned graph and a network that runs as it is have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"]
_ALPHA = 1.7580993408473766
"""SELU's limit for very negative inputs, times its scale: alpha dropout (Klambauer et al. 2017) sets values to it."""
MakeMask = Callable[[tuple[int, ...]], Tensor]
"""Shape of a mask, of which sizes of 1 are broadcast -> the mask, or this rank's part of it."""


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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    make_mask: MakeMask,
) -> Tensor:
    """Scaled dot-product attention with dropout of the attention weights, by its definition in torch's documentation.

    Shapes: query (.., L, E), key (.., S, E), value (.., S, Ev) -> (.., L, Ev). The weights (.., L, S) are computed as a
    whole, as in torch's own implementation on the host. A row that may look at nothing gives zeros.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
        sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(sees_nothing, 0).softmax(-1).masked_fill(sees_nothing, 0)
    return drop(weights, make_mask(tuple(weights.shape)), dropout_p, "dropout") @ value
