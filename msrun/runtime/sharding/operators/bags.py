"""Rule for embedding_bag: rows of a table looked up and summed, averaged or compared bag by bag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from msrun.errors import CaptureError
from msrun.runtime.sharding.operators.rows import BAGS, ROWS, PooledLookup
from msrun.runtime.sharding.operators.rule import Form, Labels, OperatorCall, sizes_of, user_line

aten = torch.ops.aten
_MODES = ("sum", "mean", "max")


class EmbeddingBag(PooledLookup):
    """y[b, e] = sum, mean or maximum over the indices i of bag b of w[i, e]. Strategy: (table, indices, offsets)."""

    def form(self, call: OperatorCall) -> Form:
        """Return labels v, e and b: that of the indices when bags are of equal length, else of the offsets."""
        counts_rows = bool(call.argument("scale_grad_by_freq", default=False))  # of the whole batch
        if counts_rows and call.argument("sparse", default=False):
            raise CaptureError(
                "embedding_bag(sparse=True, scale_grad_by_freq=True): torch has no such gradient; give one of both",
                where=user_line(call.node),
            )
        table, _, offsets, *shares = call.shapes
        bags, *rest = call.output_shapes
        is_even = self.has_even_bags(call)
        of_index: Labels = (BAGS,) if is_even else (None,)
        of_offsets: Labels = (BAGS,) if not is_even and offsets[0] == bags[0] else (None,)
        whole = {ROWS} if _MODES[call.argument("mode", 0)] == "max" else set()
        if counts_rows:
            whole = {ROWS, BAGS}
        if call.reads_others:  # they are about the whole batch
            whole = {ROWS, "e", BAGS}
        inputs = ((ROWS, "e"), of_index, of_offsets, *(of_index for _ in shares))
        sizes = sizes_of((inputs[0], table), ((BAGS, None), bags))
        return Form(inputs, (BAGS, "e"), sizes, frozenset(whole), tuple((None,) * len(shape) for shape in rest))

    def settings(self, call: OperatorCall) -> Mapping[str, Any]:
        """Return how the rows of a bag are pooled."""
        return {
            "mode": _MODES[call.argument("mode", 0)],
            "padding_idx": call.argument("padding_idx"),
            "has_end": bool(call.argument("include_last_offset", default=False)),
            "sparse": bool(call.argument("sparse", default=False)),
        }


RULES = [(EmbeddingBag(), [aten.embedding_bag.default, aten.embedding_bag.padding_idx])]
