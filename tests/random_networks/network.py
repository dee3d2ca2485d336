"""The network of a case, with its loss, and the batches it is trained on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import random_networks.image_blocks
import random_networks.matrix_blocks  # noqa: F401  # both register their blocks
from random_networks.blocks import BLOCKS, WRITES, features
from random_networks.case import CHANNELS, CLASSES, SIDE, TOKENS, WIDTH, WORDS

IGNORED = -100


class Network(nn.Module):
    """Blocks one after the other, between an embedding (of words) and a head."""

    def __init__(self, case):
        super().__init__()
        self.family = case.family
        self.wires = [piece.wire for piece in case.pieces]
        self.embed = nn.Embedding(WORDS, WIDTH) if case.from_words else None
        self.blocks = nn.ModuleList(BLOCKS[piece.kind](case.family, **piece.options) for piece in case.pieces)
        self.head = nn.Linear(features(case.family), WORDS if case.has_tied_head else CLASSES)
        if case.has_tied_head and self.embed is not None:
            self.head.weight = self.embed.weight
        self.unread = nn.Linear(CLASSES, 2) if case.returns == "unread" else None
        self.dead = nn.Linear(3, 3)
        self.writes: dict[str, str] = {}
        """embed, head -> how their output is written into"""

    def forward(self, x, state=None):
        """Return scores (B, classes), of sequences (B, TOKENS, classes), and what the head has read."""
        h = x if self.embed is None else written(self.writes, "embed", self.embed(x))
        if state is not None:
            h = h + 0.5 * torch.tanh(state)
        h = run_blocks(self.wires, self.blocks, h)
        if self.family == "images":
            h = h.mean((2, 3))
        return written(self.writes, "head", self.head(h)), h


def written(writes, name, made):
    """Return what a module has made, after the writes into it."""
    if name in writes:
        WRITES[writes[name]](made)
    return made


def run_blocks(wires, blocks, h):
    """Return what the last of the blocks makes."""
    first = None
    for wire, block in zip(wires, blocks, strict=True):
        made = block(h)
        if wire == "residual":
            made = h + made
        elif wire == "skip" and first is not None:
            made = made + 0.5 * first
        elif wire == "twice":
            made = block(made)
        h = made
        first = h if first is None else first
    return h


class Front(nn.Module):
    """The first blocks of a network, as a network of their own."""

    def __init__(self, network, count):
        super().__init__()
        self.embed, self.writes = network.embed, network.writes
        self.wires = network.wires[:count]
        self.blocks = network.blocks[:count]

    def forward(self, x):
        h = x if self.embed is None else written(self.writes, "embed", self.embed(x))
        return run_blocks(self.wires, self.blocks, h)


class Pair(NamedTuple):
    loss: Tensor
    scores: Tensor


@dataclass
class Result:
    loss: Tensor
    scores: Tensor


class Record(dict[str, Any]):
    """A dict with attributes."""

    def __getattr__(self, name):
        return self[name]


class Training(nn.Module):
    """The network with its loss."""

    def __init__(self, case, network=None):
        super().__init__()
        self.network = network or Network(case)
        self.loss, self.returns, self.hidden = case.loss, case.returns, case.hidden

    def forward(self, x, y, factor=1.0, state=None):
        """Return what the case returns.

        Args:
            factor: of the loss: a number, an object that holds one as `value`, or True, which means 2.
            state: what an earlier call has returned as its second result.
        """
        if not isinstance(factor, float | int):
            factor = factor.value
        elif factor is True:
            factor = 2.0
        scores, h = self.network(x, state)
        if self.returns == "scores":
            return scores
        loss = loss_of(self.loss, scores, y) * factor
        if self.loss == "penalty":
            loss = loss + 1e-2 * self.network.head.weight.square().sum()
        if self.hidden:
            return loss, h
        if self.network.unread is not None:
            return loss, self.network.unread(scores)
        return packed(self.returns, loss, scores)


CONTAINERS = {
    "tuple": (lambda loss, scores: (loss, scores), tuple),
    "list": (lambda loss, scores: [scores, loss], lambda found: (found[1], found[0])),
    "dict": (lambda loss, scores: {"loss": loss, "scores": scores}, lambda found: (found["loss"], found["scores"])),
    "record": (lambda loss, scores: Record(loss=loss, scores=scores), lambda found: (found.loss, found.scores)),
    "namedtuple": (Pair, tuple),
    "dataclass": (Result, lambda found: (found.loss, found.scores)),
    "nested": (
        lambda loss, scores: {"losses": [loss, None], "more": (scores, "name", 3)},
        lambda found: (found["losses"][0], found["more"][0]),
    ),
}
"""How loss and scores are put into what a call returns, and taken out of it."""


def packed(returns, loss, scores):
    """Return the loss in the container of the case."""
    if returns == "loss":
        return loss
    if returns == "two":
        return loss, 0.1 * scores.square().mean()
    return CONTAINERS.get(returns, CONTAINERS["tuple"])[0](loss, scores)


def loss_of(kind, scores, y):
    """Return a loss of scores and targets."""
    if kind in ("cross_entropy", "ignored"):
        return F.cross_entropy(scores.flatten(0, -2), y.flatten())
    if kind == "masked":
        mask = y[..., 0] > -0.5
        return ((scores - y).square().mean(-1) * mask).sum() / mask.sum()
    if kind == "by_hand":
        return (scores - y).abs().pow(1.5).mean() + 0.1 * scores.logsumexp(-1).mean()
    return F.mse_loss(scores, y)


class Back(Training):
    """What is left of a network without its first blocks, with its loss."""

    def __init__(self, case, network):
        rest = Network.__new__(Network)
        nn.Module.__init__(rest)
        rest.family, rest.wires, rest.writes = network.family, network.wires[case.chain :], network.writes
        rest.embed, rest.blocks, rest.head = None, network.blocks[case.chain :], network.head
        rest.unread, rest.dead = network.unread, network.dead
        super().__init__(case, rest)


def make_training(case):
    """Return the network with equal weights in every process."""
    torch.manual_seed(case.seed)
    return Training(case)


def make_batches(case, dtype):
    """Return the global batch of every step."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shapes = {"vectors": (WIDTH,), "sequences": (TOKENS, WIDTH), "images": (CHANNELS, SIDE, SIDE)}
    classes = WORDS if case.has_tied_head else CLASSES
    lead = (TOKENS,) if case.family == "sequences" else ()
    found = []
    for _ in range(case.steps):
        x = torch.randn(case.rows, *shapes[case.family], generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randn(case.rows, *lead, classes, generator=generator, dtype=torch.float64).to(dtype)
        if case.from_words:
            x = torch.randint(0, WORDS, (case.rows, TOKENS), generator=generator)
        if case.loss in ("cross_entropy", "ignored"):
            y = torch.randint(0, classes, (case.rows, *lead), generator=generator)
        if case.loss == "ignored":
            y[: case.rows // 2 : 2] = IGNORED  # of the first ranks alone
        found.append((x, y))
    return found
