"""Rule for the experts of a mixture that the ranks share out: every token travels to the ranks of its experts and back.

How many tokens a rank gets is only known when the router has chosen, so no graph can have the exchange as operators:
one operator stands in the place of the experts' `forward` and exchanges rows itself.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from msrun.errors import StrategyError
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators import rows as row_exchange
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    stand_in,
)

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
"""Parameters of transformers' experts; dimension 0 numbers the experts."""
_numbers = itertools.count()
_known: dict[int, RoutedExperts] = {}


@dataclass
class RoutedExperts:
    """What experts compute, without their weights."""

    module: nn.Module
    """A shell: how it applies its gate, and its settings."""
    names: tuple[str, ...]
    """Of its weights, in the order in which the operator gets them."""
    count: int
    """Of all experts."""
    first_rank: int = 0
    """The rank that has the first of them."""
    load: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Tokens that each expert of this rank got in the newest forward pass."""

    def compute(self, rows: Tensor, weights: dict[str, Tensor], expert: int) -> Tensor:
        """Return what one expert makes of its tokens: (n, width) -> (n, width)."""
        turned = bool(getattr(self.module, "is_transposed", False))
        up = "gate_up_proj" if "gate_up_proj" in weights else "up_proj"
        made = _linear(rows, weights, up, expert, turned=turned)
        if up == "up_proj":
            made = self.module.act_fn(made)  # type: ignore[operator]
        elif hasattr(self.module, "_apply_gate"):
            made = self.module._apply_gate(made)  # type: ignore[operator]
        else:
            gate, value = made.chunk(2, -1)
            made = self.module.act_fn(gate) * value  # type: ignore[operator]
        return _linear(made, weights, "down_proj", expert, turned=turned)


def _linear(rows: Tensor, weights: dict[str, Tensor], name: str, expert: int, *, turned: bool) -> Tensor:
    weight, bias = weights[name][expert], weights.get(f"{name}_bias")
    return F.linear(rows, weight.mT if turned else weight, None if bias is None else bias[expert])


def register_experts(module: nn.Module) -> int:
    """Return the number by which operators know what a module of experts computes."""
    names = tuple(name for name in WEIGHTS if isinstance(getattr(module, name, None), nn.Parameter))
    shell = copy.copy(module)
    vars(shell)["_parameters"] = {}
    number = next(_numbers)
    _known[number] = RoutedExperts(shell, names, len(module.down_proj))  # type: ignore[arg-type]
    return number


def experts_of(number: int) -> RoutedExperts:
    """Return what experts compute."""
    return _known[number]


def _shape(tokens: Tensor, chosen: Tensor, shares: Tensor, weights: list[Tensor], number: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(tokens)


OPERATOR = stand_in("msrun::routed_experts", _shape)


def route(
    tokens: Tensor,
    chosen: Tensor,
    shares: Tensor,
    *weights: Tensor,
    number: int,
    mesh_shape: tuple[int, ...],
    first_rank: int,
    same: Axes,
) -> Tensor:
    """Return what the experts make of this rank's tokens, as an operator of a local graph.

    Args:
        tokens: (t, width).
        chosen: (t, k), the experts of each token.
        shares: (t, k), how much of each expert's result it gets.
        weights: of this rank's experts.
        same: axes along which ranks have the same tokens.
    """
    experts = _known[number]
    if isinstance(tokens, FakeTensor):
        result: Tensor = _OnFakes.apply(tokens, chosen, shares, *weights)
        return result
    mesh = Mesh(tuple(mesh_shape), first_rank)
    copies = mesh.extent(tuple(same))
    whole = [_Divided.apply(weight, copies) if copies > 1 else weight for weight in weights]
    own = dict(zip(experts.names, whole, strict=True))
    return _route(experts, tokens, chosen, shares, own, mesh)


def _route(
    experts: RoutedExperts,
    tokens: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: dict[str, Tensor],
    mesh: Mesh,
) -> Tensor:
    ranks, here, each = mesh.size, experts.count // mesh.size, chosen.shape[-1]
    expert_of = chosen.reshape(-1)
    order = expert_of.argsort(stable=True)
    counts = expert_of.bincount(minlength=experts.count).view(ranks, here)
    wire = _Wire(mesh)
    arriving = wire.start(counts, [1] * ranks, [1] * ranks).wait()
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    rows = _Exchange.apply(tokens.index_select(0, order // each), wire, sent, received)
    by_expert = torch.arange(here, device=rows.device).repeat(ranks).repeat_interleave(arriving.reshape(-1))
    sorting = by_expert.argsort(stable=True)
    experts.load, experts.first_rank = arriving.sum(0), mesh.first_rank
    parts = rows.index_select(0, sorting).split(experts.load.tolist())
    made = torch.cat([experts.compute(part, weights, expert) for expert, part in enumerate(parts)])
    back = torch.empty_like(sorting).scatter_(0, sorting, torch.arange(len(sorting), device=sorting.device))
    found = _Exchange.apply(made.index_select(0, back), wire, received, sent)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    mixed = found.index_select(0, place).view(*chosen.shape, -1) * shares.unsqueeze(-1)
    return mixed.sum(1).to(tokens.dtype)


@dataclass(frozen=True)
class _Wire:
    """Between all ranks of a mesh."""

    mesh: Mesh

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> row_exchange.Arriving:
        row_exchange.carrier.count("all_to_all", rows.numel() * rows.element_size())
        return row_exchange.carrier.start(rows.contiguous(), sent, received, self.mesh, self.mesh.axes, "all_to_all")


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wire: _Wire, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.way = wire, sent, received
        return wire.start(rows, sent, received).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        wire, sent, received = ctx.way
        return wire.start(gradient, received, sent).wait(), None, None, None


class _Divided(torch.autograd.Function):
    """A weight that several ranks send the same tokens to: each of them counts for a share."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, count: int) -> Tensor:
        ctx.count = count
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.count, None


class _OnFakes(torch.autograd.Function):
    """Shape, type and memory of experts that all get as many tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, chosen: Tensor, shares: Tensor, *weights: Tensor) -> Tensor:
        rows = chosen.numel()
        kept = [tokens.new_empty(rows, width) for width in (*weights[0].shape[1:], *weights[1].shape[1:])]
        ctx.save_for_backward(tokens, chosen, shares, *weights, *kept)
        ctx.count = len(weights)
        return torch.empty_like(tokens)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, _, shares, *rest = ctx.saved_tensors
        return (
            torch.empty_like(tokens),
            None,
            torch.empty_like(shares),
            *(torch.empty_like(weight) for weight in rest[: ctx.count]),
        )


class Experts(Rule):
    """The tokens keep their layout; the experts are shared out over all ranks."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return a label for tokens alone."""
        tokens, _, _, *weights = call.shapes
        inputs = (*((("t", None),) * 3), *((None,) * len(shape) for shape in weights))
        shared_out = dict.fromkeys(range(3, len(inputs)), 0)
        return Form(inputs, ("t", None), {"t": tokens[0]}, shared_out=shared_out)

    def lower(
        self, call: OperatorCall, _form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Add the operator on this rank's tokens and experts."""
        number = call.argument("number")
        if _known[number].count % build.mesh.size:
            raise StrategyError(
                f"experts in module {call.module_path}: {_known[number].count} of them cannot be shared out over "
                f"{build.mesh.size} ranks; give a number of ranks that divides them"
            )
        used = {axis for axes in split.values() for axis in axes}
        return build.call(
            route,
            *inputs,
            number=number,
            mesh_shape=build.mesh.shape,
            first_rank=build.mesh.first_rank,
            same=tuple(axis for axis in build.mesh.axes if axis not in used),
        )


RULES = [(Experts(), [OPERATOR])]
