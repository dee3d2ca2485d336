"""Tape: what a `no_init_parameters` block did to its tensors, to be done again when their values are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Reference:
    """A tensor on the tape: a view of a storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Entry:
    """One operation."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Reference, ...]
    new_seed: Tensor | None = None
    """State of the random generator, when the user set it since the entry before."""


@dataclass
class Tape:
    """Everything that one `no_init_parameters` block did to its tensors."""

    generator_state: Tensor
    entries: list[Entry] = field(default_factory=list)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Kept alive so that a number names one storage only."""

    def __post_init__(self) -> None:
        self._seen_state: Tensor | None = self.generator_state

    def expect_new_seed(self) -> None:
        """The user is setting the generator, maybe to the very state that it has."""
        self._seen_state = None

    def take_new_seed(self) -> Tensor | None:
        """Return the generator's state if it was set since the last call: recording itself never moves it."""
        state = torch.get_rng_state()
        if self._seen_state is not None and torch.equal(state, self._seen_state):
            return None
        self._seen_state = state
        return state

    def remember(self, tensor: Tensor) -> Reference:
        """Return a tensor's reference and keep its storage known."""
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        tape_of[storage._cdata] = self
        return Reference(storage._cdata, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def seeds(self) -> list[Tensor | None]:
        """The states that the replay gives the random generator: the first one, and one per entry or None."""
        return [self.generator_state, *(entry.new_seed for entry in self.entries)]

    def use_seeds(self, seeds: list[Tensor | None]) -> None:
        """Replay with other states of the random generator: those of another rank."""
        assert seeds[0] is not None
        self.generator_state = seeds[0]
        self.entries = [replace(entry, new_seed=seed) for entry, seed in zip(self.entries, seeds[1:], strict=True)]

    def never_written(self) -> set[int]:
        """Return the storages that were only reserved and never given a value."""
        touched: dict[int, list[str]] = {}
        for entry in self.entries:
            for storage in {reference.storage for reference in entry.results}:
                touched.setdefault(storage, []).append(str(entry.operator))
        return {storage for storage, names in touched.items() if all("empty" in name for name in names)}

    def replay(self, wanted: dict[int, Callable[[Tensor], None]], entries: int | None = None) -> None:
        """Run the tape; give each wanted storage, as a flat tensor, to its taker when nothing changes it any more.

        Args:
            entries: run only so many.
        """
        last_use = self._last_use()
        values: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(self.generator_state)
            for index, entry in enumerate(self.entries[:entries]):
                if entry.new_seed is not None:
                    torch.set_rng_state(entry.new_seed)
                args, kwargs = pytree.tree_map(lambda x: self._value(x, values), (entry.args, entry.kwargs))
                if kwargs.get("device") is not None:  # whatever it is: the numbers of the CPU are everybody's
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                flat = [t for t in pytree.tree_leaves(entry.operator(*args, **kwargs)) if isinstance(t, Tensor)]
                for reference, result in zip(entry.results, flat, strict=True):
                    if reference.storage not in values:
                        values[reference.storage] = _flat(_conform(result, reference))
                for storage in [s for s in values if last_use[s] == index]:
                    flat_value = values.pop(storage)
                    if storage in wanted:
                        wanted[storage](flat_value)

    def take_out(self, storage: int, divert: Callable[[Entry], Callable[[], None] | None]) -> int:
        """Have a storage made elsewhere: the replay makes it no more, and calls what stands in for its lines.

        Returns how many entries a replay needs to call all that stand in.

        Args:
            divert: gets each line that touches the storage; returns what the replay calls in its place, or None.
        """
        needed = 0
        for index, entry in enumerate(self.entries):
            if self._touches(entry, storage):
                stand_in = divert(entry)
                self.entries[index] = Entry(stand_in or _nothing, (), {}, (), entry.new_seed)
                needed = index + 1 if stand_in is not None else needed
        self.storages.pop(storage)
        tape_of.pop(storage, None)
        return needed

    @staticmethod
    def _touches(entry: Entry, storage: int) -> bool:
        leaves = (*pytree.tree_leaves((entry.args, entry.kwargs)), *entry.results)
        return any(isinstance(leaf, Reference) and leaf.storage == storage for leaf in leaves)

    def _last_use(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for index, entry in enumerate(self.entries):
            for leaf in (*pytree.tree_leaves((entry.args, entry.kwargs)), *entry.results):
                if isinstance(leaf, Reference):
                    last[leaf.storage] = index
        return last

    @staticmethod
    def _value(item: Any, values: dict[int, Tensor]) -> Any:
        if isinstance(item, Reference):
            return values[item.storage].as_strided(item.size, item.stride, item.offset)
        return item


def _nothing() -> None:
    """Stand in for a line without random numbers."""


def _conform(result: Tensor, reference: Reference) -> Tensor:
    """Return `result` with the strides that meta promised: a kernel may lay its result out otherwise."""
    if tuple(result.stride()) == reference.stride and result.storage_offset() == reference.offset:
        return result
    return torch.empty_strided(reference.size, reference.stride, dtype=result.dtype).copy_(result)


def _flat(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as one dimension."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


tape_of: dict[int, Tape] = {}
"""storage number -> the tape that made it; entries go when they are replayed"""
