"""Where the random numbers of a network come from: one stream per network, equal on all ranks.

A stream begins at the network's first training call: its seed is then that of torch's default generator
(`torch.manual_seed`) on rank 0, and its step is 0. Each call of the network that draws something takes one step. How
many numbers anybody draws from torch's generators in between has no influence, nor has a later `manual_seed`.
Checkpoints hold (seed, step), so a run that is resumed has the numbers of one that never stopped.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from msrun.errors import ParallelError
from msrun.runtime.world import device

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


State = dict[str, Any]


def take_random_state() -> State:
    """Return the states of torch's generator, that of this rank's device, Python's and numpy's global ones."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: State = {
        "torch": torch.get_rng_state(),
        "python": (version, np.asarray(words, np.uint32).tobytes(), gauss),
        "numpy": (name, np.asarray(keys, np.uint32).tobytes(), *rest),
    }
    if device().type != "cpu":
        state["device"] = torch.get_device_module(device()).get_rng_state(device())
    return state


def put_random_state(state: State) -> None:
    """Set the generators; one that the state does not know stays as it is."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    if "device" in state and device().type != "cpu":
        torch.get_device_module(device()).set_rng_state(state["device"], device())


def choose_random_state(states: Sequence[State], global_rank: int, world_size: int) -> State | None:
    """Return the state for a rank of a world of `world_size`, from those of the world that wrote the checkpoint.

    Each rank takes its own. In a world of another size every rank takes the one state that all had, and when they had
    different ones there is none to take: None.
    """
    if len(states) == world_size:
        return states[global_rank]
    first = states[0]["torch"]
    return states[0] if all(torch.equal(first, other["torch"]) for other in states[1:]) else None


@dataclass
class RandomStream:
    """Random numbers of one network."""

    seed: int | None = None
    """None until something is drawn for the first time."""
    step: int = 0


_streams = WeakIdKeyDictionary()
"""parameter, or network without any -> stream"""


def stream_of(root: nn.Module) -> RandomStream:
    """Return a network's stream; begin one for a network that has none."""
    first = next(root.parameters(), root)
    found = _streams.get(first)
    if found is None:
        known = (_streams[holder] for holder in (*root.parameters(), root) if holder in _streams)
        found = next(known, None) or RandomStream()
        for parameter in root.parameters():
            _streams.setdefault(parameter, found)
    _streams[root] = found  # which stays when FSDP puts other parameters in the place of these
    stream: RandomStream = found
    return stream


def hand_on_stream(old: Tensor, new: Tensor) -> None:
    """Let the stream of a network go on when another parameter takes the place of one of its own."""
    if old in _streams:
        _streams[new] = _streams[old]


def take_stream_state(tensors: Iterable[Tensor]) -> list[int] | None:
    """Return [seed, step] of the stream of the network that holds these tensors; None if it never drew anything."""
    for tensor in tensors:
        stream = _streams.get(tensor)
        if stream is not None and stream.seed is not None:
            return [stream.seed, stream.step]
    return None


def put_stream_state(tensors: Iterable[Tensor], state: list[int]) -> None:
    """Let the network that holds these tensors go on at [seed, step], before its first call or after it."""
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    stream = next((_streams[parameter] for parameter in parameters if parameter in _streams), RandomStream())
    stream.seed, stream.step = state
    for parameter in parameters:
        _streams[parameter] = stream


@dataclass
class Draw:
    """The random numbers of one call of a network."""

    stream: RandomStream
    agree: Callable[[Callable[[], int]], int]
    """Gives every rank rank 0's answer."""
    index: int = 0
    count: int = 1
    batch_parts: int = 1
    slices: Sequence[int] = (0,)
    """Which slice of this part each copy is that an executor runs; of `total`."""
    total: int = 1
    calls: int = 0
    """Draws met so far, by a network that runs as it is."""
    rows: int | None = None
    """Rows of the batch in this part, where a network runs as it is; None: not known."""
    is_used: bool = False

    def key(self, copy: int = 0) -> DrawKey:
        """Return the key of one of the copies that an executor runs, or of all rows of this part."""
        self.is_used = True
        if self.stream.seed is None:
            self.stream.seed = self.agree(torch.initial_seed)
        return DrawKey(
            self.stream.seed,
            self.stream.step,
            self.index * self.total + self.slices[copy],
            self.count * self.total,
            self.batch_parts,
        )


current_draw: ContextVar[Draw | None] = ContextVar("current_draw", default=None)
"""Set while AutoParallel runs a network."""


@contextmanager
def torchs_numbers() -> Iterator[None]:
    """Let what runs inside draw from torch's own generators: first values of parameters."""
    token = current_draw.set(None)
    try:
        yield
    finally:
        current_draw.reset(token)


@contextmanager
def drawing(root: nn.Module, agree: Callable[[Callable[[], int]], int], batch_parts: int) -> Iterator[Draw]:
    """Give one call of a network its random numbers; afterwards its stream is a step further if it used any.

    Args:
        agree: gives every rank rank 0's answer; asked at the first call in training, which all ranks make.
        batch_parts: parts that the global batch is cut into over the ranks.
    """
    draw = Draw(stream_of(root), agree, batch_parts=batch_parts)
    if draw.stream.seed is None and any(module.training for module in root.modules()):
        draw.stream.seed = agree(torch.initial_seed)
    token = current_draw.set(draw)
    try:
        yield draw
    finally:
        current_draw.reset(token)
        if draw.is_used:
            draw.stream.step += 1
            stream_of(root)  # of new parameters, too, for a checkpoint


@contextmanager
def part_of_batch(index: int, count: int, values: Iterable[Any] = ()) -> Iterator[None]:
    """Say that what runs inside is part `index` of `count` of this rank's rows: a copy or a micro batch.

    Its draws have the numbers of these rows in the whole batch. Parts may be nested. Every part has the same calls,
    so each begins to count them where the first one did.

    Args:
        values: what the part is; dimension 0 of its first tensor that has one are its rows.
    """
    outer = current_draw.get()
    if outer is None or count == 1:
        yield
        return
    part = Draw(
        outer.stream,
        outer.agree,
        outer.index * count + index,
        outer.count * count,
        outer.batch_parts,
        calls=outer.calls,
        rows=next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), None),
    )
    token = current_draw.set(part)
    try:
        yield
    finally:
        current_draw.reset(token)
        outer.is_used |= part.is_used
        if index == count - 1:
            outer.calls = part.calls


@contextmanager
def slices_of_batch(slices: Sequence[int], total: int) -> Iterator[None]:
    """Say which slices of this rank's rows, of `total`, the copies are that an executor runs inside."""
    draw = current_draw.get()
    if draw is None or total == 1:
        yield
        return
    before = draw.slices, draw.total
    draw.slices, draw.total = slices, total
    try:
        yield
    finally:
        draw.slices, draw.total = before
