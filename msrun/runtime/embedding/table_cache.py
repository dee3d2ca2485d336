"""The device's cache of a table on the host, and how it stays equal to the table that optimizers step there.

The table is the only place where rows change. A cache reads it, and holds what it has read until the row may have
changed: after a step of an optimizer that changes the rows of a sparse gradient alone, those rows; after any other
write to the table, which torch counts, all rows. So a lookup gives the same bits with and without a cache, a row is
never copied more often than without one, and it is copied once for all lookups between two changes of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.runtime.optim.host_weights import changed_rows
from msrun.runtime.tensors.plain_tensors import plain


class RowCache:
    """Rows of a table that lies elsewhere. The least recently used ones make room for others.

    Rows are only read from it: whoever changes the table forgets them here. Where each row is kept takes 4 bytes for
    every row of the table.

    Args:
        numbers: row numbers are below this.
        size: how many rows are kept.
    """

    def __init__(self, numbers: int, size: int) -> None:
        self._numbers, self.size = numbers, min(size, numbers)
        self.hits = 0
        """Rows that were found here; of one lookup each row counts once."""
        self.misses = 0
        """Rows that were read from the table."""
        self.copied_bytes = 0
        """Of the rows that were read from the table."""
        self._clock = 0
        self._rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that it has room for, on the device; 0 before the first lookup."""
        return 0 if self._rows is None else self._rows.nbytes

    def __repr__(self) -> str:
        return f"RowCache({self.size} rows, {self.hits} hits, {self.misses} misses, {self.copied_bytes} bytes copied)"

    def fetch(
        self, numbers: Tensor, read: Callable[[Tensor], tuple[Tensor, int]], device: torch.device, *, oldest: int = 0
    ) -> Tensor:
        """Return rows on a device: (n,) numbers on the CPU, each once -> (n, width).

        Args:
            read: gives rows of the table, and a version of all of them.
            oldest: rows of a lower version are read again.
        """
        if self._rows is None or self._rows.device != device:
            values, version = read(numbers)
            self._make(values, device)
            return self._add(numbers, numbers.new_full(numbers.shape, -1), values, version)
        self._clock += 1
        slots = self._slot_of[numbers].long()
        is_kept = (slots >= 0) & (self._version[slots] >= oldest)
        kept, missing = is_kept.nonzero().squeeze(1), (~is_kept).nonzero().squeeze(1)
        self.hits += len(kept)
        self._used[slots[kept]] = self._clock
        own = self._rows.index_select(0, slots[kept].to(device))
        if not len(missing):
            return own
        values = self._add(numbers[missing], slots[missing], *read(numbers[missing]))
        found = values.new_empty(len(numbers), values.shape[1])
        found.index_copy_(0, kept.to(device), own)
        return found.index_copy_(0, missing.to(device), values)

    def forget(self, numbers: Tensor) -> None:
        """Drop rows that have changed, if they are here."""
        if self._rows is None:
            return
        slots = self._slot_of[numbers].long()
        slots = slots[slots >= 0]
        self._slot_of[self._number_of[slots]] = -1
        self._number_of[slots] = -1
        self._used[slots] = -1

    def clear(self) -> None:
        """Drop all rows."""
        if self._rows is not None:
            self.forget(self._number_of[self._number_of >= 0])

    def _make(self, values: Tensor, device: torch.device) -> None:
        with torch.inference_mode(mode=False):  # what is made inside it could not be changed outside
            self._rows = torch.empty(self.size, values.shape[1], dtype=values.dtype, device=device)
            self._slot_of = torch.full((self._numbers,), -1, dtype=torch.int32, device="cpu")
            self._number_of, self._used, self._version = (
                torch.full((self.size,), -1, dtype=torch.int64, device="cpu") for _ in range(3)
            )

    def _add(self, numbers: Tensor, slots: Tensor, values: Tensor, version: int) -> Tensor:
        """Keep rows that were read, those for which there is room; returns them, on the device.

        Args:
            slots: where older versions of them are; -1: nowhere.
        """
        assert self._rows is not None
        values = values.to(self._rows.device)
        self.misses += len(numbers)
        self.copied_bytes += values.nbytes
        self._used[slots[slots >= 0]] = self._clock
        new = (slots < 0).nonzero().squeeze(1)
        new = new[: int((self._used < self._clock).sum())]
        free = torch.topk(self._used, len(new), largest=False).indices
        before = self._number_of[free]
        self._slot_of[before[before >= 0]] = -1
        self._slot_of[numbers[new]] = free.int()
        self._number_of[free] = numbers[new]
        slots = slots.index_copy(0, new, free)
        places = (slots >= 0).nonzero().squeeze(1)
        slots = slots[places]
        self._used[slots] = self._clock
        self._version[slots] = version
        self._rows.index_copy_(0, slots.to(values.device), values.index_select(0, places.to(values.device)))
        return values


_caches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> its TableCache"""


class TableCache:
    """The cache of one table that lies whole on this rank's host.

    Args:
        numbers: rows of the table.
        size: how many of them are kept on the device.
    """

    def __init__(self, numbers: int, size: int) -> None:
        self._numbers, self._size = numbers, size
        self.rows = RowCache(numbers, size)
        self._seen: tuple[int, int] | None = None
        self._is_true = False

    def __deepcopy__(self, memo: dict[int, Any]) -> TableCache:
        return TableCache(self._numbers, self._size)

    def watch(self, parameter: Tensor) -> None:
        """Hear of the steps of a parameter, whose table this is; of others' every change drops all rows."""
        _watch_steps()
        if _caches.get(parameter) is not self:
            _caches[parameter] = self

    def fetch(self, table: Tensor, rows: Tensor, device: torch.device) -> Tensor:
        """Return rows of the table on a device: (n,) numbers on the CPU, each once -> (n, width)."""
        if self._seen != _mark(table):
            self.rows.clear()
            self._seen = _mark(table)
        return self.rows.fetch(rows, lambda missing: (table.index_select(0, missing), 0), device)

    def before_step(self, table: Tensor) -> None:
        """Note whether what is kept is that of the table."""
        self._is_true = self._seen == _mark(table)

    def after_step(self, table: Tensor, changed: Tensor | None) -> None:
        """Forget the rows that a step has changed; None: it says nothing of them."""
        if self._is_true and changed is not None:
            self.rows.forget(changed)
            self._seen = _mark(table)


def _mark(table: Tensor) -> tuple[int, int]:
    """Return what changes when a table is written to or gets other memory."""
    return table._version, table.data_ptr()


@functools.cache
def _watch_steps() -> None:
    """Hear of all optimizers' steps from now on; once in a process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _cached(optimizer: Optimizer) -> Iterator[tuple[TableCache, Tensor, dict[str, Any]]]:
    if len(_caches):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                cache = _caches.get(parameter)
                if cache is not None:
                    yield cache, parameter, group


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for cache, parameter, _ in _cached(optimizer):
        cache.before_step(plain(parameter))


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for cache, parameter, group in _cached(optimizer):
        hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
        # inside a step a user's hooks may write to any row
        is_ours = all(getattr(hook, "__module__", "").startswith("msrun.") for hook in hooks)
        rows = changed_rows(optimizer, group, parameter) if is_ours else None
        cache.after_step(plain(parameter), rows)
