"""Gradients in host memory: brought there as they arrive, added up there, and seen as `.grad` of their parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.runtime.optim.host_weights import Fetched, HostWeights, wide_room
from msrun.runtime.parts.part import Part
from msrun.runtime.parts.part_functions import as_part
from msrun.runtime.tensors.plain_tensors import plain, plain_tensors

_held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> its gradient in host memory, as wide as the weight's copy there"""
_spare: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> the memory of its last gradient there"""
_GRADIENT: Any = Tensor.grad


class HostGradient(nn.Parameter):
    """A parameter whose gradient is in host memory: what clips or reads `.grad` finds it there.

    torch lets a gradient lie on no other device than its parameter, so that it cannot be the parameter's own.
    """

    @property
    def grad(self) -> Tensor | None:
        """The gradient on the host; of a part, a part."""
        arriving.settle()
        own = super().grad
        held: Tensor | None = _held.get(self)
        if held is None:
            return own
        if own is not None:  # a backward pass that nobody watched
            plain(held).add_(plain(own).to(held))
            put_own_gradient(self, None)
        if isinstance(self, Part) and type(held) is Tensor:
            as_part(held, self.placement)
        return held

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        arriving.settle()
        _held.pop(self, None)
        if gradient is not None and (gradient.device != self.device or gradient.dtype != self.dtype):
            _held[self] = plain(gradient)
            gradient = None
        put_own_gradient(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def own_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient that autograd has left on the device."""
    with plain_tensors():
        found: Tensor | None = _GRADIENT.__get__(parameter)
    return found


def put_own_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Put a gradient where autograd adds to it."""
    with plain_tensors():
        _GRADIENT.__set__(parameter, gradient)


class _Arriving:
    """Gradients on their way to the host; the newest message alone, so that the device's memory is free again soon."""

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = ()
        self._fetched: Fetched | None = None

    def start(self, weights: HostWeights, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self.settle()
        self._parameters = [parameter for parameter, _ in gradients]
        spares = iter([None if parameter in _held else _spare.get(parameter) for parameter in self._parameters])

        def make(gradient: Tensor) -> Tensor:
            spare: Tensor | None = next(spares)
            fits = spare is not None and spare.shape == gradient.shape and spare.stride() == gradient.stride()
            return spare if fits and spare is not None else wide_room(gradient)

        self._fetched = weights.fetch([plain(gradient) for _, gradient in gradients], make)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is on its way and add it up."""
        fetched, self._fetched = self._fetched, None
        if fetched is None:
            return
        for parameter, gradient in zip(self._parameters, fetched.wait(), strict=True):
            held = _held.get(parameter)
            if held is None:
                _held[parameter] = gradient
                if not gradient.is_sparse:
                    _spare[parameter] = plain(gradient)
            else:
                plain(held).add_(gradient)
        self._parameters = ()


arriving = _Arriving()


def bring(weights: HostWeights, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Start copying gradients of this rank's parts to the host, where they are added to those that are there."""
    for parameter, _ in gradients:
        if not isinstance(parameter, HostGradient):
            parameter.__class__ = _class_of(type(parameter))
    arriving.start(weights, gradients)


def held_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient that a parameter has in host memory; None if it has none there."""
    if not isinstance(parameter, HostGradient):
        return None
    gradient = parameter.grad
    return plain(gradient) if gradient is not None and parameter in _held else None


@functools.cache
def _class_of(own: type) -> type:
    """Return what a parameter of this class becomes."""
    words = {"whole_class": getattr(own, "whole_class", own)}  # its class while it holds the whole for a while
    return type(own.__name__, (HostGradient, own), words)
