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
    try:
        return str(asnumpy(self))
    except (RuntimeError, TypeError, NotImplementedError):  # of a trace, sparse, on meta
        return _repr(self)


def _format(self: Tensor, how: str) -> str:
    return format(self.item() if self.dim() == 0 and how else text_of(self), how)


_repr = Tensor.__repr__


def _either(own: Callable[..., Any], theirs: Callable[..., Any], is_theirs: Callable[[Any, Any], bool]) -> Any:
    """Return torch's method, with MindSpore's function in its place for arguments that are MindSpore's."""

    @functools.wraps(own)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (theirs if is_theirs(args, kwargs) else own)(self, *args, **kwargs)

    return method


def _has_words(*words: str) -> Callable[[Any, Any], bool]:
    return lambda _, kwargs: not kwargs.keys().isdisjoint(words)


def _is_spread(args: Any, kwargs: Any) -> bool:
    """Tell whether `std` or `var` is of n - ddof, not torch's."""
    is_torchs = kwargs.keys() & {"dim", "unbiased", "correction", "keepdim"}
    return not is_torchs and not any(isinstance(one, bool) for one in args[:1])


def _is_order(axes: Any, kwargs: Any) -> bool:
    return not kwargs and (len(axes) != 2 or isinstance(axes[0], list | tuple))


def _permute(self: Tensor, *axes: Any) -> Tensor:
    order = axes[0] if len(axes) == 1 else axes
    return self.permute(tuple(order) or tuple(range(self.dim()))[::-1])


def _largest(find: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, axis, keepdims=False, **more: find(self, shapes.dims(axis), keepdims, **more)


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
        **dict.fromkeys(("value", "init_data", "flush_from_cache"), lambda self, *_, **__: self),
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
    rows = {name: (functions[name], _has_words(*words.split())) for name, words in _WORDS.items()}
    rows |= {name: (_largest(find), _has_words("axis")) for name, find in (("max", torch.amax), ("min", torch.amin))}
    rows |= {name: (functions[name], _is_spread) for name in ("std", "var")} | {"transpose": (_permute, _is_order)}
    for name, (theirs, is_theirs) in rows.items():
        setattr(Tensor, name, _either(getattr(Tensor, name), theirs, is_theirs))
    Tensor.__str__ = text_of  # type: ignore[method-assign, assignment]
    Tensor.__format__ = _format  # type: ignore[method-assign]
