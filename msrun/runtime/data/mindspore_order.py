"""MindSpore's order of samples: a shard is taken of the samples, and what follows works on its part alone.

Checked against MindSpore 2.10: `RandomSampler` shuffles with std::mt19937 and std::shuffle of libstdc++, and every pass
shuffles what the last one has left, with the next seed. `DistributedSampler` begins with the seed after, and shard r of
n has the samples r, r + n, ... of that order, begun anew where they end, so that all shards have the same number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from msrun.runtime.data.config import UNSET_SEED
from msrun.runtime.data.order import Samples
from msrun.runtime.data.sharding import Shard

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
        keys = np.empty((len(places), 2), np.int64)
        keys[:, 0] = pass_number
        keys[:, 1] = order[places % self.num_samples] if len(places) else 0
        return keys

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
