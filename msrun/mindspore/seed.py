"""set_seed: one seed for every generator of random numbers."""

from __future__ import annotations

import random

import numpy as np
import torch

from msrun.errors import UsageError
from msrun.runtime.data import config

_seed: int | None = None


def set_seed(seed: int) -> None:
    """Seed torch, numpy, Python and data sets. Every rank gives the same seed.

    Raises:
        UsageError: no whole number of 0 or more, below 2**32.
    """
    global _seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UsageError(f"set_seed({seed!r}): a whole number, 0 or more, below 2**32")
    _seed = seed
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    config.set_seed(seed)


def get_seed() -> int | None:
    """Return the seed that was set last; None before."""
    return _seed
