"""Attention with dropout of its weights, whose masks are ours: block by block, so that no tensor of L x S is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from msrun.runtime.nn.dropout import drop

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
