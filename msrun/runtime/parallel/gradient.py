"""value_and_grad: the loss and its gradients, as MindSpore's functional training asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError
from msrun.runtime.execute.phase import Differentiation, current_probe
from msrun.runtime.nn.replaced import current
from msrun.runtime.parallel.auto_parallel import current_parallel
from msrun.runtime.parallel.clip import note_weight
from msrun.runtime.parallel.modes.data_parallel import Replicas, replicas_called
from msrun.runtime.parallel.verification.verify import check_first_gradients


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Iterable[Tensor] | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that gives `fn`'s result and the gradients of its loss.

    `fn` returns the loss, or with `has_aux` (loss, other results...). Inside a step function that AutoParallel runs,
    `fn` is captured and runs on all ranks: the loss is the global one and each gradient is that of this rank's part of
    the weight.

    Args:
        grad_position: which positional arguments to differentiate; None for none.
        weights: parameters to differentiate; None for none.

    Returns:
        (result, gradients). Gradients are those of the arguments, those of the weights as a tuple, or a pair of both
        when both are asked for.

    Raises:
        StrategyError: nothing to differentiate.
    """
    kept = list(weights) if weights is not None else None
    if grad_position is None and kept is None:
        raise StrategyError("value_and_grad(grad_position=None, weights=None): name arguments or weights")

    positions = (grad_position,) if isinstance(grad_position, int) else grad_position or ()

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        probe, parallel = current_probe.get(), current_parallel.get()
        if probe is not None or parallel is not None:
            call = Differentiation(fn, run, positions, kept or [], args, kwargs)
            if probe is not None:
                probe.meet(call)
            if parallel is not None:
                check_first_gradients(parallel, call)
        inputs = [args[i].detach().requires_grad_() for i in positions]
        full = list(args)
        for i, value in zip(positions, inputs, strict=True):
            full[i] = value
        called: list[Replicas] = []
        token = replicas_called.set(called)
        try:
            with torch.enable_grad():
                result = fn(*full, **kwargs) if parallel is None else parallel.run(fn, full, kwargs)
        finally:
            replicas_called.reset(token)
        loss = result[0] if has_aux else result
        weights = [current(weight) for weight in kept or []]
        _check_wanted(weights)
        grads = _gradients(loss, inputs, weights, called)
        for weight, gradient in zip(weights, grads[len(inputs) :], strict=True):
            note_weight(gradient, weight)
        of_inputs, of_weights = grads[: len(inputs)], tuple(grads[len(inputs) :])
        given: Any = of_inputs[0] if isinstance(grad_position, int) else tuple(of_inputs)
        gradients = of_weights if not inputs else given if kept is None else (given, of_weights)
        return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result), gradients

    return run


def _check_wanted(weights: Sequence[Tensor]) -> None:
    """Refuse weights that were frozen since."""
    frozen = [index for index, weight in enumerate(weights) if not weight.requires_grad]
    if frozen:
        raise StrategyError(
            f"value_and_grad: weights[{frozen[0]}] of {len(weights)} does not require a gradient; call value_and_grad "
            "again with the weights that do"
        )


def _gradients(
    loss: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], called: Sequence[Replicas]
) -> Sequence[Tensor]:
    wanted = [*inputs, *weights]
    if any(replicas.reduces_in_backward for replicas in called):
        return _by_backward(loss, wanted, [p for replicas in called for p in replicas.parameters()])
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    if not called:
        return grads
    return [*grads[: len(inputs)], *called[-1].reduce(weights, grads[len(inputs) :])]


def _by_backward(loss: Tensor, wanted: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Take the gradients out of `.grad`: DDP and FSDP2 reduce in `backward()` alone. What was there comes back."""
    touched = {id(tensor): tensor for tensor in [*wanted, *map(current, parameters)]}
    before = {key: tensor.grad for key, tensor in touched.items()}
    for tensor in touched.values():
        tensor.grad = None
    try:
        loss.backward()
        return [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in wanted]
    finally:
        for key, tensor in touched.items():
            tensor.grad = before[key]
