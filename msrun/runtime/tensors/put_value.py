"""Put a value into an existing tensor object. The one place that uses torch's private swap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from msrun.errors import ParallelError

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_is_free(tensor: Tensor) -> None:
    """Refuse to change a tensor that an autograd graph holds.

    Raises:
        ParallelError: one does.
    """
    if tensor._use_count() > 1:  # type: ignore[attr-defined]
        raise ParallelError(
            f"a parameter of shape {tuple(tensor.shape)} is still held by a backward graph: "
            "drop losses of earlier steps before the first call of AutoParallel"
        )


def put_value(tensor: Tensor, value: Tensor) -> None:
    """Give `tensor` another value, shape and device while it stays the same object.

    Optimizers, tied modules, weak references (nn.LSTM keeps some) and the user's own variables hold the same object
    afterwards; hooks for its gradient stay. `torch.utils.swap_tensors` does the same but refuses tensors with weak
    references.

    Raises:
        ParallelError: an autograd graph still holds the tensor.
    """
    check_is_free(tensor)
    fresh: Tensor = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    hooks = {name: found for name in _HOOKS if (found := getattr(tensor, name)) is not None}
    torch._C._swap_tensor_impl(tensor, fresh)
    for name, found in hooks.items():  # the object kept them, the new value does not know of them
        setattr(tensor, name, found)


@contextmanager
def holding(values: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Let parameters hold other values for as long as the context lasts; they stay the same objects, with their hooks.

    Their own values, gradients and the graphs that hold them are set aside and come back at the end. Parts of cut
    parameters are ordinary parameters meanwhile.
    """
    swapped: list[tuple[nn.Parameter, nn.Parameter, type]] = []
    try:
        for parameter, value in values:
            kind = type(parameter)
            parameter.__class__ = getattr(kind, "whole_class", kind)
            aside = nn.Parameter(value, parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, aside)
            swapped.append((parameter, aside, kind))
            if parameter._backward_hooks:  # autograd's list of them lies with the value that was set aside
                parameter._backward_hooks = parameter._backward_hooks
        yield
    finally:
        for parameter, aside, kind in swapped:
            torch._C._swap_tensor_impl(parameter, aside)
            parameter.__class__ = kind
