"""Forward passes that nobody here wrote, and attributes that change between the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from msrun.runtime import GradAccumulation, MicroBatchInterleaved, shard
from training_habits.trial import MODES, Trial, train
from training_habits.trial import habit as script

STEPS = 4
IN_PARTS = ("semi_auto", "hsdp level1", "hsdp level3", "shard")
"""Modes in which the network sees the whole batch, or copies and micro batches of it."""


class Net(nn.Module):
    """`forward` makes 4 values of each row; the loss is their squared distance."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor, y: Tensor) -> Any:
        result = self._forward(self, x)
        return F.mse_loss(result, y) if isinstance(result, Tensor) else (F.mse_loss(result[0], y), *result[1:])


def habit(
    name: str, forward: Callable[..., Any], between: Any = None, modes: tuple[str, ...] = MODES, **parts: Any
) -> None:
    """Add one; parts are made anew by calling those that are functions."""

    def make() -> nn.Module:
        return Net(forward, **{k: p() if callable(p) and not isinstance(p, nn.Module) else p for k, p in parts.items()})

    trained(name, make, between, modes)


def trained(name: str, make: Callable[[], nn.Module], between: Any = None, modes: tuple[str, ...] = MODES) -> None:
    """Add one whose network is made by `make`."""
    _MAKERS[name] = make

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        result = step(x, y)
        return result if isinstance(result, Tensor) else result[0]

    @script(name, modes)
    def _(t: Trial) -> None:
        train(t, make(), steps=STEPS, loss_of=loss_of, before=between or (lambda _net, _step: None))


_MAKERS: dict[str, Callable[[], nn.Module]] = {}


# -- functions with a backward pass of their own -----------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """Straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Normalized(torch.autograd.Function):
    """Looks at all values at once, and has two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        norm = x.norm()
        ctx.save_for_backward(x, norm, weight)
        ctx.mark_non_differentiable(norm)
        return x / norm * weight, norm

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, norm, weight = ctx.saved_tensors
        return gradient * weight / norm, (gradient * x / norm).sum(0)


def _hooked(hook: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.layer(x)
        h.register_hook(hook)
        return self.head(h.tanh())

    return forward


habit("straight-through estimator", lambda s, x: s.head(Rounded.apply(s.layer(x))))
habit("gradient reversal", lambda s, x: s.head(Reversed.apply(s.layer(x), 0.3)) + s.head(x))
habit(
    "function that looks at the whole batch",
    lambda s, x: Normalized.apply(s.head(s.layer(x)), s.weight)[0],
    weight=lambda: nn.Parameter(torch.ones(4)),
)
habit("tensor hook", _hooked(lambda g: g * 3))
habit("tensor hook that looks at the whole gradient", _hooked(lambda g: g / (1 + g.norm())))

# -- torch.utils.checkpoint --------------------------------------------------------------------------------------------


def _checkpointed(*, use_reentrant: bool) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.layer(x)
        for _ in range(2):
            h = checkpoint(lambda t: self.layer(t).tanh(), h, use_reentrant=use_reentrant)
        return self.head(h)

    return forward


habit("checkpoint", _checkpointed(use_reentrant=False))
habit("reentrant checkpoint", _checkpointed(use_reentrant=True))
habit(
    "reentrant checkpoint of a layer that nothing else reaches",
    lambda s, x: s.head(checkpoint(s.layer, s.inner(x), use_reentrant=True)),
    inner=lambda: nn.Linear(8, 8),
    modes=("data_parallel", "data_parallel hsdp"),
)

# -- attributes that change --------------------------------------------------------------------------------------------


def _alpha(net: Any, step: int) -> None:
    net.alpha = 1.0 - 0.25 * (step % 2)


def _beta(net: Any, step: int) -> None:
    net.settings["beta"] = float(step)


def _assigned_buffer(net: Any, step: int) -> None:
    net.scale = torch.full((4,), 1.0 + step)


def _assigned_parameter(net: Any, step: int) -> None:
    if step == 2:
        torch.manual_seed(7)
        net.layer.weight = nn.Parameter(torch.randn(8, 8))


def _assigned_module(net: Any, step: int) -> None:
    if step == 2:
        torch.manual_seed(7)
        net.layer = nn.Linear(8, 8)


def _frozen(net: Any, step: int) -> None:
    net.layer.bias.requires_grad_(step % 2 == 0)


def _late_hook(net: Any, step: int) -> None:
    if step == 2:
        net.layer.register_forward_hook(lambda _module, _args, result: result * 2)


habit("attribute that changes", lambda s, x: s.head(s.layer(x)) * s.alpha, _alpha, alpha=1.0)
habit(
    "value in a dict that changes", lambda s, x: s.head(s.layer(x)) + s.settings["beta"], _beta, settings={"beta": 0.0}
)
habit(
    "buffer that is assigned", lambda s, x: s.head(s.layer(x)) * s.scale, _assigned_buffer, scale=lambda: torch.ones(4)
)
habit("parameter that is assigned", lambda s, x: s.head(s.layer(x)), _assigned_parameter)
habit("module that is assigned", lambda s, x: s.head(s.layer(x)), _assigned_module)
habit("parameter that is frozen and trained again", lambda s, x: s.head(s.layer(x)), _frozen)
habit("hook that comes later", lambda s, x: s.head(s.layer(x)), _late_hook)


def _counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    self.last = self.layer(x)
    self.seen = self.seen * 0.9 + self.last.detach().mean(0)
    return self.head(self.last) / self.calls


habit("attributes that the forward pass sets", _counting, calls=0, seen=lambda: torch.zeros(8))

# -- writes into parts of tensors --------------------------------------------------------------------------------------


def _shifted(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x)
    shifted = torch.zeros_like(h)
    shifted[:, 1:] = h[:, :-1].clone()
    shifted[:, 0] = 0.5
    return self.head(shifted)


habit("writes into slices", _shifted)


def _column_written(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x)
    h[:, 0] = 0
    h.view(-1, 2, 4)[:, 1].mul_(3)
    return self.head(h)


def _detected(self: Any, x: Tensor) -> Tensor:
    y = self.head(self.layer(x))
    y[..., 0] = torch.sigmoid(y[..., 0])
    y[..., 1:3] = y[..., 1:3] * 2
    return y


def _cut_by(strategy: Any, forward: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        network = Net(forward)
        shard(network.layer, strategy)
        shard(network.head, strategy)
        return network

    return make


for _cut in (((2, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (1, 2))):
    trained(f"columns written of a layer cut by {_cut}", _cut_by(_cut, _column_written), modes=("semi_auto",))
    trained(f"head of a detector cut by {_cut}", _cut_by(_cut, _detected), modes=("semi_auto",))
habit(
    "mask made in forward",
    lambda s, x: s.head(s.layer(x).masked_fill(torch.ones(8, 8).triu(1).bool(), 0.0)),
    modes=IN_PARTS,  # for the rows of the whole batch
)

# -- functions of torch that are traced with help ----------------------------------------------------------------------


def _ctc(self: Any, x: Tensor) -> Tensor:
    rows = self.head(self.layer(x)).log_softmax(-1)[:, None].expand(-1, 2, -1)
    loss = F.ctc_loss(rows, torch.tensor([[1, 2], [2, 1]]), torch.tensor([8, 6]), torch.tensor([2, 1]))
    return self.head(self.layer(x)) * loss


trained("CTC over the whole batch", lambda: Net(_ctc), modes=("shard",))

# -- structures --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    hidden: Tensor
    mean: Tensor


def _structured(self: Any, x: Tensor) -> Any:
    h = self.layer(x)
    return self.head(h), Result(h, h.mean()), {"h": [h, None, 3]}


habit("dataclass among the results", _structured)
habit(
    "nn.Transformer whose mask is made in forward",
    lambda s, x: s.head(s.inner(x[None], x[None], tgt_mask=nn.Transformer.generate_square_subsequent_mask(8))[0]),
    inner=lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
    modes=IN_PARTS,  # a mask for the rows of the whole batch
)
habit("LSTM", lambda s, x: s.head(s.inner(x[None])[0][0]), inner=lambda: nn.LSTM(8, 8))
habit("forward hook", lambda s, x: s.head(s.inner(x)), inner=lambda: _with_hook(nn.Linear(8, 8)))


def _with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _module, _args, result: result * 2)
    module.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    return module


# -- the same under other plans ----------------------------------------------------------------------------------------

_plain = _MAKERS["straight-through estimator"]
trained(
    "straight-through estimator in copies and micro batches",
    lambda: GradAccumulation(MicroBatchInterleaved(_plain(), 2), 2),
    modes=IN_PARTS,
)
trained(
    "function cut as the user says",
    lambda: Net(lambda s, x: s.head(_cut_rounding(s.layer(x)))),
    modes=("semi_auto", "hsdp level1", "hsdp level3", "shard"),
)
_cut_rounding = shard(lambda h: Rounded.apply(h), ((1, 2),), ((1, 2),))

# -- one run of the Python code for several parts of the batch ---------------------------------------------------------


def _counted(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.head(self.layer(x)) / self.calls


def _alternating(self: Any, x: Tensor) -> Tensor:
    self.odd = not self.odd
    return self.head(self.layer(x)) * (2.0 if self.odd else 1.0)


def _listed(self: Any, x: Tensor) -> Tensor:
    self.seen.append(1.0)
    return self.head(self.layer(x)) / len(self.seen)


for _name, _forward, _parts in (
    ("number counted by the call", _counted, {"calls": 0}),
    ("flag turned by the call", _alternating, {"odd": False}),
    ("list grown by the call", _listed, {"seen": list}),
):
    habit(_name, _forward, **_parts)
    _make = _MAKERS[_name]
    trained(f"{_name}, in micro batches", lambda make=_make: GradAccumulation(make(), 2), modes=IN_PARTS)  # type: ignore[misc]
    trained(f"{_name}, in copies", lambda make=_make: MicroBatchInterleaved(make(), 2), modes=IN_PARTS)  # type: ignore[misc]


def _noted(self: Any, x: Tensor) -> Tensor:
    self.width = x.shape[1]
    self.is_called = True
    return self.head(self.layer(x))


habit("attributes set to the same", _noted)
trained("attributes set to the same, in micro batches", lambda: GradAccumulation(Net(_noted), 2), modes=IN_PARTS)
