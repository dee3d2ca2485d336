"""Random numbers of the user's own functions: drawn from Python, numpy or torch, they belong to the sample, too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from msrun.runtime.data.draws import SampleDraws

_STREAM = 0xFFFF
_LARGEST_NUMPY_SEED = 0xFFFFFFFF


@contextmanager
def own_random_numbers(draws: SampleDraws) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds all three generators for one of the samples; afterwards they are as they were.

    So a function draws the same for a sample whatever process it runs in, and training draws as if it had not run.
    """
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seeds = draws.bits(_STREAM).tolist()

    def seed_from(number: int) -> None:
        random.seed(seeds[number])
        np.random.seed(seeds[number] & _LARGEST_NUMPY_SEED)
        torch.default_generator.manual_seed(seeds[number])

    try:
        yield seed_from
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
