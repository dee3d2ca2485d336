"""Networks whose batch is divided: what their wrappers have in common, and how they are captured.

A wrapper (MicroBatchInterleaved, GradAccumulation) is traced as one part of its batch; the compiled call then runs that
program for all parts.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, StrategyError
from msrun.runtime.capture import marked_calls
from msrun.runtime.nn.random_stream import part_of_batch
from msrun.runtime.parallel.batch.parts import BatchParts, PartKind, join_results, join_values, split_batch
from msrun.runtime.parallel.precision import Scales, current_loss_scale, find_compat, part_scale, scales


class DividedBatch(nn.Module, ABC):
    """A network whose batch is divided into equal parts: rows [i * B / n, (i + 1) * B / n) of dimension 0.

    Raises:
        StrategyError: the number of parts is not a whole number above 0.
    """

    kind: PartKind

    def __init__(self, network: nn.Module, parts: int, argument: str) -> None:
        super().__init__()
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise StrategyError(f"{type(self).__name__}({argument}={parts!r}): must be a whole number above 0")
        self.parts = parts
        self.network = network
        self.number = marked_calls.new_number()
        """of its marks in a captured graph"""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the joined results of the parts."""
        if marked_calls.MSRUN_CAPTURING:  # one part is traced; the compiled call runs it for all
            inputs, named = marked_calls.mark((inputs, named), self.number, leaves=False)
            return marked_calls.mark(self.network(*inputs, **named), self.number, leaves=True)
        slices = split_batch((*inputs, *named.values()), self.parts, self.kind)
        return self.run_parts(partial(self._call, tuple(named)), slices)

    def _call(self, names: tuple[str, ...], *values: Any) -> Any:
        """Run the network; the last values are those of the names."""
        count = len(values) - len(names)
        return self.network(*values[:count], **dict(zip(names, values[count:], strict=True)))

    @staticmethod
    def results_of(call: Callable[..., Any], batches: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return what the network makes of each part, one after the other."""
        results = []
        for index, batch in enumerate(batches):
            with part_of_batch(index, len(batches), batch):
                results.append(call(*batch))
        return results

    @abstractmethod
    def run_parts(self, call: Callable[..., Any], batches: list[tuple[Any, ...]]) -> Any:
        """Run the network on every part, without AutoParallel, and join the results.

        Args:
            call: runs it on the values of one part.
        """


def find_wrappers(root: nn.Module) -> list[DividedBatch]:
    """Return the wrappers in a network that divide its batch, outermost first."""
    found = [module for module in root.modules() if isinstance(module, DividedBatch)]
    for outer, inner in itertools.pairwise(found):
        if inner not in outer.modules():
            raise StrategyError(
                f"{type(outer).__name__} and {type(inner).__name__} stand side by side in one step: wrap the network "
                "that holds both parts once"
            )
    return found


def find_parts(wrappers: Sequence[DividedBatch]) -> BatchParts:
    """Return how wrappers, outermost first, divide a batch."""
    return BatchParts(tuple((wrapper.kind, wrapper.parts) for wrapper in wrappers))


class MicroBatchInterleaved(DividedBatch):
    """Run `network` on `interleave_num` equal slices of the batch.

    Slice i of every tensor is rows [i * B / n, (i + 1) * B / n) of dimension 0. The result is the mean of the slices'
    results, or with AutoParallel(compat="mindspore") their sum; results that are not scalars are joined along dimension
    0. Inside AutoParallel the copies are interleaved; alone they run one after the other, with the same result.
    Parameter names are those of `network`.

    Raises:
        StrategyError: interleave_num is not a whole number above 0, or does not divide the batch.
    """

    kind: PartKind = "copies"

    def __init__(self, network: nn.Module, interleave_num: int = 2) -> None:
        super().__init__(network, interleave_num, "interleave_num")

    @property
    def interleave_num(self) -> int:
        """The number of copies."""
        return self.parts

    def run_parts(self, call: Callable[..., Any], batches: list[tuple[Any, ...]]) -> Any:
        """Run the copies one after the other."""
        return join_results(self.results_of(call, batches), part_scale(find_compat(), self.parts))


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
    """Return the loss: the first result."""
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
