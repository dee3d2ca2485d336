"""Dropout with masks that are ours, of values and of attention weights: what the partitioned graph and a network that
runs as it is have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


BLOCK_ELEMENTS = 1 << 22
"""Attention weights that exist at a time: 16 MiB in float32."""
KeepRows = Callable[[slice], Tensor]
"""Rows of queries -> True where their attention weights (.., rows, S) are kept."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    keep: KeepRows,
) -> Tensor:
    """Scaled dot-product attention with dropout of the attention weights, by its definition in torch's documentation.

    Shapes: query (.., L, E), key (.., S, E), value (.., S, Ev) -> (.., L, Ev). A row that may look at nothing gives
    zeros. More than `BLOCK_ELEMENTS` weights are computed for some rows of queries at a time, and again on the way
    back, with the same masks.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale

    def block(query: Tensor, key: Tensor, value: Tensor, given: Tensor | None, rows: slice) -> Tensor:
        scores = query @ key.transpose(-2, -1) * factor
        if is_causal:
            places = torch.arange(max(rows.stop, key.size(-2)), device=scores.device)
            given = places[rows, None] >= places[: key.size(-2)]
        return drop(_weights(scores, given), keep(rows), dropout_p, "dropout") @ value

    length = query.size(-2)
    of_a_row = math.prod(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])) * key.size(-2)
    step = max(1, BLOCK_ELEMENTS // max(1, of_a_row))
    if step >= length:
        return block(query, key, value, attn_mask, slice(0, length))
    found = []
    for begin in range(0, length, step):
        rows = slice(begin, min(begin + step, length))
        given = attn_mask
        if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.size(-2) > 1:
            given = attn_mask[..., rows, :]
        part = query[..., rows, :]
        # It draws nothing, so there is no state of a generator to keep; dynamo never sees it.
        found.append(checkpoint(block, part, key, value, given, rows, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(found, -2)


def _weights(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Return the softmax of scores under a mask: of what may be seen, or added to the scores."""
    if attn_mask is None:
        return scores.softmax(-1)
    is_bool = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(sees_nothing, 0).softmax(-1).masked_fill(sees_nothing, 0)
