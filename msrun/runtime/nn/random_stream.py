"""Where the random numbers of a network come from: one stream per network, equal on all ranks.

A stream begins at the network's first training call: its seed is then that of torch's default generator
(`torch.manual_seed`) on rank 0, and its step is 0. Each call of the network that draws something takes one step. How
many numbers anybody draws from torch's generators in between has no influence, nor has a later `manual_seed`.
Checkpoints hold (seed, step), so a run that is resumed has the numbers of one that never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from msrun.runtime.nn.random_bits import DrawKey
from msrun.runtime.world import device

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
