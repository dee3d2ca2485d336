"""Deferred weight gradients: those of linear layers' weights, computed apart from those of their inputs.

A linear layer's backward pass is two matrix products: the gradient of its input, which other ranks wait for, and that
of its weight, which only this rank's sum needs. Autograd does both at once; here the first alone happens in autograd.
The second is done while a collective that the first feeds is on its way, or in the pauses of a zero-bubble pipeline
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). It adds in place to what copies and micro batches before left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed

from msrun.errors import CaptureError, StrategyError, near_miss
from msrun.runtime.schedule.replay import Region
from msrun.runtime.schedule.segments import Name, Segment

aten = torch.ops.aten
Lies = Literal["(out, in)", "(in, out)"]
"""How a weight lies; `x @ weight` reads the second."""


@dataclass(frozen=True)
class DeferredWeightGradient:
    """What the gradients of one call's weight and bias are computed from; rows by features, both."""

    weight: Tensor
    lies: Lies
    bias: Tensor | None
    rows: Tensor
    gradient: Tensor

    def compute(self) -> None:
        """Add to the gradients of the weight and the bias."""
        rows = self.rows.to(self.gradient.dtype)
        if self.weight.requires_grad:
            left, right = (rows.t(), self.gradient) if self.lies == "(in, out)" else (self.gradient.t(), rows)
            if self.weight.grad is None:
                self.weight.grad = left.mm(right).to(self.weight.dtype)
            elif rows.dtype == self.weight.dtype:
                self.weight.grad.addmm_(left, right)
            else:  # the user's own autocast is around the call
                self.weight.grad.add_(left.mm(right))
        if self.bias is not None and self.bias.requires_grad:
            total = self.gradient.sum(0).to(self.bias.dtype)
            self.bias.grad = total if self.bias.grad is None else self.bias.grad.add_(total)


_left: list[DeferredWeightGradient] = []
"""Of the segment whose backward pass ran last; autograd may run it in a thread of its own."""


class _DeferringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lies: Lies) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.lies = weight, bias, lies  # the leaves themselves: they hold the sums of gradients
        return F.linear(x, weight.t() if lies == "(in, out)" else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        rows, flat = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        _left.append(DeferredWeightGradient(ctx.weight, ctx.lies, ctx.bias, rows, flat))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = ctx.weight.to(flat.dtype)
        back = flat.mm(weight.t() if ctx.lies == "(in, out)" else weight)
        return back.view(x.shape).to(x.dtype), None, None, None


def deferring_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `aten.linear`, (.., in) -> (.., out), of leaves whose gradients are added later."""
    result: Tensor = _DeferringLinear.apply(x, weight, bias, "(out, in)")
    return result


def deferring_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return `aten.matmul` of (.., in) and a leaf (in, out) whose gradient is added later."""
    result: Tensor = _DeferringLinear.apply(x, weight, None, "(in, out)")
    return result


def deferring_addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return `aten.addmm` of a leaf (out,), (rows, in) and a leaf (in, out), whose gradients are added later."""
    result: Tensor = _DeferringLinear.apply(x, weight, bias, "(in, out)")
    return result


_DEFERRING: dict[Any, tuple[Callable[..., Tensor], dict[int, int]]] = {
    aten.linear.default: (deferring_linear, {1: 2, 2: 1}),
    aten.matmul.default: (deferring_matmul, {1: 2}),
    aten.mm.default: (deferring_matmul, {1: 2}),
    aten.addmm.default: (deferring_addmm, {2: 2, 0: 1}),
}
"""operator -> what takes its place, and argument -> dimensions of those that must be parameters (or None)"""
_FORMS = tuple(form for form, _ in _DEFERRING.values())


def compute_deferred_weights() -> None:
    """Add what the backward pass of the last segment has left undone to its weights' gradients."""
    add_deferred_weights(take_deferred_weights())


def take_deferred_weights() -> list[DeferredWeightGradient]:
    """Return what the backward pass of the last segment has left undone: the caller's to add later."""
    taken = _left[:]
    _left.clear()
    return taken


@torch.no_grad()
def add_deferred_weights(deferred: Sequence[DeferredWeightGradient]) -> None:
    """Add what was left undone to its weights' gradients."""
    for one in deferred:
        one.compute()


def forget_deferred_weights() -> None:
    """Drop what a backward pass that failed has left."""
    _left.clear()


def defer_weights(
    segments: Sequence[Segment], leaves: Mapping[Name, int], regions: Sequence[Region], *, everywhere: bool
) -> None:
    """Let linear layers leave their weights for later.

    Args:
        leaves: placeholders of parameters, with their dimensions.
        regions: recomputed ones; where the user chose operators to keep, the layers stay as they are.
        everywhere: False: only layers whose inputs' gradients feed a collective.
    """
    for before, segment in pairwise((None, *segments)):
        assert segment is not None
        if segment.on_host:  # its thread would leave them while the device's do
            continue
        if segment.region is not None and regions[segment.region].spec.save is not None:
            continue
        feeds = before is not None and any(crossing.collective.moves_backward for crossing in before.crossings)
        if everywhere or feeds:
            _defer(segment, leaves)


def deferred_in(segment: Segment) -> list[Name]:
    """Return the linear layers of a segment whose weights' gradients `defer_weights` has deferred."""
    return [node.name for node in segment.module.graph.nodes if node.target in _FORMS]


def count_deferred(segments: Sequence[Segment]) -> int:
    """Return how many linear layers `defer_weights` has found."""
    return sum(len(deferred_in(segment)) for segment in segments)


def _defer(segment: Segment, leaves: Mapping[Name, int]) -> None:
    found = [node for node in segment.module.graph.nodes if _can_defer(node, leaves)]
    for node in found:
        node.target, _ = _DEFERRING[node.target]
    if found:
        segment.module.recompile()


def _can_defer(node: fx.Node, leaves: Mapping[Name, int]) -> bool:
    if node.target not in _DEFERRING or node.kwargs:
        return False
    dimensions = _DEFERRING[node.target][1]
    given = {place: node.args[place] for place in dimensions if place < len(node.args)}
    return all(value is None or _is_leaf(value, leaves, dimensions[place]) for place, value in given.items())


def _is_leaf(value: Any, leaves: Mapping[Name, int], dimensions: int) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder" and leaves.get(value.name) == dimensions


MODES = ("default", "max-autotune-no-cudagraphs")
"""Those whose results stay: of CUDA graphs the next run writes over them, and copies of a batch are held at once."""


@dataclass(frozen=True)
class CompileSpec:
    """What segments are compiled with."""

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None

    def __post_init__(self) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if not callable(self.backend) and self.backend not in known:
            raise StrategyError(
                f"compile(backend={self.backend!r}){near_miss(str(self.backend), known)}: must be a function or one of "
                f"{', '.join(torch.compiler.list_backends())}, aot_eager, eager"
            )
        if self.mode is not None and (self.mode not in MODES or self.backend != "inductor"):
            raise StrategyError(
                f"compile(mode={self.mode!r}) with backend {self.backend!r}: must be {' or '.join(MODES)}, of "
                "inductor; CUDA graphs would write over the results of earlier segments"
            )


def compile_segments(segments: Sequence[Segment], spec: CompileSpec) -> str:
    """Let segments run compiled, and return a note that says how many.

    Those of the host, of recomputed modules and with deferred weight gradients run as they are; so does, inside the
    others, what is no operator of torch: random numbers follow from step and place, which change with every step.
    """
    mine = [segment for segment in segments if segment.writes]
    chosen = [each for each in mine if each.region is None and not each.on_host and not count_deferred([each])]
    for segment in chosen:
        segment.run = _compiled(segment.module, spec)
    for segment in segments:  # compiled code may keep, and share, other values than its operators: nothing writes there
        segment.crossings = [replace(each, takes_source=False, takes_gradient=False) for each in segment.crossings]
    backend = spec.backend if isinstance(spec.backend, str) else getattr(spec.backend, "__name__", "a function")
    return f"torch.compile ({backend}) of {len(chosen)} of {len(mine)} segments"


def _compiled(module: fx.GraphModule, spec: CompileSpec) -> Callable[..., Any]:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__module__", "").startswith("msrun."):
            node.target = torch.compiler.disable(node.target)
    compiled: Callable[..., Any] = torch.compile(
        fx.GraphModule(module, graph), backend=spec.backend, mode=spec.mode, dynamic=False
    )

    def run(*inputs: Any) -> Any:
        try:
            return compiled(*inputs)
        except BackendCompilerFailed as error:
            reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise CaptureError(f"compile(): {reason[:300]}; leave compile() out, or choose another backend") from error

    return run
