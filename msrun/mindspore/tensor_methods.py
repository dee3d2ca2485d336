"""MindSpore's methods of tensors, given to torch's: a process that imports msrun.mindspore speaks MindSpore.

A name that torch lacks is added. A method that both have takes MindSpore's words too (`x.mean(axis=0, keep_dims=True)`)
and stays torch's without them, but for `std` and `var`, which MindSpore divides by n unless told otherwise, and `str`,
which shows the numbers alone. `x.size` stays torch's method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrun.mindspore.dtype import as_dtype
from msrun.mindspore.ops import elementwise, neural, shapes
from msrun.mindspore.ops.table import note_once

_ADDED = (
    "approximate_equal expand_dims fills gather_elements gather_nd invert reverse soft_shrink tensor_scatter_add "
    "tensor_scatter_update top_k unsorted_segment_sum xdivy"
)
"""Methods that are the functions of the same name."""
_WORDS = {
    "all": "axis keep_dims",
    "any": "axis keep_dims",
    "argmax": "keepdims",
    "flatten": "order",
    "mean": "keep_dims",
    "prod": "keep_dims",
    "repeat_interleave": "axis",
    "split": "axis split_size_or_sections",
}
"""Method of both -> the words that torch's does not take; with one of them the function of the same name is called."""


def asnumpy(self: Tensor) -> np.ndarray:
    """Return the numbers as a numpy array; of bfloat16, which numpy lacks, as float32."""
    plain = self.detach().as_subclass(Tensor).cpu()
    array: np.ndarray = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def text_of(self: Tensor, *, tensor_contents: Any = None) -> str:
    """Return what MindSpore prints of a tensor: its numbers. Of one that has none, what torch prints."""
    del tensor_contents
    try:
        return str(asnumpy(self))
    except (RuntimeError, TypeError, NotImplementedError):  # of a trace, sparse, on meta
        return _repr(self)


def _format(self: Tensor, how: str) -> str:
    return format(self.item() if self.dim() == 0 and how else text_of(self), how)


_repr = Tensor.__repr__


def _with_words(words: frozenset[str], own: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    @functools.wraps(own)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs and not words.isdisjoint(kwargs):
            return theirs(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    return method


def _spread(own: Callable[..., Any], name: str) -> Any:
    """Return `std` or `var` of all elements, divided by n - ddof; torch's where torch's words are used."""

    @functools.wraps(own)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & {"dim", "unbiased", "correction", "keepdim"} or any(
            isinstance(one, bool) for one in args[:1]
        ):
            return own(self, *args, **kwargs)
        return shapes.OPERATORS[name](self, *args, **kwargs)

    return method


def _largest(own: Callable[..., Any], find: Callable[..., Any]) -> Any:
    @functools.wraps(own)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "axis" not in kwargs:
            return own(self, *args, **kwargs)
        return find(self, shapes.dims(kwargs.pop("axis")), kwargs.pop("keepdims", False), **kwargs)

    return method


def _transpose(own: Callable[..., Any]) -> Any:
    @functools.wraps(own)
    def method(self: Tensor, *axes: Any, **kwargs: Any) -> Any:
        if kwargs or (len(axes) == 2 and not isinstance(axes[0], list | tuple)):
            return own(self, *axes, **kwargs)
        order = axes[0] if len(axes) == 1 else axes
        return self.permute(tuple(order) or tuple(range(self.dim()))[::-1])

    return method


def _astype(self: Tensor, dtype: Any, copy: bool = True) -> Tensor:
    return self.to(as_dtype(dtype), copy=copy)


def _set_words(self: Tensor, *_: Any, **__: Any) -> Tensor:
    note_once("Tensor.set_const_arg")
    return self


def add_tensor_methods() -> None:
    """Give torch's tensors MindSpore's methods, once per process."""
    if hasattr(Tensor, "asnumpy"):
        return
    functions = {**elementwise.OPERATORS, **shapes.OPERATORS, **neural.OPERATORS}
    added: dict[str, Any] = {
        "asnumpy": asnumpy,
        "astype": _astype,
        "copy": lambda self: self.clone(),
        "fill": lambda self, value: torch.full_like(self, value),
        "value": lambda self: self,
        "init_data": lambda self, *_, **__: self,
        "flush_from_cache": lambda self: self,
        "set_const_arg": _set_words,
        "has_init": False,
        "move_to": lambda self, to, blocking=True: self.to(
            "cpu" if to == "CPU" else torch.get_default_device(), non_blocking=not blocking
        ),
        "ptp": lambda self, axis=None, keepdims=False: (
            self.amax(d := shapes.dims(axis), keepdims) - self.amin(d, keepdims)
        ),
        "strides": property(lambda self: tuple(step * self.itemsize for step in self.stride())),
        "itemset": lambda self, *args: self.clone().index_put_(
            tuple(torch.tensor(i) for i in args[:-1]), torch.tensor(args[-1], dtype=self.dtype)
        ),
        **{name: functions[name] for name in _ADDED.split() if name in functions},
    }
    for name, method in added.items():
        if not hasattr(Tensor, name):
            setattr(Tensor, name, method)
    for name, words in _WORDS.items():
        setattr(Tensor, name, _with_words(frozenset(words.split()), getattr(Tensor, name), functions[name]))
    for name, find in (("max", torch.amax), ("min", torch.amin)):
        setattr(Tensor, name, _largest(getattr(Tensor, name), find))
    for name in ("std", "var"):
        setattr(Tensor, name, _spread(getattr(Tensor, name), name))
    Tensor.transpose = _transpose(Tensor.transpose)  # type: ignore[method-assign]
    Tensor.__str__ = text_of  # type: ignore[method-assign, assignment]
    Tensor.__format__ = _format  # type: ignore[method-assign]
