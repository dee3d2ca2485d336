"""Rows of a table by their numbers, wherever the table is: each row is fetched once, and has one gradient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class RowSource(Protocol):
    """Where the rows of one lookup come from, and where their gradients go."""

    def number(self, rows: Tensor) -> Tensor:
        """Return numbers of the rows by which the source likes them ordered; one per row."""

    def fetch(self, numbers: Tensor, place: Tensor) -> Tensor:
        """Return the rows `numbers[place]` of the table: (k,) -> (k, width).

        Args:
            numbers: (n,) ascending, each once.
        """

    def give_back(self, numbers: Tensor, gradients: Tensor) -> Tensor:
        """Return the table's gradient, given those of the rows: (n,) and (n, width)."""


def look_up(table: Tensor, index: Tensor, source: RowSource) -> Tensor:
    """Return (.., width) rows of whole numbers of any shape, on their device; the gradient is that of `table`."""
    found: Tensor = _LookUp.apply(table, index, source)
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, source: RowSource) -> Tensor:  # noqa: ARG004 - has the gradient
        numbers, order = torch.sort(source.number(index.detach().reshape(-1).long()))
        is_new = numbers[1:] > numbers[:-1]
        if bool(is_new.all()):
            ranks = torch.arange(len(order), device=order.device)
        else:
            is_new = torch.cat([is_new.new_ones(1), is_new])
            numbers, ranks = numbers[is_new], is_new.cumsum(0) - 1
        place = torch.empty_like(order).index_copy_(0, order, ranks)
        ctx.source, ctx.numbers, ctx.order, ctx.place = source, numbers, order, place
        found = source.fetch(numbers, place).to(index.device)
        return found.view(*index.shape, found.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        given = gradient.reshape(-1, gradient.shape[-1])
        if len(ctx.numbers) == len(given):  # each row once: to select them is faster than to add them up
            sums = given.index_select(0, ctx.order)
        else:  # of an expanded one index_add_ is 7 times slower
            sums = given.new_zeros(len(ctx.numbers), given.shape[1]).index_add_(0, ctx.place, given.contiguous())
        return ctx.source.give_back(ctx.numbers, sums), None, None
