"""Rows of a table by their numbers, wherever the table is: each row is fetched once, and has one gradient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class RowSource(Protocol):
    """Where the rows of one lookup come from, and where their gradients go."""

    def fetch(self, rows: Tensor) -> Tensor:
        """Return rows of the table: (n,) numbers, ascending, each once -> (n, width)."""

    def give_back(self, rows: Tensor, gradients: Tensor) -> Tensor:
        """Return the table's gradient, given those of the rows: (n,) and (n, width)."""


def look_up(table: Tensor, index: Tensor, source: RowSource) -> Tensor:
    """Return (.., width) rows of whole numbers of any shape, on their device; the gradient is that of `table`."""
    found: Tensor = _LookUp.apply(table, index, source)
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, source: RowSource) -> Tensor:  # noqa: ARG004 - has the gradient
        rows, place = torch.unique(index.detach().reshape(-1).long(), return_inverse=True)
        found = source.fetch(rows).to(index.device)
        ctx.source, ctx.rows, ctx.place = source, rows, place
        return found.index_select(0, place).view(*index.shape, found.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sums = gradient.new_zeros(ctx.rows.shape[0], gradient.shape[-1])
        sums.index_add_(0, ctx.place, gradient.reshape(-1, gradient.shape[-1]))
        return ctx.source.give_back(ctx.rows, sums), None, None
