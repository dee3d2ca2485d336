"""Blocks of any family: elementwise work, custom Functions, writes in place, random draws, attributes that change."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from random_networks import functions
from random_networks.case import CHANNELS, FAMILIES, WIDTH

BLOCKS: dict[str, type[Block]] = {}
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        BLOCKS[cls.__name__] = cls

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        self.writes: dict[str, str] = {}
        """name of a module inside -> how its output is written into"""

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        """Return arguments of the constructor."""
        return {}

    def written(self, name: str, made: Tensor) -> Tensor:
        """Return what the module of this name has made, after the writes into it."""
        if name in self.writes:
            write_into(self.writes[name], made)
        return made


def features(family: str) -> int:
    """Return the size of the dimension that layers work on."""
    return CHANNELS if family == "images" else WIDTH


def per_feature(family: str, value: Tensor) -> Tensor:
    """Return a vector in the shape in which it is broadcast over activations."""
    return value[:, None, None] if family == "images" else value


WRITES = ("column", "columns", "add", "flat", "narrow", "transposed", "last", "masked", "rows", "chained")


def write_into(how: str, h: Tensor) -> None:
    """Write into a tensor in place, or into a view of it."""
    if how == "column":
        h[..., 0] = 0.25
    elif how == "columns":
        h[..., :2] = h[..., 2:4] * 0.5
    elif how == "add":
        h[..., 1].add_(0.5)
        h += 0.1
    elif how == "flat":
        h.flatten(1)[:, ::2].mul_(0.5)
    elif how == "narrow":
        h.narrow(-1, 1, 3).clamp_(-0.2, 0.2)
    elif how == "transposed":
        h.transpose(1, -1)[:, 1].neg_()
    elif how == "last":
        h[..., -1] = h[..., 0].sigmoid()
    elif how == "masked":
        h.masked_fill_(h > 0.5, 0.1)
    elif how == "rows":
        h.select(1, 0).zero_()
    else:
        h.mul_(0.8)
        h.unsqueeze(0)[0][:, 1:3].sub_(0.3)


def layer(family: str) -> nn.Module:
    """Return a learnt layer of the family."""
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) if family == "images" else nn.Linear(WIDTH, WIDTH)


class Custom(Block):
    in_16_bits = False
    weight = 5

    def __init__(self, family: str, which: str) -> None:
        super().__init__(family)
        self.which = which
        self.layer = layer(family)
        if which == "own_scale":
            self.scale = nn.Parameter(torch.tensor(0.7))

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"which": rng.choice(["straight_through", "reversal", "clamp", "two_results", "own_scale"])}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.which == "straight_through":
            return functions.StraightThrough.apply(h)
        if self.which == "reversal":
            return functions.Reversal.apply(h, 0.5)
        if self.which == "clamp":
            return functions.Clamp.apply(h, 0.3)
        if self.which == "two_results":
            first, second = functions.TwoResults.apply(h)
            return first * 0.5 + second
        return functions.OwnScale.apply(h, self.scale)


class InPlace(Block):
    weight = 4

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.layer = layer(family)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        ways = [
            "add",
            "relu",
            "clamp",
            "slice_fill",
            "slice_add",
            "masked_fill",
            "copy",
            "view",
            "index_add",
            "zero_row",
        ]
        return {"how": rng.choice(ways)}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.how == "add":
            h += x
            h.mul_(0.5).sub_(0.1)
        elif self.how == "relu":
            h = F.relu(h, inplace=True)
            h = h + 0.1
        elif self.how == "clamp":
            h.clamp_(-0.5, 0.5)
        elif self.how == "slice_fill":
            h[..., :2] = 0.25
        elif self.how == "slice_add":
            h[:, 1:] += 0.5
        elif self.how == "masked_fill":
            h = h * 1
            h.masked_fill_(x > 0.5, 0.0)
        elif self.how == "copy":
            h = torch.empty_like(x).copy_(h)
        elif self.how == "view":
            h = h.clone()
            h.view(h.shape[0], -1)[:, ::2].mul_(2)
        elif self.how == "index_add":
            h = h.index_add(1, torch.tensor([0, 2]), torch.ones_like(h[:, :2]))
        else:
            h = h.clone()
            h[:, 0] = x[:, 1] * 0.5
        return torch.tanh(h)


class OnShapes(Block):
    crosses_rows = True  # its branch depends on their number

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer = layer(family)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2 == 0 and x.dim() < 4:
            x = x * 0.9
        for _ in range(x.shape[1] // 4):
            x = torch.tanh(self.layer(x))
        return x.reshape(len(x), *x.shape[1:]) if x.size(-1) > 2 else -x


class Hooked(Block):
    """A hook on an activation."""

    weight = 3

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer = layer(family)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return torch.tanh(h)


class Noise(Block):
    in_16_bits = False
    draws = True
    weight = 3

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.layer = layer(family)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {
            "how": rng.choice(["randn_like", "rand_like", "rand", "randn", "bernoulli_rows", "bernoulli", "normal_"])
        }

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        if not self.training:
            return h
        if self.how == "randn_like":
            return h + 0.1 * torch.randn_like(h)
        if self.how == "rand_like":
            return h * torch.rand_like(h)
        if self.how == "rand":
            return h + torch.rand(h.shape, dtype=h.dtype, device=h.device)
        if self.how == "randn":
            return h + 0.1 * torch.randn(h.shape[0], *[1] * (h.dim() - 1), dtype=h.dtype)
        if self.how == "bernoulli_rows":
            keep = h.new_empty((h.shape[0], *[1] * (h.dim() - 1))).bernoulli_(0.8)
            return h * keep.div_(0.8)
        if self.how == "bernoulli":
            return h * torch.bernoulli(torch.full_like(h, 0.7))
        return h + torch.empty_like(h).normal_(0, 0.1)


class UsersNumbers(Block):
    """Takes numbers of Python's or numpy's streams."""

    in_16_bits = False
    weight = 1

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.layer = layer(family)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["uniform", "random", "choice", "randint", "numpy"])}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        if self.how == "uniform":
            return h * random.uniform(0.5, 1.5)
        if self.how == "random":
            return h + random.random()
        if self.how == "choice":
            return h * random.choice([0.5, 1.0, 2.0])
        if self.how == "randint":
            return h.roll(random.randint(0, 3), -1)
        return h * float(np.random.rand())


class Dropout(Block):
    draws = True
    weight = 4

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.layer = layer(family)
        self.drop = nn.Dropout2d(0.4) if how == "channels" and family == "images" else nn.Dropout(0.4)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["module", "function", "channels", "changing"])}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return F.dropout(h, 0.3, self.training) if self.how == "function" else self.drop(h)

    def change(self) -> None:
        """Change what users change between steps."""
        if self.how == "changing":
            self.drop.p = 0.1


class Changing(Block):
    """Something of the module changes between the steps."""

    weight = 5

    def __init__(self, family: str, what: str) -> None:
        super().__init__(family)
        self.what = what
        self.alpha = 0.5
        self.settings = {"alpha": 0.5, "inner": {"shift": 0.1}}
        self.flags = [True]
        self.layer = layer(family)
        self.register_buffer("shift", torch.full((features(family),), 0.1))
        self.scale = nn.Parameter(torch.full((features(family),), 0.9))

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        whats = ["attribute", "dict", "nested", "list", "buffer", "buffer_in_place", "parameter", "parameter_in_place"]
        return {"what": rng.choice([*whats, "module", "frozen", "method"])}

    def activate(self, x: Tensor) -> Tensor:
        """Return tanh; replaced by "method"."""
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * self.alpha + self.settings["alpha"] * x
        if self.flags[0]:
            h = h * 1.5
        h = self.activate(h * per_feature(self.family, self.scale) + per_feature(self.family, self.shift))
        return h + self.settings["inner"]["shift"]

    def change(self) -> None:
        """Change what users change between steps."""
        if self.what == "attribute":
            self.alpha = -0.3
        elif self.what == "dict":
            self.settings["alpha"] = -0.2
        elif self.what == "nested":
            self.settings["inner"]["shift"] = -0.4
        elif self.what == "list":
            self.flags[0] = False
        elif self.what == "buffer":
            self.shift = torch.full_like(self.shift, -0.3)
        elif self.what == "buffer_in_place":
            self.shift.mul_(-2)
        elif self.what == "parameter":
            self.scale = nn.Parameter(torch.full((features(self.family),), -0.6))
        elif self.what == "parameter_in_place":
            with torch.no_grad():
                self.scale.mul_(-0.5)
        elif self.what == "module":
            rng = torch.get_rng_state()
            torch.manual_seed(77)
            self.layer = layer(self.family)
            torch.set_rng_state(rng)
        elif self.what == "frozen":
            self.scale.requires_grad_(requires_grad=False)
        else:
            self.activate = torch.sigmoid


class WithKeywords(Block):
    class Inner(nn.Module):
        def __init__(self, family: str) -> None:
            super().__init__()
            self.layer = layer(family)

        def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor | None = None, mask: Any = None) -> Tensor:
            h = self.layer(x) * scale
            return h if shift is None else h + shift

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.inner = WithKeywords.Inner(family)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=self.inner(x, scale=0.5), shift=x * 0.1, mask=None)


@dataclasses.dataclass
class Output:
    """A result as models have it."""

    hidden: Tensor
    extra: Tensor | None = None


class Results(Block):
    weight = 3

    class Inner(nn.Module):
        def __init__(self, family: str, how: str) -> None:
            super().__init__()
            self.layer = layer(family)
            self.other = layer(family)
            self.how = how

        def forward(self, x: Tensor) -> Any:
            h, extra = self.layer(x), self.other(x)
            if self.how == "dict":
                return {"hidden": h, "extra": extra, "nothing": None}
            if self.how == "dataclass":
                return Output(h, extra)
            return (h, [extra, None]) if self.how == "nested" else (h, extra)

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.inner = Results.Inner(family, how)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["dict", "tuple", "dataclass", "nested"])}

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        if self.how == "dict":
            return found["hidden"] + torch.tanh(found["extra"])
        if self.how == "dataclass":
            return found.hidden * torch.sigmoid(found.extra)
        if self.how == "nested":
            return found[0] - found[1][0]
        return found[0]  # the other one is not read: its parameters have no gradient


class Detached(Block):
    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.layer = layer(family)
        self.other = layer(family)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["detach", "no_grad"])}

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detach":
            return self.layer(x) * torch.sigmoid(self.other(x)).detach()
        with torch.no_grad():
            gate = torch.sigmoid(self.layer(x))
        return torch.tanh(self.layer(x)) * gate + self.other(x)


class Running(Block):
    """Buffers that forward writes."""

    crosses_rows = True
    weight = 3

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.layer = layer(family)
        self.register_buffer("mean", torch.zeros(features(family)))
        self.register_buffer("count", torch.tensor(0))
        self.calls = 0

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["in_place", "assigned", "count", "python_count"])}

    def forward(self, x: Tensor) -> Tensor:
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


class Reordered(Block):
    weight = 4

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.layer = layer(family)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        ways = [
            "flip",
            "roll",
            "pad",
            "stack_unbind",
            "cat_chunk",
            "where",
            "split_uneven",
            "permute",
            "repeat",
            "gather",
        ]
        return {"how": rng.choice([*ways, "cumsum", "expand", "unfold", "index", "select", "tensor_split"])}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.how == "flip":
            return h.flip(-1) + x
        if self.how == "roll":
            return h.roll(1, 1) - x
        if self.how == "pad":
            return F.pad(h, (1, 0))[..., :-1] + x
        if self.how == "stack_unbind":
            first, second = torch.stack([h, x * 2]).unbind(0)
            return torch.tanh(first) + second * 0.5
        if self.how == "cat_chunk":
            first, second = torch.cat([h, torch.tanh(x)], 1).chunk(2, 1)
            return first * second
        if self.how == "where":
            return torch.where(x > 0, h, torch.zeros_like(h))
        if self.how == "split_uneven":
            first, second = h.split([1, h.shape[1] - 1], 1)
            return torch.cat([second, first * 2], 1)
        if self.how == "permute":
            turned = h.movedim(0, -1).contiguous()
            return torch.tanh(turned).movedim(-1, 0)
        if self.how == "repeat":
            return h.repeat_interleave(2, 1)[:, ::2] + x.repeat(1, 2, *[1] * (x.dim() - 2))[:, : x.shape[1]]
        if self.how == "gather":
            order = h.argsort(1, descending=True)
            return h.gather(1, order)
        if self.how == "cumsum":
            return h.cumsum(1) * 0.3
        if self.how == "expand":
            return h + x.mean(1, keepdim=True).expand_as(x)
        if self.how == "unfold":
            return h + h.unfold(-1, 2, 2).sum(-1).sum(-1, keepdim=True)
        if self.how == "index":
            return h[:, torch.arange(h.shape[1] - 1, -1, -1)]
        if self.how == "select":
            return h + h[:, 0].unsqueeze(1) * 0.5
        first, second = h.tensor_split(2, dim=-1)
        return torch.cat([second.sin(), first], -1)


class Checkpointed(Block):
    weight = 5

    def __init__(self, family: str, use_reentrant: bool, inner: str) -> None:
        super().__init__(family)
        self.use_reentrant = use_reentrant
        self.layer = layer(family)
        self.other = layer(family)
        self.inner = inner

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"use_reentrant": rng.random() < 0.5, "inner": rng.choice(["two", "nested", "method"])}

    def work(self, x: Tensor) -> Tensor:
        """Return two layers' work."""
        return self.other(torch.tanh(self.layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.inner == "method":
            return checkpoint(self.work, x, use_reentrant=self.use_reentrant)
        if self.inner == "nested":
            return self.other(checkpoint(self.layer, x, use_reentrant=self.use_reentrant))
        return checkpoint(lambda h: torch.tanh(self.work(h)), x, use_reentrant=self.use_reentrant)


class ReadsANumber(Block):
    """Cannot be one graph: forward reads a value, that of all rows of a call."""

    weight = 0.2
    crosses_rows = True

    def forward(self, x: Tensor) -> Tensor:
        return x / max(1.0, x.abs().max().item())


class Elementwise(Block):
    cuts: ClassVar[dict[str, str]] = {"activation": "elementwise"}

    def __init__(self, family: str, which: str) -> None:
        super().__init__(family)
        activations: dict[str, Callable[[], nn.Module]] = {
            "tanh": nn.Tanh,
            "gelu": nn.GELU,
            "silu": nn.SiLU,
            "softplus": nn.Softplus,
        }
        self.activation = activations[which]()
        self.layer = layer(family)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"which": rng.choice(["tanh", "gelu", "silu", "softplus"])}

    def forward(self, x: Tensor) -> Tensor:
        made = self.activation(self.written("layer", self.layer(x)))
        return self.written("activation", made)
