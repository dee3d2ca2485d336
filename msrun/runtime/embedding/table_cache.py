"""The device's cache of a table on the host, and how it stays equal to the table that optimizers step there.

The table is the only place where rows change. A cache reads it, and holds what it has read until the row may have
changed: after a step of an optimizer that changes the rows of a sparse gradient alone, those rows; after any other
write to the table, which torch counts, all rows. So a lookup gives the same bits with and without a cache, a row is
never copied more often than without one, and it is copied once for all lookups between two changes of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.runtime.embedding.row_cache import RowCache
from msrun.runtime.optim.named_rows import changed_rows
from msrun.runtime.tensors.plain_tensors import plain

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
        rows = None if _has_own_hooks(optimizer) else changed_rows(optimizer, group, parameter)
        cache.after_step(plain(parameter), rows)


def _has_own_hooks(optimizer: Optimizer) -> bool:
    """Return whether a user's hooks, which may write to any row, run inside a step."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return not all(getattr(hook, "__module__", "").startswith("msrun.runtime.") for hook in hooks)
