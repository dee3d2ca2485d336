"""The global order of samples: which sample is where in which pass, before it is split over the shards.

Pure functions of (seed, pass number, number of shards): every process computes the whole order and takes its part,
so nothing has to be sent and no number of ranks changes what a global batch holds.

An order is a chain of small values, source first. Each one has `size(num_shards)`, the number of its items, and
`draw(pass_number, num_shards)`, the items themselves. An item is a sample or, behind `Batched`, a global batch.
A sample is a row (pass number, sample index) of int64: samples are an (n, 2) array, batches a list of such arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from msrun.errors import UsageError
from msrun.runtime.data.sharding import Shard

Items = np.ndarray | list[np.ndarray]
_SPLIT_DEPTH = 2**32 - 1
"""Deeper than any link of a chain."""


class Order(Protocol):
    """One link of the chain."""

    @property
    def is_batched(self) -> bool: ...

    def size(self, num_shards: int, /) -> int: ...

    def draw(self, pass_number: int, num_shards: int, /) -> Items: ...


@dataclass(frozen=True)
class Samples:
    """All samples once per pass, in file order or in a new permutation every pass."""

    num_samples: int
    seed: int
    is_shuffled: bool
    is_batched: bool = False

    def size(self, _num_shards: int) -> int:
        return self.num_samples

    def draw(self, pass_number: int, _num_shards: int) -> np.ndarray:
        keys = np.empty((self.num_samples, 2), np.int64)
        keys[:, 0] = pass_number
        keys[:, 1] = np.arange(self.num_samples)
        if self.is_shuffled:
            keys[:, 1] = _random_state(self.seed, pass_number, 0).permutation(self.num_samples)
        return keys

    @property
    def num_rows(self) -> int:
        """How many rows of the source, from the first on, there are to be in any order."""
        return self.num_samples

    def over(self, num_samples: int) -> Self:
        """Return the same order of another number of samples."""
        return replace(self, num_samples=num_samples)


@dataclass(frozen=True)
class Shuffled:
    """Items that went through a shuffle buffer: each place takes a random one of the next `buffer_size` items."""

    upstream: Order
    buffer_size: int
    seed: int
    depth: int
    """Number of links before this one; keeps the draws of two shuffles apart."""

    @property
    def is_batched(self) -> bool:
        return self.upstream.is_batched

    def size(self, num_shards: int) -> int:
        return self.upstream.size(num_shards)

    def draw(self, pass_number: int, num_shards: int) -> Items:
        items = self.upstream.draw(pass_number, num_shards)
        state = _random_state(self.seed, pass_number, self.depth)
        return _select(items, _buffer_order(len(items), self.buffer_size, state))


@dataclass(frozen=True)
class Repeated:
    """`count` passes one after the other, each with its own permutation and its own random transforms."""

    upstream: Order
    count: int

    @property
    def is_batched(self) -> bool:
        return self.upstream.is_batched

    def size(self, num_shards: int) -> int:
        return self.upstream.size(num_shards) * self.count

    def draw(self, pass_number: int, num_shards: int) -> Items:
        passes = [self.upstream.draw(pass_number * self.count + i, num_shards) for i in range(self.count)]
        if self.is_batched:
            return [batch for items in passes for batch in items]
        return np.concatenate(passes)


@dataclass(frozen=True)
class Sliced:
    """Items `start` .. `stop` - 1 of every pass; `stop` None is the end."""

    upstream: Order
    start: int
    stop: int | None

    @property
    def is_batched(self) -> bool:
        return self.upstream.is_batched

    def size(self, num_shards: int) -> int:
        return len(range(self.upstream.size(num_shards))[self.start : self.stop])

    def draw(self, pass_number: int, num_shards: int) -> Items:
        return self.upstream.draw(pass_number, num_shards)[self.start : self.stop]


@dataclass(frozen=True)
class Batched:
    """Global batches: `batch_size` samples for each shard. `size` and `draw` raise UsageError on an uneven rest."""

    upstream: Order
    batch_size: int
    """Samples per shard."""
    should_drop_remainder: bool
    is_batched: bool = True

    def size(self, num_shards: int) -> int:
        num_whole, remainder = divmod(self.upstream.size(num_shards), self.batch_size * num_shards)
        if self.should_drop_remainder or remainder == 0:
            return num_whole
        if remainder % num_shards:
            raise UsageError(
                f"batch(drop_remainder=False): the last batch has {remainder} samples, which {num_shards} shards "
                f"cannot share evenly; use drop_remainder=True or take a multiple of {num_shards} samples"
            )
        return num_whole + 1

    def draw(self, pass_number: int, num_shards: int) -> list[np.ndarray]:
        global_batch = self.batch_size * num_shards
        samples = self.upstream.draw(pass_number, num_shards)
        starts = range(0, self.size(num_shards) * global_batch, global_batch)
        return [np.asarray(samples[start : start + global_batch]) for start in starts]


def draw_shard(order: Order, pass_number: int, shard: Shard) -> Items:
    """Return what `shard` reads in each step of a pass: (k, 2) arrays of (pass number, sample index).

    A global batch of B * N samples is cut into N contiguous blocks of B. Without `Batched`, a step is one sample per
    shard and k is 1; a rest smaller than N samples is left out.
    """
    items = order.draw(pass_number, shard.num_shards)
    if isinstance(items, list):
        return [_block(batch, shard) for batch in items]
    num_steps = len(items) // shard.num_shards
    steps = items[: num_steps * shard.num_shards].reshape(num_steps, shard.num_shards, 2)
    return steps[:, shard.shard_id : shard.shard_id + 1]


def count_steps(order: Order, shard: Shard) -> int:
    """Return the number of steps of a pass, without drawing it."""
    size = order.size(shard.num_shards)
    return size if order.is_batched else size // shard.num_shards


def draw_permutation(seed: int, num_samples: int) -> np.ndarray:
    """Return (num_samples,) int64: a permutation that no epoch has."""
    return _random_state(seed, 0, _SPLIT_DEPTH).permutation(num_samples)


def _block(batch: np.ndarray, shard: Shard) -> np.ndarray:
    width = len(batch) // shard.num_shards
    return batch[shard.shard_id * width : (shard.shard_id + 1) * width]


def _select(items: Items, positions: np.ndarray) -> Items:
    return [items[i] for i in positions] if isinstance(items, list) else items[positions]


def _random_state(seed: int, pass_number: int, depth: int) -> np.random.RandomState:
    """RandomState, not Generator: numpy promises never to change its streams, and hosts may differ in numpy version."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, pass_number, depth])))


def _buffer_order(num_items: int, buffer_size: int, state: np.random.RandomState) -> np.ndarray:
    """Return (num_items,) int64: the order in which a shuffle buffer of `buffer_size` items hands out items."""
    if buffer_size >= num_items:
        return state.permutation(num_items)
    num_refills = num_items - buffer_size
    slots = state.randint(0, buffer_size, size=num_refills).tolist()
    buffer = list(range(buffer_size))
    handed_out = []
    for incoming, slot in enumerate(slots, start=buffer_size):
        handed_out.append(buffer[slot])
        buffer[slot] = incoming
    rest = np.array(buffer, np.int64)[state.permutation(buffer_size)]
    return np.concatenate([np.array(handed_out, np.int64), rest])
