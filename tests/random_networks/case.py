"""Case: one random network with one way to train it, as data that can be written down, shrunk and run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

WIDTH, TOKENS, CLASSES, WORDS = 8, 4, 6, 12
CHANNELS, SIDE = 4, 6
FAMILIES = ("vectors", "sequences", "images")
"""Shapes of activations: (B, WIDTH), (B, TOKENS, WIDTH), (B, CHANNELS, SIDE, SIDE)."""


@dataclass(frozen=True)
class Piece:
    """One block of the network."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    wire: str = "chain"
    """chain: h = f(h); residual: h = h + f(h); skip: h = f(h) + what the first block has made; twice: h = f(f(h))"""


@dataclass(frozen=True)
class Case:
    """What is trained and how. Every field but the first few may be left out."""

    world_size: int
    family: str
    pieces: tuple[Piece, ...]
    seed: int = 1
    rows: int = 16
    """Of the global batch."""
    steps: int = 3
    from_words: bool = False
    """Sequences begin with an embedding of whole numbers."""
    has_tied_head: bool = False
    """The head reads the embedding's weight."""
    loss: str = "mse"
    """masked, ignored: of some of the rows or tokens, more on one rank than on another."""
    returns: str = "loss"
    """loss; tuple, dict, list, namedtuple, dataclass, record, nested: with the scores; unread: with what a module makes
    that the loss does not read; two: two losses; scores: these alone, the loss is taken outside; both: a loss, and
    another one of the scores outside."""
    mode: str = "semi_auto"
    backward: str = "once"
    """once; retain: of two losses, the second after the first; calls: of two calls, added; reversed: of two calls."""
    hidden: str = ""
    """A state is handed on from call to call: detached, or kept through the two calls of a step."""
    chain: int = 0
    """So many blocks stand in a network of their own, whose result the other one gets."""
    habits: tuple[tuple[Any, ...], ...] = ()
    """What is done to the network before and between the steps; see `habits.py`."""
    cuts: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(module path, arguments of shard)."""
    hsdp: Mapping[str, Any] | None = None
    pipeline: Mapping[str, Any] | None = None
    """stages, scheduler, interleave, micro_size"""
    wrappers: tuple[tuple[str, int], ...] = ()
    """("copies" or "accumulate", parts), outermost first."""
    dataset: str = "data_parallel"
    form: str = "module"
    """module: loss.backward() in a loop; step: a step function with value_and_grad."""
    is_16_bit: bool = False
    settings: tuple[tuple[Any, ...], ...] = ()
    """Further setters of AutoParallel with their arguments."""
    optimizer: tuple[str, Mapping[str, Any]] = ("sgd", {})
    optimizer_made: str = "before"
    """before or after the first call."""
    clip: str = "none"
    """none, torch or msrun."""
    finish: str = "none"
    """What is saved after training: none, state_dict, deepcopy, averaged; ema, ema_later: a copy that follows, made
    before the first call or after the first step; lookahead: the weights, which go back to others half of the way."""

    @property
    def parts(self):
        """Into how many parts wrappers and the pipeline cut each rank's rows."""
        total = self.pipeline["micro_size"] if self.pipeline else 1
        for _, count in self.wrappers:
            total *= count
        return int(total)

    @property
    def data_ranks(self):
        """Ranks that pass different rows."""
        if self.dataset == "full_batch":
            return 1
        return self.world_size // (self.pipeline["stages"] if self.pipeline else 1)

    def to_json(self):
        """Return text that `parse_case` reads; features that are off are left out."""
        default = Case(self.world_size, self.family, ())
        kept = ("world_size", "family", "pieces")
        found = {k: v for k, v in asdict(self).items() if k in kept or v != asdict(default)[k]}
        found["pieces"] = [{k: v for k, v in piece.items() if v and v != "chain"} for piece in found["pieces"]]
        return json.dumps(found)

    def changed(self, **changes):
        """Return a copy with other features."""
        return replace(self, **changes)


def parse_case(text):
    """Return the case that `Case.to_json` has written."""
    found = json.loads(text)
    found["pieces"] = tuple(Piece(**piece) for piece in found["pieces"])
    for name in ("habits", "settings", "wrappers"):
        found[name] = tuple(tuple(entry) for entry in found.get(name, ()))
    found["cuts"] = tuple((path, arguments) for path, arguments in found.get("cuts", ()))
    if "optimizer" in found:
        found["optimizer"] = tuple(found["optimizer"])
    return Case(**found)
