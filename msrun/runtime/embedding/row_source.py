"""Rows of a table by their numbers, wherever the table is: each row is fetched once, and has one gradient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class RowSource(Protocol):
    """Where the rows of one lookup come from, and where their gradients go."""

    def number(self, rows: Tensor) -> Tensor:
        """Return numbers of the rows by which the source likes them ordered; one per row."""

    def fetch(self, numbers: Tensor) -> Tensor:
        """Return rows of the table: (n,) of these numbers, ascending, each once -> (n, width)."""

    def give_back(self, numbers: Tensor, gradients: Tensor) -> Tensor:
        """Return the table's gradient, given those of the rows: (n,) and (n, width)."""


def look_up(table: Tensor, index: Tensor, source: RowSource) -> Tensor:
    """Return (.., width) rows of whole numbers of any shape, on their device; the gradient is that of `table`."""
    found: Tensor = _LookUp.apply(table, index, source)
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, source: RowSource) -> Tensor:  # noqa: ARG004 - has the gradient
        numbers = source.number(index.detach().reshape(-1).long())
        numbers, place = torch.unique(numbers, return_inverse=True)
        found = source.fetch(numbers).to(index.device)
        ctx.source, ctx.numbers, ctx.place = source, numbers, place
        return found.index_select(0, place).view(*index.shape, found.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        given = gradient.reshape(-1, gradient.shape[-1]).contiguous()  # of an expanded one index_add_ is 7 times slower
        if len(ctx.numbers) == len(given):  # each row once: to select them is faster than to add them up
            place: Tensor = ctx.place
            order = torch.empty_like(place).index_copy_(0, place, torch.arange(len(place), device=place.device))
            sums = given.index_select(0, order)
        else:
            sums = given.new_zeros(len(ctx.numbers), given.shape[1]).index_add_(0, ctx.place, given)
        return ctx.source.give_back(ctx.numbers, sums), None, None
