"""GradAccumulation: a batch in micro batches, one after the other, with the memory of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, StrategyError
from msrun.runtime.nn.random_stream import part_of_batch
from msrun.runtime.parallel.batch.divided_batch import DividedBatch
from msrun.runtime.parallel.batch.parts import PartKind, join_results, join_values
from msrun.runtime.parallel.scaling import Scales, current_loss_scale, find_compat, scales

TWICE = (
    "backward() was called twice on one loss, or on two losses of one call: add up the losses of a call and go back "
    "once, give every pass but the last one retain_graph=True, or call the network again"
)


class GradAccumulation(DividedBatch):
    """Run `network` on `micro_size` equal slices of the batch, forward and backward, and add their gradients up.

    The call runs every slice forward and backward before the next one begins, so that activations of one slice are held
    at a time; `loss.backward()` then hands the gradients out, times the gradient that comes in. Without gradients
    (`torch.no_grad()`) only forward passes run. The result is the mean of the slices' losses; with
    AutoParallel(compat="mindspore") their sum, with the gradient of their mean as MindSpore's training step has it.

    The network returns its loss, a scalar, first; further results are joined along dimension 0, and a loss that uses
    one is an error in its backward pass. Inside AutoParallel gradients are reduced over the ranks once, after the last
    slice, or at hsdp level2 and level3 after every slice so that only their parts are kept. Parameter names are those
    of `network`.

    Raises:
        StrategyError: micro_size is not a whole number above 0 or does not divide the batch, or the first result is not
            a scalar.
    """

    kind: PartKind = "micro batches"

    def __init__(self, network: nn.Module, micro_size: int) -> None:
        super().__init__(network, micro_size, "micro_size")

    @property
    def micro_size(self) -> int:
        """The number of micro batches."""
        return self.parts

    def run_parts(self, call: Callable[..., Any], batches: list[tuple[Any, ...]]) -> Any:
        """Run the micro batches one after the other."""
        factors = scales(find_compat(), 1, self.parts)
        parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        tensors = [value for batch in batches for value in batch if isinstance(value, Tensor)]
        if not torch.is_grad_enabled() or not (parameters or any(value.requires_grad for value in tensors)):
            return join_results(self.results_of(call, batches), factors.loss)
        run = _EagerRun(call, batches, factors)
        flat = _Accumulate.apply(run, len(tensors), *tensors, *parameters)
        return pytree.tree_unflatten(list(flat), run.spec)


class _EagerRun:
    """The micro batches of one call outside a captured graph."""

    def __init__(self, call: Callable[..., Any], batches: list[tuple[Any, ...]], factors: Scales) -> None:
        self._call = call
        self._batches = batches
        self._factors = factors
        self.spec: Any = None
        self.reached: set[int] = set()
        """Indexes of the results that gradients would flow back from."""

    def run(self, parameters: list[Tensor]) -> tuple[list[Any], list[Tensor | None], list[Tensor | None]]:
        """Return the joined results, the gradients of all micro batches' tensors in order, and the parameters'."""
        seed = self._factors.gradient * current_loss_scale.get()
        totals: list[Tensor | None] = [None] * len(parameters)
        of_inputs: list[Tensor | None] = []
        rows: list[list[Any]] = []
        for number, batch in enumerate(self._batches):
            fresh = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in batch]
            tensors = [value for value in fresh if isinstance(value, Tensor)]
            wanted = [value for value in tensors if value.requires_grad]
            with torch.enable_grad(), part_of_batch(number, len(self._batches), batch):
                leaves, self.spec = pytree.tree_flatten(self._call(*fresh))
                loss = check_loss(leaves)
                with _without_hooks(parameters):
                    grads = torch.autograd.grad(
                        loss, [*wanted, *parameters], torch.full_like(loss, seed), allow_unused=True
                    )
            given = iter(grads[: len(wanted)])
            of_inputs += [next(given) if value.requires_grad else None for value in tensors]
            for index, grad in enumerate(grads[len(wanted) :]):
                total = totals[index]
                totals[index] = grad if total is None else total if grad is None else total + grad
            self.reached = {i for i, v in enumerate(leaves) if isinstance(v, Tensor) and v.requires_grad}
            rows.append([value.detach() if isinstance(value, Tensor) else value for value in leaves])
        results = [join_values(list(values), self._factors.loss) for values in zip(*rows, strict=True)]
        return results, of_inputs, totals


class _Accumulate(torch.autograd.Function):
    """All micro batches as one step of the user's autograd graph; the gradients exist when it has run forward."""

    @staticmethod
    def forward(ctx: Any, run: _EagerRun, count: int, *tensors: Tensor) -> tuple[Any, ...]:
        results, of_inputs, of_parameters = run.run(list(tensors[count:]))
        ctx.gradients, ctx.loss_scale = [*of_inputs, *of_parameters], current_loss_scale.get()
        ctx.set_materialize_grads(False)
        fixed = [v for i, v in enumerate(results) if isinstance(v, Tensor) and i not in run.reached]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *hand_out(ctx, gradients)


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks of parameters away for a while: they see the gradient of the batch once, when it is handed out."""
    hooks = [parameter._backward_hooks for parameter in parameters if parameter._backward_hooks]
    kept = [dict(of_parameter) for of_parameter in hooks]
    for of_parameter in hooks:
        of_parameter.clear()
    try:
        yield
    finally:
        for of_parameter, before in zip(hooks, kept, strict=True):
            of_parameter.update(before)


def check_loss(results: list[Any]) -> Tensor:
    """Return the loss: the first result.

    Raises:
        StrategyError: it is not a scalar that has a gradient.
    """
    loss = results[0] if results else None
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise StrategyError(
            f"GradAccumulation: the network's first result is {found}: wrap it with its loss, which must be a scalar "
            "and come first"
        )
    return loss


def keeps_graph() -> bool:
    """Return whether the present backward pass was given retain_graph=True."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hand_out(ctx: Any, incoming: Sequence[Tensor | None], loss: int = 0) -> list[Tensor | None]:
    """Return the gradients that a forward call has left in `ctx`, times the one that comes in; once, or as often as the
    passes keep their graph.

    Both hold the loss scale, and so does what is returned.

    Args:
        incoming: at every result of the call.
        loss: which of them the gradients were made of.

    Raises:
        CaptureError: they were handed out before.
        StrategyError: a gradient comes in at another result than the loss.
    """
    others = [index for index, gradient in enumerate(incoming) if gradient is not None and index != loss]
    if others:
        raise StrategyError(
            f"a loss outside of the step uses its result {others[0]}, and gradients flow from result {loss} alone: the "
            "backward passes of micro batches run inside the call. Put that loss into the network, or detach() the "
            "result"
        )
    if ctx.gradients is None:
        raise CaptureError(TWICE)
    gradients = ctx.gradients
    if not keeps_graph():
        ctx.gradients = None
    of_loss = incoming[loss]
    if of_loss is None:
        return [None] * len(gradients)
    factor = of_loss if ctx.loss_scale == 1.0 else of_loss / ctx.loss_scale
    return [None if grad is None else grad * factor for grad in gradients]
