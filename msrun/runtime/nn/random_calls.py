"""Random numbers of a network that runs as it is: in one process, and in the modes that capture nothing.

Python's function is what is noticed; what it draws is then seen as ATen operators, whatever the function does around.
"""

from __future__ import annotations

import inspect
import logging
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from msrun.runtime.nn.random_draws import FACTORIES, arguments_of, draw, drawn_result, is_drawn, shape_of
from msrun.runtime.nn.random_stream import Box, Draw, Source, current_draw, keep_mask

Kind = Literal["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"]
_ALPHA = 1.7580993408473766
"""SELU's limit for very negative inputs, times its scale: alpha dropout (Klambauer et al. 2017) sets values to it."""


class _Scaled(torch.autograd.Function):
    """value * mask * scale; keeps only the mask, one byte for each element, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _scaled(value, mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _Scaled.apply(gradient, mask, ctx.scale), None, None


def _scaled(value: Tensor, mask: Tensor, scale: float) -> Tensor:
    if mask.shape == value.shape:
        return torch.ops.aten.native_dropout_backward.default(value, mask, scale)
    return value * mask.to(value.dtype).mul_(scale)


def mask_shape(kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the mask: whole channels fall together in feature dropout, dimensions 0 and 1 apart."""
    return (*shape[:2], *(1,) * (len(shape) - 2)) if kind.startswith("feature") else shape


def drop(value: Tensor, mask: Tensor, p: float, kind: Kind) -> Tensor:
    """Return `value` where the mask keeps it, scaled by 1 / (1 - p); alpha dropout keeps mean and variance instead."""
    if kind in ("dropout", "feature_dropout"):
        return _Scaled.apply(value, mask, 1.0 / (1.0 - p) if p < 1 else 0.0)
    if p >= 1:
        return value * 0
    scale = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    noise = mask.to(value.dtype)
    return value * (noise * scale) + (noise - 1) * (_ALPHA * scale) + _ALPHA * scale * p


BLOCK_ELEMENTS = 1 << 22
"""Attention weights that exist at a time: 16 MiB in float32."""
KeepRows = Callable[[slice], Tensor]
"""Rows of queries -> True where their attention weights (.., rows, S) are kept."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    keep: KeepRows,
) -> Tensor:
    """Scaled dot-product attention with dropout of the attention weights, by its definition in torch's documentation.

    Shapes: query (.., L, E), key (.., S, E), value (.., S, Ev) -> (.., L, Ev). A row that may look at nothing gives
    zeros. More than `BLOCK_ELEMENTS` weights are computed for some rows of queries at a time, and again on the way
    back, with the same masks.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale

    def block(query: Tensor, key: Tensor, value: Tensor, given: Tensor | None, rows: slice) -> Tensor:
        scores = query @ key.transpose(-2, -1) * factor
        if is_causal:
            places = torch.arange(max(rows.stop, key.size(-2)), device=scores.device)
            given = places[rows, None] >= places[: key.size(-2)]
        return drop(_weights(scores, given), keep(rows), dropout_p, "dropout") @ value

    length = query.size(-2)
    of_a_row = math.prod(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])) * key.size(-2)
    step = max(1, BLOCK_ELEMENTS // max(1, of_a_row))
    if step >= length:
        return block(query, key, value, attn_mask, slice(0, length))
    found = []
    for begin in range(0, length, step):
        rows = slice(begin, min(begin + step, length))
        given = attn_mask
        if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.size(-2) > 1:
            given = attn_mask[..., rows, :]
        part = query[..., rows, :]
        # It draws nothing, so there is no state of a generator to keep; dynamo never sees it.
        found.append(checkpoint(block, part, key, value, given, rows, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(found, -2)


def _weights(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Return the softmax of scores under a mask: of what may be seen, or added to the scores."""
    if attn_mask is None:
        return scores.softmax(-1)
    is_bool = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(sees_nothing, 0).softmax(-1).masked_fill(sees_nothing, 0)


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
    """Gives what draws random numbers inside those that it has on any number of ranks.

    Recomputation by torch.utils.checkpoint happens where this mode is not on, and torch.compile would take the numbers
    of the first step for constants: what draws inside them keeps torch's own numbers, which are right, but those of one
    process only. So does what has a generator of its own, and a parameter that gets its first values.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace calls that draw; let all others through."""
        kwargs = kwargs or {}
        if func not in _SEEN or torch.compiler.is_compiling():  # of every operator of every step
            return func(*args, **kwargs)
        draw = current_draw.get()
        if func is F.multi_head_attention_forward:
            with self:
                return _seen_inside(func)(*args, **kwargs)
        if draw is None or _is_recomputed():
            return func(*args, **kwargs)
        if func in _DRAWING:
            return _drawing(draw, func, args, kwargs)
        if func in _NOT_OURS:
            if draw.count > 1:
                _warn_once(f"{func.__name__} draws torch's own numbers: they are right, but not those of one process")
            return func(*args, **kwargs)
        if func is _ATTENTION:
            return _attention(draw, *args, **kwargs)
        return _dropout(draw, func, *args, **kwargs)


_ATTENTION = F.scaled_dot_product_attention
_IN_PLACE = ("bernoulli_", "uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_", "random_")
_DRAWING = frozenset(
    [
        *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.normal),
        *(torch.bernoulli, Tensor.bernoulli, torch.rrelu, torch.rrelu_, torch.native_dropout),
        *(getattr(Tensor, name) for name in _IN_PLACE),
        *(F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
        *(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
        *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, torch.svd_lowrank, torch.pca_lowrank),
    ]
)
_NOT_OURS = frozenset([torch.multinomial, Tensor.multinomial, torch.randperm, torch.poisson, torch.binomial])
_SEEN = frozenset([*_KINDS, *_CHANNELS, _ATTENTION, F.multi_head_attention_forward, *_DRAWING, *_NOT_OURS])


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
        if frame.f_globals.get("__name__") == "msrun.runtime.parallel.recomputation":
            return False  # which gives it the same masks when it runs again
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            _warn_once(
                "what draws random numbers inside torch.utils.checkpoint has torch's own: they are right, but not "
                "those that several ranks would have"
            )
            return True
        if frame.f_globals.get("__name__") == "msrun.runtime.parallel.auto_parallel":
            return False
        frame = frame.f_back
    return False


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)


def _drawing(draw: Draw, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function whose random operators draw our numbers."""
    subject = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    is_first_value = func.__name__.endswith("_") and isinstance(subject, nn.Parameter)
    if is_first_value:
        return func(*args, **kwargs)
    with _RandomOperators(draw, is_of_parameter=isinstance(subject, nn.Parameter)):
        return func(*args, **kwargs)


class _RandomOperators(TorchDispatchMode):
    """Gives ATen's random operators our numbers, beneath autograd, which does with them what it does with torch's."""

    def __init__(self, numbers: Draw, *, is_of_parameter: bool) -> None:
        super().__init__()
        self._numbers = numbers
        self._is_of_parameter = is_of_parameter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = arguments_of(func, args, kwargs)
        if not is_drawn(func, given):
            return func(*args, **kwargs)
        shape, device = shape_of(func, given)
        rows = None if self._is_of_parameter else _dim_of_rows(self._numbers.rows, shape, is_new=func in FACTORIES)
        source = Source(self._numbers.key(), _take_call(self._numbers), Box.whole(shape), rows, device)
        return drawn_result(func, given, draw(func, given, source))


def _take_call(draw: Draw) -> int:
    call, draw.calls = draw.calls, draw.calls + 1
    return call


def _dim_of_rows(rows: int | None, shape: tuple[int, ...], *, is_new: bool) -> int | None:
    """Return the dimension that holds rows of the batch, as far as sizes tell; None: no dimension does.

    Args:
        rows: of the batch, in this part.
        is_new: the tensor is made out of nothing, so that no dimension has been joined with the rows.
    """
    if not shape:
        return None
    if not rows:
        return 0
    if shape[0] == rows or (not is_new and len(shape) > 1 and shape[0] % rows == 0):
        return 0
    return shape.index(rows) if rows in shape else None


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

    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]) if not enable_gqa else query.shape[:-2]
    shape = (*batch, query.size(-2), key.size(-2))
    numbers, call, rows_of_batch = draw.key(), _take_call(draw), _dim_of_rows(draw.rows, shape, is_new=False)

    def keep(rows: slice) -> Tensor:
        return keep_mask(numbers, call, dropout_p, Box.whole(shape).narrow(-2, rows), rows_of_batch, query.device)

    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, keep)


def _mask(draw: Draw, shape: tuple[int, ...], p: float, device: torch.device, *, has_rows: bool) -> Tensor:
    """Return the mask of the next call.

    Args:
        has_rows: a dimension holds rows of the batch, as it does in all but parameters.
    """
    rows = _dim_of_rows(draw.rows, shape, is_new=False) if has_rows else None
    return keep_mask(draw.key(), _take_call(draw), p, Box.whole(shape), rows, device)
