"""Dropout of a network that runs as it is: in a world of one process, and in the modes that capture nothing."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from msrun.runtime.nn.dropout import Kind, attend, drop, mask_shape
from msrun.runtime.nn.random_bits import Box, keep_mask
from msrun.runtime.nn.random_stream import Draw, current_draw

_KINDS: dict[Any, Kind] = {
    F.dropout: "dropout",
    torch.dropout: "dropout",
    torch.dropout_: "dropout",
    torch.feature_dropout: "feature_dropout",
    torch.feature_dropout_: "feature_dropout",
    F.alpha_dropout: "alpha_dropout",
    torch.alpha_dropout: "alpha_dropout",
    torch.alpha_dropout_: "alpha_dropout",
    F.feature_alpha_dropout: "feature_alpha_dropout",
    torch.feature_alpha_dropout: "feature_alpha_dropout",
    torch.feature_alpha_dropout_: "feature_alpha_dropout",
}
_CHANNELS = {F.dropout1d: 2, F.dropout2d: 0, F.dropout3d: 4}
"""function -> number of dimensions of an input without a batch, which is one sample; 0: there is none"""
_log = logging.getLogger("msrun.runtime")


class RandomCalls(TorchFunctionMode):
    """Gives the dropouts called inside the masks that they have on any number of ranks.

    Recomputation by torch.utils.checkpoint happens where this mode is not on, and torch.compile would take the mask of
    the first step for a constant: dropouts inside them keep torch's own masks, which are right, but those of one
    process only.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace calls of dropout; let all others through."""
        kwargs = kwargs or {}
        if func not in _SEEN or torch.compiler.is_compiling():  # of every operator of every step
            return func(*args, **kwargs)
        draw = current_draw.get()
        if func is F.multi_head_attention_forward:
            with self:
                return _seen_inside(func)(*args, **kwargs)
        if draw is None or _is_recomputed():
            return func(*args, **kwargs)
        if func is _ATTENTION:
            return _attention(draw, *args, **kwargs)
        return _dropout(draw, func, *args, **kwargs)


_ATTENTION = F.scaled_dot_product_attention
_SEEN = frozenset([*_KINDS, *_CHANNELS, _ATTENTION, F.multi_head_attention_forward])


def _seen_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch.nn.functional that calls its parts through the mode instead of itself again."""
    assert isinstance(function, types.FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    twin = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _is_recomputed() -> bool:
    """Return True inside a part of the network that torch.utils.checkpoint will run again."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "msrun.runtime.parallel.recompute":
            return False  # which gives it the same masks when it runs again
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            _warn_of_recomputation()
            return True
        if frame.f_globals.get("__name__") == "msrun.runtime.parallel.auto_parallel":
            return False
        frame = frame.f_back
    return False


_warned: set[str] = set()


def _warn_of_recomputation() -> None:
    if "recomputation" not in _warned:
        _warned.add("recomputation")
        _log.warning(
            "a dropout inside torch.utils.checkpoint has torch's own masks: they are right, but not those that several "
            "ranks would have"
        )


def _dropout(
    draw: Draw,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    **words: Any,
) -> Tensor:
    if training is None:
        training = words.get("train", func not in (F.alpha_dropout, F.feature_alpha_dropout))
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return input
    shape = tuple(input.shape)
    kind = _KINDS.get(func, "feature_dropout")
    is_one_sample = func in _CHANNELS and input.dim() == _CHANNELS[func]
    seen = (1, *shape) if is_one_sample else shape
    has_rows = not isinstance(input, torch.nn.Parameter)
    mask = _mask(draw, mask_shape(kind, seen), p, input.device, has_rows=has_rows)
    result = drop(input.view(seen) if is_one_sample else input, mask, p, kind).view(shape)
    writes = inplace or func.__name__.endswith("_")
    return input.copy_(result) if writes else result


def _attention(
    draw: Draw,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def make_mask(shape: tuple[int, ...]) -> Tensor:
        return _mask(draw, shape, dropout_p, query.device, has_rows=True)

    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, make_mask)


def _mask(draw: Draw, shape: tuple[int, ...], p: float, device: torch.device, *, has_rows: bool) -> Tensor:
    """Return the mask of the next call.

    Args:
        has_rows: dimension 0 holds rows of the batch, as it does in all but parameters: nothing here knows better.
    """
    call, draw.calls = draw.calls, draw.calls + 1
    return keep_mask(draw.key(), call, p, Box.whole(shape), 0 if shape and has_rows else None, device)
