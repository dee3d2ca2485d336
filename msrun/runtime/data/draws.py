"""Random numbers that belong to a sample, not to a process: a pure function of seed, operation, pass and sample.

That is why a random transform gives the same picture whatever the batch size and the number of ranks. The numbers
come from the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied once per ingredient.
"""

from __future__ import annotations

import numpy as np

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
