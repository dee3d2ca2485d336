"""LateLoss: a loss whose sum over the ranks is still on its way when the network's call returns.

The backward pass needs the loss's graph, not its number. So a training step does not stop between its forward and its
backward pass until the slowest rank has come as far: the number is waited for when somebody looks at it, or at the end
of `backward()`. Only for losses on the host: elsewhere torch lets the stream wait, not the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from msrun.runtime.tensors.plain_tensors import StandIn


class LateLoss(StandIn, Tensor):
    """A scalar that becomes a plain tensor, with its value, as soon as anything but its gradient is asked for.

    Every function of torch that gets one comes here first (`__torch_function__`), also where it is part of a list; what
    does not come from torch, as `print` or numpy, asks through the tensor's methods.
    """

    _buffer: Tensor
    """Holds the value in the same memory, outside autograd."""
    _arrive: Callable[[], Tensor]
    _kind: type[Tensor]
    """What it becomes."""

    @staticmethod
    def of(arrive: Callable[[], Tensor], dtype: torch.dtype) -> LateLoss:
        """Return a scalar whose value `arrive` will give, once. The value is on the host, as is the result."""
        buffer = torch.full((), torch.nan, dtype=dtype)
        loss: LateLoss = Tensor._make_subclass(LateLoss, buffer)
        loss._buffer, loss._arrive, loss._kind = buffer, arrive, Tensor
        return loss

    def become(self, kind: type[Tensor]) -> LateLoss:
        """Choose the class that it has when its value is there; `as_subclass` would not wait for the value."""
        self._kind = kind
        return self

    def constructed_by(self, construct: Callable[[], Any]) -> Any:
        """Return what `torch.tensor` and the like make of the value, when it has arrived."""
        self._become_plain()()
        return construct()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self._become_plain()()
        return repr(self)

    def __str__(self) -> str:
        self._become_plain()()
        return str(self)

    def __format__(self, how: str) -> str:
        self._become_plain()()
        return format(self, how)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on values that have arrived; `backward` and `grad` before the value has."""
        kwargs = kwargs or {}
        found = _late_ones((args, kwargs))
        if not found:  # hidden in a container that torch's pytree does not know
            return NotImplemented
        needs_values = func not in _OF_GRADIENTS or len(_late_ones(args[:1])) < len(found)
        arrivals = [loss._become_plain() for loss in {id(loss): loss for loss in found}.values()]
        if needs_values:
            _run_all(arrivals)
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            _run_all(arrivals)

    def _become_plain(self) -> Callable[[], None]:
        """Become an ordinary tensor; return what writes the value that was missing."""
        state = self.__dict__
        buffer, arrive = state["_buffer"], state["_arrive"]

        def finish() -> None:
            with torch.inference_mode(mode=False), torch.no_grad():
                buffer.copy_(arrive())

        self.__class__ = state["_kind"]
        del state["_buffer"], state["_arrive"], state["_kind"]
        return finish


def _late_ones(values: Any) -> list[LateLoss]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, LateLoss)]


def _run_all(arrivals: Iterable[Callable[[], None]]) -> None:
    for arrive in arrivals:
        arrive()


_OF_GRADIENTS = (Tensor.backward, torch.autograd.grad)
