"""Which tensors a checkpoint holds, of which parts, and which rank writes each part: every rank knows all of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.layout import Box
from msrun.runtime.world import world

if TYPE_CHECKING:
    from msrun.runtime.parallel.parameters.network_state import NetworkState


NETWORK = "model"
OPTIMIZER = "optimizer"
TensorKey = tuple[str, ...]
"""(NETWORK, name) or (OPTIMIZER, parameter name, key): the path that torch's tools give a tensor in a nested dict.
What belongs to one rank alone has `rank_N` before it."""


def flat_name(key: TensorKey) -> str:
    """Return a tensor's name in the files."""
    return ".".join(key)


def read_key(given: Any) -> TensorKey:
    """Return the key that a file gives.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(given, list | tuple) or len(given) < 2 or not all(isinstance(part, str) for part in given):
        raise ValueError("a tensor's key must be a list of two names or more")
    return tuple(given)


def own_key(key: TensorKey, global_rank: int) -> TensorKey:
    """Return the key of a tensor that belongs to one rank alone: a parameter cut by hand, and its optimizer state."""
    return (f"rank_{global_rank}", *key)


def key_of(state: NetworkState, name: str, *more: str) -> TensorKey:
    """Return where a checkpoint has a tensor of a network, or with `more` the optimizer's state of it."""
    key = (OPTIMIZER if more else NETWORK, name, *more)
    return own_key(key, world().global_rank) if name in state.own else key


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    pieces: tuple[tuple[Box, int], ...]
    """Parts that make the whole, and the rank that writes each."""


_MOST_CORNERS = 1 << 16
"""Of a box; a tensor is cut along a few dimensions."""
Catalogue = dict[TensorKey, Entry]
Held = list[tuple[TensorKey, Box, torch.dtype]]
"""What one rank holds."""


def list_held(parts: Mapping[TensorKey, Chunk]) -> Held:
    """Return what a rank tells the others of its parts."""
    return [(key, part.box, part.tensor.dtype) for key, part in parts.items()]


def build_catalogue(held: Mapping[int, Held], first: int | None = None) -> Catalogue:
    """Share the parts out: what several ranks hold is written by the one with the fewest bytes so far.

    Args:
        held: rank -> what it holds, only of ranks that write.
        first: a rank that takes every part that it has.
    """
    shapes: dict[TensorKey, tuple[tuple[int, ...], torch.dtype]] = {}
    holders: dict[TensorKey, dict[Box, list[int]]] = {}
    for rank, parts in held.items():
        for key, box, dtype in parts:
            shapes.setdefault(key, (box.shape, dtype))
            if math.prod(box.sizes) or not math.prod(box.shape):
                holders.setdefault(key, {}).setdefault(box, []).append(rank)
    bytes_of = dict.fromkeys(held, 0)
    writers: dict[tuple[TensorKey, Box], int] = {}
    pieces = [(key, box, ranks) for key, boxes in holders.items() for box, ranks in boxes.items()]
    # the large ones first, so that the small ones even them out
    for key, box, ranks in sorted(pieces, key=lambda piece: -math.prod(piece[1].sizes)):
        writer = first if first in ranks else min(ranks, key=lambda rank: (bytes_of[rank], rank))
        assert writer is not None
        bytes_of[writer] += math.prod(box.sizes) * shapes[key][1].itemsize
        writers[key, box] = writer
    return {
        key: Entry(*shapes[key], tuple((box, writers[key, box]) for box in boxes)) for key, boxes in holders.items()
    }


def pieces_of(catalogue: Catalogue, parts: Mapping[TensorKey, Chunk], rank: int) -> dict[TensorKey, Chunk]:
    """Return the parts that a rank writes, in the catalogue's order."""
    return {
        key: parts[key]
        for key, entry in catalogue.items()
        if key in parts and any(writer == rank and box == parts[key].box for box, writer in entry.pieces)
    }


def covers(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return whether parts make the whole: each element is in one of them.

    Each corner of each box counts, with signs that take turns; where boxes meet, their corners cancel out, and what is
    left are the corners of what they make.
    """
    whole_box = Box(tuple(shape), (0,) * len(shape), tuple(shape))
    cut = [dim for dim, edge in enumerate(shape) if any(box.sizes[dim] != edge for box in boxes)]
    if 1 << len(cut) > _MOST_CORNERS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [*((box, 1) for box in boxes if math.prod(box.sizes)), (whole_box, -1)]:
        edges = ((box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in cut)
        for corner in itertools.product(*(((begin, 1), (end, -1)) for begin, end in edges)):
            corners[tuple(place for place, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not math.prod(shape) or not any(corners.values())
