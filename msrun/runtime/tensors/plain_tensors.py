"""Plain tensors: what the runtime computes with, past the checks that a user's hands on a cut parameter meet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

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
