"""The global order of samples: which sample is where in which pass, before it is split over the shards.

Pure functions of (seed, pass number, number of shards): every process computes the whole order and takes its part,
so nothing has to be sent and no number of ranks changes what a global batch holds.

An order is a chain of small values, source first. Each one has `size(num_shards)`, the number of its items, and
`draw(pass_number, num_shards)`, the items themselves. An item is a sample or, behind `Batched`, a global batch.
A sample is a row (pass number, sample index) of int64: samples are an (n, 2) array, batches a list of such arrays.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from msrun.data.config import UNSET_SEED, Shard
from msrun.errors import UsageError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; uint64 in, uint64 out, same shape, arithmetic modulo 2**64."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class SampleDraws:
    """The random numbers of one operation for the samples of one batch.

    `sample_keys` is (B, 2) int64: the pass over the dataset and the index of the sample.
    """

    def __init__(self, seed: int, operation_number: int, sample_keys: np.ndarray) -> None:
        keys = sample_keys.astype(np.uint64)
        self.sample_indices = sample_keys[:, 1]
        state = np.full(len(keys), seed, np.uint64)
        state = _mix(state) + np.uint64(operation_number)
        state = _mix(state) + keys[:, 0]
        self._state = _mix(state) + keys[:, 1]

    def __len__(self) -> int:
        return len(self.sample_indices)

    def bits(self, stream: int) -> np.ndarray:
        """Return (B,) uint64; different `stream` numbers are independent draws for the same samples."""
        return _mix(_mix(self._state) + np.uint64(stream))

    def uniform(self, stream: int) -> np.ndarray:
        """Return (B,) float64 in [0, 1)."""
        return (self.bits(stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, stream: int, num_values: int) -> np.ndarray:
        """Return (B,) int64 in [0, num_values)."""
        return (self.uniform(stream) * num_values).astype(np.int64)


Items = np.ndarray | list[np.ndarray]
_SPLIT_DEPTH = 2**32 - 1
"""Deeper than any link of a chain."""


class Order(ABC):
    """One link of the chain."""

    is_batched = False

    @abstractmethod
    def size(self, num_shards: int, /) -> int:
        """Return the number of items of a pass."""

    @abstractmethod
    def draw(self, pass_number: int, num_shards: int, /) -> Items:
        """Return the items of a pass."""


@dataclass(frozen=True)
class _Behind(Order):
    """A link that changes what comes from the one before it."""

    upstream: Order

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_batched", self.upstream.is_batched)


@dataclass(frozen=True)
class Samples(Order):
    """All samples once per pass, in file order or in a new permutation every pass."""

    num_samples: int
    seed: int
    is_shuffled: bool

    def size(self, _num_shards: int) -> int:
        return self.num_samples

    def draw(self, pass_number: int, _num_shards: int) -> np.ndarray:
        order = np.arange(self.num_samples)
        if self.is_shuffled:
            order = _random_state(self.seed, pass_number, 0).permutation(self.num_samples)
        return _keys(pass_number, order)

    @property
    def num_rows(self) -> int:
        """How many rows of the source, from the first on, there are to be in any order."""
        return self.num_samples

    def over(self, num_samples: int) -> Self:
        """Return the same order of another number of samples."""
        return replace(self, num_samples=num_samples)


def _keys(pass_number: int, indices: np.ndarray) -> np.ndarray:
    return np.stack([np.full(len(indices), pass_number, np.int64), indices], axis=1)


@dataclass(frozen=True)
class Shuffled(_Behind):
    """Items that went through a shuffle buffer: each place takes a random one of the next `buffer_size` items."""

    buffer_size: int
    seed: int
    depth: int
    """Number of links before this one; keeps the draws of two shuffles apart."""

    def size(self, num_shards: int) -> int:
        return self.upstream.size(num_shards)

    def draw(self, pass_number: int, num_shards: int) -> Items:
        items = self.upstream.draw(pass_number, num_shards)
        state = _random_state(self.seed, pass_number, self.depth)
        positions = _buffer_order(len(items), self.buffer_size, state)
        return [items[i] for i in positions] if isinstance(items, list) else items[positions]


@dataclass(frozen=True)
class Repeated(_Behind):
    """`count` passes one after the other, each with its own permutation and its own random transforms."""

    count: int

    def size(self, num_shards: int) -> int:
        return self.upstream.size(num_shards) * self.count

    def draw(self, pass_number: int, num_shards: int) -> Items:
        passes = [self.upstream.draw(pass_number * self.count + i, num_shards) for i in range(self.count)]
        if self.is_batched:
            return [batch for items in passes for batch in items]
        return np.concatenate(passes)


@dataclass(frozen=True)
class Sliced(_Behind):
    """Items `start` .. `stop` - 1 of every pass; `stop` None is the end."""

    start: int
    stop: int | None

    def size(self, num_shards: int) -> int:
        return len(range(self.upstream.size(num_shards))[self.start : self.stop])

    def draw(self, pass_number: int, num_shards: int) -> Items:
        return self.upstream.draw(pass_number, num_shards)[self.start : self.stop]


@dataclass(frozen=True)
class Batched(Order):
    """Global batches: `batch_size` samples for each shard. `size` and `draw` raise UsageError on an uneven rest."""

    is_batched = True
    upstream: Order
    batch_size: int
    """Samples per shard."""
    should_drop_remainder: bool

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
        return [np.split(batch, shard.num_shards)[shard.shard_id] for batch in items]
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


_RANKS_APART = 2**20
"""Between the seeds of two ranks, which count up with every pass."""
_RANGE = 2**32
"""Of the numbers of std::mt19937."""


def seed_of_rank(rank: int) -> int:
    """Return the seed of a rank that reads the whole dataset without a seed: MindSpore draws one, here it is fixed."""
    return UNSET_SEED + (rank + 1) * _RANKS_APART


@dataclass(frozen=True)
class MindSporeSamples(Samples):
    """The samples of one shard, once per pass."""

    shard: Shard = field(default_factory=lambda: Shard(1, 0))
    limit: int | None = None
    """`num_samples`: the first so many of the shard's, after the shuffle."""

    @property
    def num_rows(self) -> int:
        return self.num_samples if self.limit is None else min(self.num_samples, self.limit)

    def size(self, _num_shards: int) -> int:
        count = -(-self.num_samples // self.shard.num_shards)
        return count if self.limit is None else min(count, self.limit)

    def draw(self, pass_number: int, num_shards: int) -> np.ndarray:
        order = np.arange(self.num_samples)
        if self.is_shuffled:
            order = shuffled(self.num_samples, self.seed, pass_number)
        places = np.arange(self.size(num_shards)) * self.shard.num_shards + self.shard.shard_id
        return _keys(pass_number, order[places % max(1, self.num_samples)])

    def over(self, num_samples: int) -> Self:
        return replace(self, num_samples=num_samples, limit=None)


_KEPT = 8
_last: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
"""(number of samples, seed) -> the pass that was shuffled last, and its order; the newest ones are kept"""


def shuffled(count: int, seed: int, pass_number: int) -> np.ndarray:
    """Return the order of `count` samples in a pass, from 0."""
    done, order = _last.pop((count, seed), (pass_number + 1, np.empty(0)))
    if done > pass_number:
        done, order = -1, np.arange(count)
    for number in range(done + 1, pass_number + 1):
        items = order.tolist()
        _shuffle(items, _draw_below(seed + number))
        order = np.array(items, np.int64)
    while len(_last) >= _KEPT:
        del _last[next(iter(_last))]
    _last[count, seed] = pass_number, order
    return order


def _shuffle(items: list[int], below: Callable[[int], int]) -> None:
    """Shuffle as std::shuffle of libstdc++, which takes two places of one number where they fit into its range."""
    count = len(items)
    if count < 2:
        return
    if count * count > _RANGE - 1:
        for i in range(1, count):
            j = below(i + 1)
            items[i], items[j] = items[j], items[i]
        return
    first = 1
    if count % 2 == 0:
        j = below(2)
        items[1], items[j] = items[j], items[1]
        first = 2
    for i in range(first, count, 2):
        j, k = divmod(below((i + 1) * (i + 2)), i + 2)
        items[i], items[j] = items[j], items[i]
        items[i + 1], items[k] = items[k], items[i + 1]


def _draw_below(seed: int) -> Callable[[int], int]:
    """Return std::uniform_int_distribution over 0..n-1 of an std::mt19937, as libstdc++ had it before version 11."""
    bits = np.random.RandomState(seed % _RANGE)._bit_generator
    numbers = itertools.chain.from_iterable(iter(lambda: bits.random_raw(4096).tolist(), None))

    def below(n: int) -> int:
        scaling = (_RANGE - 1) // n
        return next(number for number in numbers if number < n * scaling) // scaling

    return below
