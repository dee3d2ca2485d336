"""Weights of an optimizer that works on the host: a wide copy of every parameter, and what is copied there and back.

The weights on the device may be of 16 bits; their copies are of 32 at least, so that updates below half a unit in the
last place of a weight add up (mixed precision training's master weights).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.runtime.execute.gradients import coalesced
from msrun.runtime.parts.part import Part, lying_as, parameter_like
from msrun.runtime.parts.part_functions import as_part
from msrun.runtime.tensors.plain_tensors import local_part, plain, plain_tensors


def changed_rows(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the rows of a parameter that a step with its gradient changes, ascending; None: it may change all.

    A user's own optimizer has `changes_named_rows = True` if it changes the rows of a sparse gradient alone.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse or not _changes_named_rows(optimizer, group):
        return None
    return coalesced(gradient).indices()[0]


def _changes_named_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    known: tuple[type[Optimizer], ...] = (torch.optim.SparseAdam, torch.optim.Adagrad)
    if not group.get("momentum"):  # its momentum goes on in rows without a gradient
        known = (*known, torch.optim.SGD)
    step = inspect.unwrap(type(optimizer).step)
    return getattr(optimizer, "changes_named_rows", False) or any(step is inspect.unwrap(one.step) for one in known)


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


MASTER = "master_weight"
"""Key of a parameter's wide copy in its optimizer's state, where the parameter itself is of fewer bits."""
HOST = torch.device("cpu")


@dataclass
class Copies:
    """Bytes that were copied between the device and the host."""

    to_host: int = 0
    to_device: int = 0

    def __sub__(self, other: Copies) -> Copies:
        return Copies(self.to_host - other.to_host, self.to_device - other.to_device)


@dataclass
class _Kept:
    """A wide copy, and the weight as it was when both were equal."""

    copy: Tensor
    seen: tuple[int, int]


class HostWeights:
    """The wide copies of one optimizer's parameters.

    Args:
        keeps: copies stay from step to step; else each step makes them of the parameters, and of 16-bit weights loses
            what they cannot hold.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.copies = Copies()
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def take(self, parameter: Tensor, master: Any = None, *, on_host: bool) -> nn.Parameter:
        """Return what an optimizer steps in a parameter's place: the wide copy, without gradient.

        A weight that somebody has changed since the last step counts as it is now.

        Args:
            master: the copy that the optimizer's state holds; None where it has none.
            on_host: False: it stays on the device, where a weight that is wide enough is its own copy.
        """
        local = local_part(parameter)
        if not on_host and not is_narrow(local):
            return parameter_like(parameter, local)
        kept: _Kept | None = self._kept.get(parameter)
        copy = local_part(master) if isinstance(master, Tensor) else kept.copy if kept is not None else None
        place = HOST if on_host else local.device
        if copy is not None and (copy.shape != local.shape or copy.device != place or not self.keeps):
            copy = None
        is_same = copy is not None and kept is not None and copy.data_ptr() == kept.copy.data_ptr()
        if not is_same or kept is None or kept.seen != _mark(local):
            copy = self._read(local, copy, on_host=on_host)
        assert copy is not None
        if self.keeps:
            self._kept[parameter] = _Kept(copy, _mark(local))
        return parameter_like(parameter, copy)

    def give(self, parameter: Tensor, stepped: Tensor, rows: Tensor | None = None, *, on_host: bool) -> None:
        """Copy a stepped copy back into its parameter.

        Args:
            rows: the only ones that have changed; None: all.
        """
        local, copy = local_part(parameter), local_part(stepped)
        if rows is not None:
            changed = copy.index_select(0, rows).to(local.dtype)
            self.copies.to_device += _bytes(changed) if on_host else 0
            local.index_copy_(0, rows.to(local.device), changed.to(local.device))
        elif local.data_ptr() != copy.data_ptr() or not local.numel():
            self.copies.to_device += _bytes(local) if on_host else 0
            if local.device == copy.device:
                local.copy_(copy)
            else:
                narrow = _empty(local, local.dtype).copy_(copy)  # in pinned memory: the device fetches it by itself
                local.copy_(narrow, non_blocking=True)
        kept: _Kept | None = self._kept.get(parameter)
        if kept is not None:
            kept.seen = _mark(local)

    def fetch(self, gradients: Sequence[Tensor], make: Callable[[Tensor], Tensor]) -> Fetched:
        """Start copying gradients, dense or sparse, to the host, where they become as wide as their weights' copies.

        Args:
            make: gives memory there for a dense gradient.
        """
        return Fetched(self.copies, gradients, make)

    def copy_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's copy; 0 where there is none."""
        kept: _Kept | None = self._kept.get(parameter)
        return 0 if kept is None else _bytes(kept.copy)

    def _read(self, local: Tensor, master: Tensor | None, *, on_host: bool) -> Tensor:
        """Return the weight as it is on the device; wider where `master` rounds to it."""
        dtype = wide_type(local)
        if on_host:
            self.copies.to_host += _bytes(local)
        if on_host and local.device != HOST:
            fresh = _empty(local, dtype).copy_(local)
        else:
            fresh = local.to(dtype, copy=True)
        if master is None or dtype == local.dtype:
            return fresh
        return master.copy_(torch.where(master.to(local.dtype) == fresh.to(local.dtype), master, fresh))


class Room:
    """Memory on the host that gradients are brought to again and again: fresh pages cost more than the copies."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}

    def enter(self) -> Callable[[Tensor], Tensor]:
        """Forget what is there; returns what makes room for a gradient, as wide as its weight's copy."""
        places = 0

        def make(gradient: Tensor) -> Tensor:
            nonlocal places
            places += 1
            key = (places, wide_type(gradient))
            known = self._memory.get(key)
            if known is None or known.numel() < gradient.numel():
                known = self._memory[key] = torch.empty(gradient.numel(), dtype=key[1])
            if not gradient.is_contiguous():
                return wide_room(gradient)
            return known[: gradient.numel()].view(gradient.shape)

        return make


def wide_room(gradient: Tensor) -> Tensor:
    """Return memory on the host for a gradient, as wide as its weight's copy and laid out as it is."""
    return torch.empty_like(gradient, dtype=wide_type(gradient), device=HOST)


class Fetched:
    """Gradients on their way to the host."""

    def __init__(self, copies: Copies, gradients: Sequence[Tensor], make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._values: list[Tensor] = []
        self._event: Any = None
        for gradient in gradients:
            copies.to_host += _bytes(gradient)
            if gradient.device == HOST and not gradient.is_sparse:
                self._values.append(make(gradient).copy_(gradient))
            elif gradient.is_sparse:
                self._values.append(coalesced(gradient.to(HOST, wide_type(gradient), copy=True)))
            else:
                self._values.append(_empty(gradient, gradient.dtype).copy_(gradient, non_blocking=True))
                self._event = self._event or torch.Event(gradient.device)
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[Tensor]:
        """Return the gradients on the host."""
        if self._event is None:
            return self._values
        self._event.synchronize()
        return [value if value.is_sparse else self._make(value).copy_(value) for value in self._values]


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the type of a weight's copy, and of its optimizer's state: float32, or the weight's own if wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def is_narrow(tensor: Tensor) -> bool:
    """Return whether a weight is of fewer bits than its copy."""
    return wide_type(tensor) != tensor.dtype


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient of this rank's part as an ordinary tensor."""
    return None if parameter.grad is None else local_part(parameter.grad)


def tensor_bytes(value: Any) -> int:
    """Return the bytes of this rank's part of a tensor; 0 of everything else."""
    return _bytes(local_part(value)) if isinstance(value, Tensor) else 0


def put_gradient(stepped: nn.Parameter, gradient: Tensor) -> None:
    """Give a copy its gradient, of this rank's part."""
    stepped.grad = lying_as(stepped, gradient) if isinstance(stepped, DTensor) else gradient


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory on the host that the device of `like` can copy from and to by itself."""
    return torch.empty_like(like, dtype=dtype, device=HOST, pin_memory=like.device != HOST)


def _mark(local: Tensor) -> tuple[int, int]:
    """Return what changes when a weight is written to or gets other memory."""
    return local._version, local.data_ptr()


def _bytes(local: Tensor) -> int:
    if local.is_sparse:
        return _bytes(local._indices()) + _bytes(local._values())
    return local.numel() * local.element_size()
