"""Plain tensors: what the runtime computes with, past the checks that a user's hands on a cut parameter meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from msrun.errors import ParallelError

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""`with plain_tensors():` subclasses of Tensor behave as the tensors that they are; a test looks after this name."""


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's memory on this rank as an ordinary tensor without a graph."""
    with plain_tensors():
        return tensor.detach()


def local_part(tensor: Tensor) -> Tensor:
    """Return the same of this rank's part, if the tensor is a DTensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else plain(tensor)


class StandIn:
    """Base of a tensor class whose memory is not the value that it stands for."""

    __slots__ = ()

    def constructed_by(self, construct: Callable[[Any], Any]) -> Any:
        """Return what a function of torch makes of the value, of which it would see the memory alone.

        Args:
            construct: gets what the function is to see.
        """
        raise NotImplementedError


@functools.cache
def watch_constructors() -> None:
    """Let those functions of torch ask stand-ins that pass `__torch_function__` by; once in a process."""
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _asking(getattr(torch, name), 0))
    Tensor.new_tensor = _asking(Tensor.new_tensor, 1)  # type: ignore[method-assign]


def _asking(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def construct(*args: Any, **kwargs: Any) -> Any:
        data = args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, StandIn):
            named = {key: value for key, value in kwargs.items() if key not in ("data", "obj")}
            return data.constructed_by(lambda seen: function(*args[:place], seen, *args[place + 1 :], **named))
        return function(*args, **kwargs)

    return construct


@functools.cache
def keep_no_values() -> None:
    """Take the memory of every parameter that is registered in a module from now on; once in a process."""
    register = nn.Module.register_parameter

    @functools.wraps(register)
    def register_without_value(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if type(param) is nn.Parameter and not param.is_meta and param._use_count() == 1:  # type: ignore[attr-defined]
            put_value(param, torch.empty_like(param, device="meta"))

    nn.Module.register_parameter = register_without_value  # type: ignore[method-assign]


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_is_free(tensor: Tensor) -> None:
    """Refuse to change a tensor that an autograd graph holds."""
    if tensor._use_count() > 1:  # type: ignore[attr-defined]
        raise ParallelError(
            f"a parameter of shape {tuple(tensor.shape)} is still held by a backward graph: "
            "drop losses of earlier steps before the first call of AutoParallel"
        )


def put_value(tensor: Tensor, value: Tensor, stale: Callable[[Tensor], Any] | None = None) -> None:
    """Give `tensor` another value, shape and device while it stays the same object.

    Optimizers, tied modules, weak references (nn.LSTM keeps some) and the user's own variables hold the same object
    afterwards; hooks for its gradient stay. `torch.utils.swap_tensors` does the same but refuses tensors with weak
    references.

    Args:
        stale: called with the gradient that a graph from before brings; None: such a graph is refused here.
    """
    if stale is None:
        check_is_free(tensor)
    fresh: Tensor = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    hooks = {name: found for name in _HOOKS if (found := getattr(tensor, name)) is not None}
    torch._C._swap_tensor_impl(tensor, fresh)
    for name, found in hooks.items():  # the object kept them, the new value does not know of them
        setattr(tensor, name, found)
    if stale is not None and fresh.requires_grad:
        fresh.register_hook(stale)


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
