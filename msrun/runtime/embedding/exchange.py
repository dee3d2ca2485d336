"""The rows that ranks ask each other for in one lookup, and the gradients of these rows on their way back.

Each rank asks for every row once, however often its indices name it. Of a table cut by rows it asks the rank that has
the row; of one cut by columns it asks all, and each sends its columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.embedding.slices import TableSlices
from msrun.runtime.execute.transfers import start_row_exchange


class Requests:
    """The requests of one lookup. All ranks of the group make them together.

    Args:
        rows: numbers of the rows that this rank needs, ascending, each once.
    """

    def __init__(self, slices: TableSlices, rows: Tensor, group: dist.ProcessGroup) -> None:
        self._slices = slices
        self._group = group
        self._count = rows.shape[0]
        ranks = slices.ranks
        if slices.dimension == 0:
            edges = torch.searchsorted(rows, rows.new_tensor(slices.bounds)).tolist()
            self._sent = [end - begin for begin, end in itertools.pairwise(edges)]
        else:
            self._sent = [self._count] * ranks
            rows = rows.repeat(ranks)
        ones = [1] * ranks
        self._asked: list[int] = start_row_exchange(rows.new_tensor(self._sent), ones, ones, group).wait().tolist()
        asked = start_row_exchange(rows, self._sent, self._asked, group).wait()
        self.asked = asked - slices.bounds[dist.get_rank(group)] if slices.dimension == 0 else asked
        """Rows of this rank's part that the ranks ask for, in rank order."""

    def fetch(self, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows that this rank needs: (rows, width).

        Args:
            read: gives rows of this rank's part.
        """
        found = start_row_exchange(read(self.asked), self._asked, self._sent, self._group).wait()
        if self._slices.dimension == 0:
            return found
        pieces = found.view(self._slices.ranks, self._count, found.shape[1]).transpose(0, 1)
        return pieces.reshape(self._count, self._slices.width)

    def give_back(self, gradients: Tensor) -> Tensor:
        """Return the gradients of the rows that this rank was asked for, given those of the rows that it needs."""
        if self._slices.dimension == 1:
            columns = self._slices.width // self._slices.ranks
            pieces = gradients.view(self._count, self._slices.ranks, columns).transpose(0, 1)
            gradients = pieces.reshape(self._slices.ranks * self._count, columns)
        return start_row_exchange(gradients, self._sent, self._asked, self._group).wait()
