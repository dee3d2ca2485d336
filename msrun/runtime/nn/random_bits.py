"""Random bits as a pure function: those of an element follow from (seed, step, call, place in the tensor).

A counter-based generator after the idea of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), with
the two multiplications of Ellis' 32-bit integer hash `lowbias32` as rounds and a 64-bit key (splitmix64) between them.
Any part of a tensor's bits is computed alone, by any rank, at any time, and again for recomputation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msrun.errors import ParallelError

_WORD = 1 << 32
_BLOCK = 1 << 16
"""Elements worked on at a time on the host: what stays in a core's cache."""
_LOW_WORD = 0 if sys.byteorder == "little" else 1
_ROUND_1 = 0x7FEB352D
_ROUND_2 = 0x846CA68B - _WORD


@dataclass(frozen=True)
class DrawKey:
    """Which random numbers: equal on all ranks for one call of one step; part of the batch apart."""

    seed: int
    step: int
    index: int = 0
    """Part `index` of `count` of every rank's rows: copies and micro batches."""
    count: int = 1
    batch_parts: int = 1
    """Parts that the global batch is cut into over the ranks, before it is cut into copies."""

    def to_tensor(self) -> Tensor:
        """Return the key as five 64-bit integers on the host."""
        seed = (self.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        return torch.tensor([seed, self.step, self.index, self.count, self.batch_parts])

    @classmethod
    def of_tensor(cls, value: Tensor) -> DrawKey:
        """Return the key that `to_tensor` wrote; its seed may be negative, which is the same seed modulo 2^64."""
        return cls(*value.tolist())


@dataclass(frozen=True)
class Box:
    """A part of a tensor: the rank's one."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return all of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def narrow(self, dim: int, within: slice) -> Box:
        """Return some of its places of one dimension."""
        begins, sizes = list(self.begins), list(self.sizes)
        begins[dim] += within.start
        sizes[dim] = within.stop - within.start
        return Box(self.shape, tuple(begins), tuple(sizes))


def keep_mask(key: DrawKey, call: int, p: float, box: Box, batch_dim: int | None, device: torch.device) -> Tensor:
    """Return True where an element is kept, with probability 1 - p each: a tensor of the box's sizes.

    Args:
        call: number of the draw in the network's order.
        batch_dim: dimension whose outermost index is the row of the batch; None when no dimension is.
    """
    threshold = round(p * _WORD) - _WORD // 2
    if threshold >= _WORD // 2:
        return torch.zeros(box.sizes, dtype=torch.bool, device=device)

    def write(words: Sequence[Tensor], out: Tensor) -> None:
        torch.ge(words[0], threshold, out=out)

    return fill(key, call, box, batch_dim, device, torch.bool, 1, write)


def fill(
    key: DrawKey,
    call: int,
    box: Box,
    batch_dim: int | None,
    device: torch.device,
    dtype: torch.dtype,
    count: int,
    write: Callable[[Sequence[Tensor], Tensor], None],
) -> Tensor:
    """Return a tensor of the box's sizes that `write` makes of random words, block by block.

    Args:
        call, batch_dim: as for `keep_mask`.
        count: words per element.
        write: takes `count` int32 tensors, which it may change, and the block of the result that it writes. The high
            bits of a word are better mixed than the low ones, see `spread`.
    """
    numbers = _numbers(key, box, batch_dim, device)
    outer, inner = map(_wrapped, numbers)
    is_long = math.prod(box.shape) * key.count > _WORD

    def words_of(rows: Tensor, high: int = 0) -> list[tuple[Tensor, Tensor, int]]:
        chosen = (_words(key.seed, key.step, call, word, high) for word in range(count))
        return [((rows * multiplier).add_(added), inner * multiplier, second) for multiplier, added, second in chosen]

    words = words_of(outer)
    result = torch.empty((outer.numel(), inner.numel()), dtype=dtype, device=device)
    rows = max(1, _BLOCK // max(1, inner.numel())) if device.type == "cpu" else max(1, outer.numel())
    for begin in range(0, outer.numel(), rows):
        blocks = [
            _mix(of_rows[begin : begin + rows, None] + of_columns, second) for of_rows, of_columns, second in words
        ]
        if is_long:
            block_rows, highs = outer[begin : begin + rows], (numbers[0][begin : begin + rows, None] + numbers[1]) >> 32
            for high in filter(None, highs.unique().tolist()):
                for block, (of_rows, of_columns, second) in zip(blocks, words_of(block_rows, high), strict=True):
                    block.copy_(torch.where(highs == high, _mix(of_rows[:, None] + of_columns, second), block))
        write(blocks, result[begin : begin + rows])
        del blocks  # its memory is in the core's cache, for the next one
    size = math.prod(box.sizes)
    return (result if result.numel() == size else result.view(-1)[:size]).view(box.sizes)


def spread(words: Tensor) -> Tensor:
    """Mix the high bits of words into their low ones, in place: the last round of `lowbias32`."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


def _mix(x: Tensor, key: int) -> Tensor:
    """Mix 32-bit counters in place; `>>` keeps the sign of an int32, so what it brings in is masked off."""
    shifted = x >> 16
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= _ROUND_1
    x += key
    torch.bitwise_right_shift(x, 15, out=shifted)
    x ^= shifted.bitwise_and_(0x1FFFF)
    x *= _ROUND_2
    return x


def _numbers(key: DrawKey, box: Box, batch_dim: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two vectors whose outer sum holds every element's number in the whole tensor.

    The whole tensor is that of the whole batch: a copy's rows have their numbers there. What stands behind the last
    element of the box is to be dropped.
    """
    is_part = key.count > 1 and batch_dim is not None
    if not is_part and (run := _one_run(box)) is not None:
        begin, size = run
        inner = torch.arange(min(size, _BLOCK), device=device)
        return torch.arange(begin, begin + size, _BLOCK, device=device), inner
    whole = [size * (key.count if dim == batch_dim else 1) for dim, size in enumerate(box.shape)]
    inner = outer = torch.zeros(1, dtype=torch.int64, device=device)
    is_inner = True
    for dim in reversed(range(len(whole))):
        places = torch.arange(box.begins[dim], box.begins[dim] + box.sizes[dim], device=device)
        if is_part and dim == batch_dim:
            places = _rows_of_part(places, box.shape[dim], key)
        places = places * math.prod(whole[dim + 1 :])
        is_inner = is_inner and inner.numel() * box.sizes[dim] <= _BLOCK
        if is_inner:
            inner = (places[:, None] + inner).view(-1)
        else:
            outer = (places[:, None] + outer).view(-1)
    return outer, inner


def _one_run(box: Box) -> tuple[int, int] | None:
    """Return begin and size when the box is one run of consecutive numbers, as a cut of dimension 0 is."""
    begin, size, stride, is_whole = 0, 1, 1, True
    for length, first, count in zip(reversed(box.shape), reversed(box.begins), reversed(box.sizes), strict=True):
        if not is_whole and length > 1 and count > 1:
            return None
        begin += first * stride
        size *= count
        is_whole = is_whole and count == length
        stride *= length
    return begin, size


def _rows_of_part(places: Tensor, size: int, key: DrawKey) -> Tensor:
    """Return where the rows of part `index` of `count` stand in the whole batch.

    Every rank's rows are cut into `count` runs; a part joins one run of each of the `batch_parts`.
    """
    run = size // key.batch_parts
    return places // run * (run * key.count) + key.index * run + places % run


def _wrapped(numbers: Tensor) -> Tensor:
    """Return 64-bit numbers modulo 2^32: their low words, whatever the byte order."""
    if numbers.device.type == "cpu":
        return numbers.view(torch.int32)[_LOW_WORD::2]
    return ((numbers + _WORD // 2) % _WORD - _WORD // 2).to(torch.int32)


def _signed(word: int) -> int:
    return (word + _WORD // 2) % _WORD - _WORD // 2


def _words(seed: int, step: int, call: int, word: int, high: int) -> tuple[int, int, int]:
    """Return three 32-bit key words, as int32 holds them: an odd multiplier and two numbers to add.

    Args:
        high: what is above the low 32 bits of the elements' numbers: each run of 2^32 has keys of its own.
    """
    state = _splitmix(_splitmix(_splitmix(seed % (1 << 64)) ^ step) ^ call)
    state = _splitmix(state ^ word | high << 32) if word or high else state
    following = _splitmix(state)
    return _signed(state >> 32 | 1), _signed(following >> 32), _signed(following % _WORD)


def _splitmix(value: int) -> int:
    """One output of Steele, Lea and Flood's splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) % (1 << 64)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
    return value ^ value >> 31


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
        """Return whole numbers in [low, high) as int64."""
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
