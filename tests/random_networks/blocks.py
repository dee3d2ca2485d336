"""Blocks of any family: elementwise work, custom Functions, writes in place, random draws, attributes that change."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from random_networks import functions
from random_networks.case import CHANNELS, FAMILIES, WIDTH

BLOCKS = {}
"""kind -> class"""


class Block(nn.Module):
    """A part of a network that keeps the shape of its input."""

    families: ClassVar[tuple[str, ...]] = FAMILIES
    weight: ClassVar[float] = 2
    """How often it is chosen."""
    draws: ClassVar[bool] = False
    """Takes random numbers in training."""
    crosses_rows: ClassVar[bool] = False
    """A row's result depends on the other rows of its micro batch."""
    in_16_bits: ClassVar[bool] = True
    """Works under autocast, and a small change of the input changes the result a little."""
    cuts: ClassVar[dict[str, str]] = {}
    """Modules inside that `shard` may cut -> what they are: linear, conv, elementwise, layer_norm."""

    ways: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """What one of them may do with (block, input): names, one of which is drawn as `how`."""
    is_learnt: ClassVar[bool] = True
    """Has a `layer`."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        BLOCKS[cls.__name__] = cls

    def __init__(self, family, how=""):
        super().__init__()
        self.family, self.how = family, how
        self.writes: dict[str, str] = {}
        """name of a module inside -> how its output is written into"""
        if self.is_learnt:
            self.layer = layer(family)
        self.build()

    def build(self):
        """Make what else it has."""

    def forward(self, x):
        return self.ways[self.how](self, x)

    @classmethod
    def options(cls, rng):
        """Return arguments of the constructor."""
        return {"how": rng.choice(list(cls.ways))} if cls.ways else {}

    def written(self, name, made):
        """Return what the module of this name has made, after the writes into it."""
        if name in self.writes:
            WRITES[self.writes[name]](made)
        return made


def features(family):
    """Return the size of the dimension that layers work on."""
    return CHANNELS if family == "images" else WIDTH


def per_feature(family, value):
    """Return a vector in the shape in which it is broadcast over activations."""
    return value[:, None, None] if family == "images" else value


def _written_columns(h):
    h[..., 0] = 0.25
    h[..., :2] = h[..., 2:4] * 0.5


def _written_twice(h):
    h[..., 1].add_(0.5)
    h.mul_(0.8)
    h.unsqueeze(0)[0][:, 1:3].sub_(0.3)


WRITES = {
    "columns": _written_columns,
    "chained": _written_twice,
    "flat": lambda h: h.flatten(1)[:, ::2].mul_(0.5),
    "narrow": lambda h: h.narrow(-1, 1, 3).clamp_(-0.2, 0.2),
    "transposed": lambda h: h.transpose(1, -1)[:, 1].neg_(),
    "masked": lambda h: h.masked_fill_(h > 0.5, 0.1),
    "rows": lambda h: h.select(1, 0).zero_(),
}
"""Writes into a tensor in place, or into a view of it."""


def layer(family):
    """Return a learnt layer of the family."""
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) if family == "images" else nn.Linear(WIDTH, WIDTH)


class Custom(Block):
    in_16_bits = False
    weight = 5
    ways: ClassVar[Any] = {
        "straight_through": lambda s, x: functions.StraightThrough.apply(s.layer(x)),
        "reversal": lambda s, x: functions.Reversal.apply(s.layer(x), 0.5),
        "clamp": lambda s, x: functions.Clamp.apply(s.layer(x), 0.3),
        "two_results": lambda s, x: torch.add(*functions.TwoResults.apply(s.layer(x))),
        "own_scale": lambda s, x: functions.OwnScale.apply(s.layer(x), s.scale),
    }

    def build(self):
        if self.how == "own_scale":
            self.scale = nn.Parameter(torch.tensor(0.7))


class InPlace(Block):
    weight = 4
    ways: ClassVar[Any] = {
        "add": lambda h, x: h.add_(x).mul_(0.5).sub_(0.1),
        "relu": lambda h, x: F.relu(h, inplace=True) + 0.1,
        "slice_fill": lambda h, x: (h[..., :2].fill_(0.25), h)[1],
        "slice_add": lambda h, x: (h[:, 1:].add_(0.5), h)[1],
        "masked_fill": lambda h, x: (h * 1).masked_fill_(x > 0.5, 0.0),
        "copy": lambda h, x: torch.empty_like(x).copy_(h),
        "view": lambda h, x: (c := h.clone(), c.view(len(c), -1)[:, ::2].mul_(2))[0],
        "index_add": lambda h, x: h.index_add(1, torch.tensor([0, 2]), torch.ones_like(h[:, :2])),
        "zero_row": lambda h, x: (c := h.clone(), c[:, 0].copy_(x[:, 1] * 0.5))[0],
    }

    def forward(self, x):
        return torch.tanh(self.ways[self.how](self.layer(x), x))


class OnShapes(Block):
    crosses_rows = True  # its branch depends on their number

    def forward(self, x):
        if x.shape[0] % 2 == 0 and x.dim() < 4:
            x = x * 0.9
        for _ in range(x.shape[1] // 4):
            x = torch.tanh(self.layer(x))
        return x.reshape(len(x), *x.shape[1:]) if x.size(-1) > 2 else -x


class Hooked(Block):
    """A hook on an activation."""

    weight = 3

    def forward(self, x):
        h = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return torch.tanh(h)


def _of_rows(h):
    """Return one empty number for each row."""
    return h.new_empty((h.shape[0], *[1] * (h.dim() - 1)))


class Noise(Block):
    in_16_bits = False
    draws = True
    weight = 3
    ways: ClassVar[Any] = {
        "randn_like": lambda h: h + 0.1 * torch.randn_like(h),
        "rand_like": lambda h: h * torch.rand_like(h),
        "rand": lambda h: h + torch.rand(h.shape, dtype=h.dtype, device=h.device),
        "randn": lambda h: h + 0.1 * torch.randn(_of_rows(h).shape, dtype=h.dtype),
        "bernoulli_rows": lambda h: h * _of_rows(h).bernoulli_(0.8).div_(0.8),
        "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.7)),
        "normal_": lambda h: h + torch.empty_like(h).normal_(0, 0.1),
    }

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        return self.ways[self.how](h) if self.training else h


class UsersNumbers(Block):
    """Takes numbers of Python's or numpy's streams."""

    in_16_bits = False
    weight = 1
    ways: ClassVar[Any] = {
        "random": lambda s, x: torch.tanh(s.layer(x)) * random.uniform(0.5, 1.5),
        "choice": lambda s, x: torch.tanh(s.layer(x)) * random.choice([0.5, 1.0, 2.0]),
        "numpy": lambda s, x: torch.tanh(s.layer(x)) * float(np.random.rand()),
    }


class Dropout(Block):
    draws = True
    weight = 4
    ways: ClassVar[Any] = {
        "function": lambda s, x: F.dropout(s.layer(x), 0.3, s.training),
        **dict.fromkeys(("module", "channels", "changing"), lambda s, x: s.drop(s.layer(x))),
    }

    def build(self):
        self.drop = nn.Dropout2d(0.4) if self.how == "channels" and self.family == "images" else nn.Dropout(0.4)

    def change(self):
        """Change what users change between steps."""
        if self.how == "changing":
            self.drop.p = 0.1


class Changing(Block):
    """Something of the module changes between the steps."""

    weight = 5
    ways: ClassVar[Any] = {
        "attribute": lambda s: setattr(s, "alpha", -0.3),
        "nested": lambda s: s.settings["inner"].update(shift=-0.4),
        "list": lambda s: s.flags.clear(),
        "buffer": lambda s: setattr(s, "shift", torch.full_like(s.shift, -0.3)),
        "buffer_in_place": lambda s: s.shift.mul_(-2),
        "parameter": lambda s: setattr(s, "scale", nn.Parameter(torch.full((features(s.family),), -0.6))),
        "parameter_in_place": lambda s: s.scale.data.mul_(-0.5),
        "module": lambda s: setattr(s, "layer", layer_of_seed(s.family, 77)),
        "frozen": lambda s: s.scale.requires_grad_(requires_grad=False),
        "method": lambda s: setattr(s, "activate", torch.sigmoid),
    }

    def build(self):
        self.alpha = 0.5
        self.settings = {"inner": {"shift": 0.1}}
        self.flags = [True]
        self.register_buffer("shift", torch.full((features(self.family),), 0.1))
        self.scale = nn.Parameter(torch.full((features(self.family),), 0.9))

    def activate(self, x):
        """Return tanh; replaced by "method"."""
        return torch.tanh(x)

    def forward(self, x):
        h = self.layer(x) * self.alpha
        if self.flags:
            h = h * 1.5
        h = self.activate(h * per_feature(self.family, self.scale) + per_feature(self.family, self.shift))
        return h + self.settings["inner"]["shift"]

    def change(self):
        """Change what users change between steps."""
        self.ways[self.how](self)


def layer_of_seed(family, seed):
    """Return a layer whose weights do not depend on what was drawn before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return layer(family)


class WithKeywords(Block):
    def inner(self, x, *, scale=1.0, shift=None, mask=None):
        h = self.named(x, scale=scale)
        return h if shift is None else h + shift

    def build(self):
        self.named = Named(self.family)

    def forward(self, x):
        return self.inner(x=self.inner(x, scale=0.5), shift=x * 0.1, mask=None)


class Named(nn.Module):
    """A module with an argument by name."""

    def __init__(self, family):
        super().__init__()
        self.layer = layer(family)

    def forward(self, x, *, scale=1.0):
        return self.layer(x) * scale


@dataclasses.dataclass
class Output:
    """A result as models have it."""

    hidden: Tensor
    extra: Tensor | None = None


class Inner(nn.Module):
    """A module with two results, in a container."""

    def __init__(self, family, pack):
        super().__init__()
        self.layer, self.other = layer(family), layer(family)
        self.pack = pack

    def forward(self, x):
        return self.pack(self.layer(x), self.other(x))


class Results(Block):
    weight = 3
    is_learnt = False
    ways: ClassVar[Any] = {
        "dict": (lambda h, extra: {"hidden": h, "extra": extra, "nothing": None}, lambda r: r["hidden"] + r["extra"]),
        "dataclass": (Output, lambda r: r.hidden * torch.sigmoid(r.extra)),
        "nested": (lambda h, extra: (h, [extra, None]), lambda r: r[0] - r[1][0]),
        # the other one is not read: its parameters have no gradient
        "tuple": (lambda h, extra: (h, extra), lambda r: r[0]),
    }

    def build(self):
        self.inner = Inner(self.family, self.ways[self.how][0])

    def forward(self, x):
        return self.ways[self.how][1](self.inner(x))


def _gated(s, x):
    with torch.no_grad():
        gate = torch.sigmoid(s.layer(x))
    return torch.tanh(s.layer(x)) * gate + s.other(x)


class Detached(Block):
    ways: ClassVar[Any] = {"detach": lambda s, x: s.layer(x) * torch.sigmoid(s.other(x)).detach(), "no_grad": _gated}

    def build(self):
        self.other = layer(self.family)


class Running(Block):
    """Buffers that forward writes."""

    crosses_rows = True
    weight = 3
    ways: ClassVar[Any] = dict.fromkeys(("in_place", "assigned", "count", "python_count"))

    def build(self):
        self.register_buffer("mean", torch.zeros(features(self.family)))
        self.register_buffer("count", torch.tensor(0))
        self.calls = 0

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        if self.training:
            others = (0, 2, 3) if self.family == "images" else tuple(range(h.dim() - 1))
            now = h.detach().mean(others)
            if self.how == "in_place":
                self.mean.mul_(0.9).add_(now, alpha=0.1)
            elif self.how == "assigned":
                self.mean = 0.9 * self.mean + 0.1 * now
            elif self.how == "count":
                self.count += 1
                self.mean.copy_(now / self.count)
            else:
                self.calls += 1
                return h / self.calls
        return h - per_feature(self.family, self.mean)


def _split_uneven(h, _):
    first, second = h.split([1, h.shape[1] - 1], 1)
    return torch.cat([second, first * 2], 1)


def _stacked(h, x):
    first, second = torch.stack([h, x * 2]).unbind(0)
    return torch.tanh(first) + second * 0.5


def _repeated(h, x):
    return h.repeat_interleave(2, 1)[:, ::2] + x.repeat(1, 2, *[1] * (x.dim() - 2))[:, : x.shape[1]]


class Reordered(Block):
    weight = 4
    ways: ClassVar[Any] = {
        "flip": lambda h, x: h.flip(-1) + x,
        "roll": lambda h, x: h.roll(1, 1) - x,
        "pad": lambda h, x: F.pad(h, (1, 0))[..., :-1] + x,
        "stack_unbind": _stacked,
        "cat_chunk": lambda h, x: torch.mul(*torch.cat([h, torch.tanh(x)], 1).chunk(2, 1)),
        "where": lambda h, x: torch.where(x > 0, h, torch.zeros_like(h)),
        "split_uneven": _split_uneven,
        "permute": lambda h, x: torch.tanh(h.movedim(0, -1).contiguous()).movedim(-1, 0),
        "repeat": _repeated,
        "gather": lambda h, x: h.gather(1, h.argsort(1, descending=True)),
        "cumsum": lambda h, x: h.cumsum(1) * 0.3,
        "expand": lambda h, x: h + x.mean(1, keepdim=True).expand_as(x),
        "unfold": lambda h, x: h + h.unfold(-1, 2, 2).sum(-1).sum(-1, keepdim=True),
        "index": lambda h, x: h[:, torch.arange(h.shape[1] - 1, -1, -1)],
        "select": lambda h, x: h + h[:, 0].unsqueeze(1) * 0.5,
        "tensor_split": lambda h, x: torch.cat(h.sin().tensor_split(2, dim=-1)[::-1], -1),
    }

    def forward(self, x):
        return self.ways[self.how](self.layer(x), x)


class Checkpointed(Block):
    weight = 5

    def __init__(self, family, use_reentrant, inner):
        super().__init__(family)
        self.use_reentrant, self.inner = use_reentrant, inner
        self.other = layer(family)

    @classmethod
    def options(cls, rng):
        return {"use_reentrant": rng.random() < 0.5, "inner": rng.choice(["two", "nested", "method"])}

    def work(self, x):
        """Return two layers' work."""
        return self.other(torch.tanh(self.layer(x)))

    def forward(self, x):
        if self.inner == "nested":
            return self.other(checkpoint(self.layer, x, use_reentrant=self.use_reentrant))
        work = self.work if self.inner == "method" else lambda h: torch.tanh(self.work(h))
        return checkpoint(work, x, use_reentrant=self.use_reentrant)


class ReadsANumber(Block):
    """Cannot be one graph: forward reads a value, that of all rows of a call."""

    weight = 0.2
    crosses_rows = True
    is_learnt = False

    def forward(self, x):
        return x / max(1.0, x.abs().max().item())


class Elementwise(Block):
    cuts: ClassVar[dict[str, str]] = {"activation": "elementwise"}
    ways: ClassVar[Any] = {"tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "softplus": nn.Softplus}

    def build(self):
        self.activation = self.ways[self.how]()

    def forward(self, x):
        made = self.activation(self.written("layer", self.layer(x)))
        return self.written("activation", made)
