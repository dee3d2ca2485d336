"""Random values of one draw: uniform, normal and whole numbers out of the bits of `nn.random_bits`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msrun.errors import ParallelError
from msrun.runtime.nn.random_bits import Box, DrawKey, fill, spread

_WORD = 1 << 32
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Bits of a uniform number in [0, 1), as torch draws them: all that the type holds just below 1."""


@dataclass(frozen=True)
class Source:
    """Where the numbers of one draw come from."""

    key: DrawKey
    call: int
    """Number of the draw in the network's order."""
    box: Box
    batch_dim: int | None
    device: torch.device

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return numbers in [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64."""
        digits = DIGITS[dtype]

        def write(words: Sequence[Tensor], out: Tensor) -> None:
            if digits > 32:
                torch.add(_top(words[0], 27).double() * (1 << 26), _top(words[1], 26), out=out)
            else:
                out.copy_(_top(words[0], digits))
            out.mul_(2.0**-digits)

        return self._fill(dtype, 2 if digits > 32 else 1, write)

    def above_zero(self, dtype: torch.dtype, first_word: int = 0) -> Tensor:
        """Return numbers in (0, 1] with many digits near 0: at least 2^-32 in float32, 2^-54 in float64."""

        def write(words: Sequence[Tensor], out: Tensor) -> None:
            words = words[first_word:]
            if dtype == torch.float64:
                torch.add(_top(words[0], 27).double() * (1 << 26), _top(words[1], 26), out=out)
                out.add_(0.5).mul_(2.0**-53)
            else:
                out.copy_(_top(words[0], 31)).add_(0.5).mul_(2.0**-31)

        return self._fill(dtype, first_word + (2 if dtype == torch.float64 else 1), write)

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return standard normal numbers, by Box and Muller (1958); at most 6.6 from 0 in float32, 8.6 in float64."""
        is_wide = dtype == torch.float64

        def write(words: Sequence[Tensor], out: Tensor) -> None:
            if is_wide:
                torch.add(_top(words[0], 27).double() * (1 << 26), _top(words[1], 26), out=out)
                out.add_(0.5).mul_(2.0**-53)
                angle = (_top(words[2], 31).double() * (1 << 22)).add_(_top(words[3], 22)).mul_(2.0**-52 * math.pi)
            else:
                out.copy_(_top(words[0], 31)).add_(0.5).mul_(2.0**-31)
                angle = spread(words[1]).to(dtype).mul_(2.0**-31 * math.pi)
            out.log_().mul_(-2.0).sqrt_().mul_(angle.cos_())

        return self._fill(dtype, 4 if is_wide else 2, write)

    def integers(self, low: int, high: int) -> Tensor:
        """Return whole numbers in [low, high) as int64.

        Raises:
            ParallelError: more than 2^63 different numbers.
        """
        span = high - low
        if not 0 < span <= 1 << 63:
            raise ParallelError(f"random whole numbers in [{low}, {high}): must be 1 to 2^63 different ones")

        def write(words: Sequence[Tensor], out: Tensor) -> None:
            out.copy_(spread(words[0])).bitwise_and_(_WORD - 1)
            if span < 1 << 31:
                out.mul_(span).bitwise_right_shift_(32)
            else:
                out.add_(_top(words[1], 31).long() << 32)
                if span < 1 << 63:
                    out.remainder_(span)
            out.add_(low)

        return self._fill(torch.int64, 1 if span < 1 << 31 else 2, write)

    def _fill(self, dtype: torch.dtype, count: int, write: Callable[[Sequence[Tensor], Tensor], None]) -> Tensor:
        return fill(self.key, self.call, self.box, self.batch_dim, self.device, dtype, count, write)


def _top(words: Tensor, bits: int) -> Tensor:
    """Return the highest bits of words, as whole numbers from 0; changes the words."""
    return (spread(words) >> (32 - bits)).bitwise_and_((1 << bits) - 1)
