"""What torch's functions do with parts: element by element, norms by one number, everything else on the whole.

What needs the whole gathers it, and all ranks call it together: layers of a network that is called outside its step,
too. A view of the whole, such as `weight[3]`, is a `WholeView`: what is written into it comes into every rank's part.
What would hand out memory is refused.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from msrun.errors import ParallelError
from msrun.runtime import world
from msrun.runtime.execute.placement import Placement
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.parts.norms import norms_of_each
from msrun.runtime.progress import waiting_in
from msrun.runtime.tensors.plain_tensors import StandIn, plain, plain_tensors

log = logging.getLogger("msrun.runtime")
Function = Callable[..., Any]


_words = str.split


_READS = _words(
    """
    dtype device requires_grad is_leaf grad_fn layout ndim itemsize output_nr _version retains_grad name
    _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_xpu is_mps is_meta is_quantized is_sparse
    is_sparse_csr is_mkldnn is_nested is_xla is_ipu is_maia is_mtia is_vulkan dim ndimension
    element_size storage_offset get_device is_contiguous is_floating_point is_complex is_signed is_conj is_neg
    is_inference is_pinned is_shared _is_view _fix_weakref _use_count _has_compatible_shallow_copy_type
    __dir__ requires_grad_ retain_grad register_post_accumulate_grad_hook record_stream result_type can_cast
    """
)
"""What a tensor says of its own memory, and what is done with it whole or not."""
_ELEMENTWISE = frozenset(
    _words(
        """
        add sub subtract rsub mul multiply div divide true_divide floor_divide pow float_power fmod remainder neg
        negative positive pos abs absolute sign sgn signbit sqrt rsqrt square reciprocal exp exp2 expm1 log log2 log10
        log1p logaddexp sin cos tan tanh sinh cosh asin acos atan atan2 arctan2 sigmoid logit erf erfc erfinv hypot
        copysign relu gelu silu softplus floor ceil round trunc frac clamp clip clamp_min clamp_max maximum minimum fmax
        fmin lerp addcmul addcdiv where masked_fill nan_to_num isnan isinf isfinite isposinf isneginf isclose eq ne lt
        le gt ge less greater not_equal greater_equal less_equal logical_and logical_or logical_xor logical_not
        bitwise_and bitwise_or bitwise_xor bitwise_not heaviside xlogy ldexp to type type_as float double half bfloat16
        int long short bool byte char cpu cuda xpu npu contiguous clone detach alias positive view_as expand_as
        reshape_as copy fill zero zeros_like ones_like full_like empty_like adam adamw sgd adagrad
        """
    )
)
"""Names without `_foreach_`, `_fused_` and a trailing `_`: one element of the result needs one element of each."""
_DUNDERS = {
    **{f"__{name}__": name for name in _words("add sub mul pow neg pos abs eq ne lt le gt ge")},
    **{f"__{kind}{name}__": name for kind in "ir" for name in _words("add sub mul pow")},
    **{f"__{kind}{name}__": "div" for kind in ("", "i", "r") for name in ("truediv", "div")},
    **{f"__{kind}{name}__": f"bitwise_{name}" for kind in ("", "i", "r") for name in ("and", "or", "xor")},
    **{f"__{kind}floordiv__": "floor_divide" for kind in ("", "i", "r")},
    **{f"__{kind}mod__": "remainder" for kind in ("", "i", "r")},
    "__invert__": "bitwise_not",
}
_NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor}
_NORMS = {torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm}
_SHAPE: Any = Tensor.shape
_OF_SHAPE = frozenset(_words("shape size stride numel nelement nbytes __len__ is_same_size"))
"""Of the whole, as every number that is made of them must be; but for gradients of rows (`_OF_ROWS`)."""
_DRAWN_LIKE = frozenset(_words("rand_like randn_like randint_like"))
_DRAWN = frozenset(_words("bernoulli normal poisson multinomial dropout"))
_OF_MEMORY = frozenset(
    _words(
        """
        data_ptr untyped_storage storage _typed_storage set_ resize_ resize_as_ __dlpack__ __dlpack_device__ to_dlpack
        share_memory_ __cuda_array_interface__ module_load __set__ __delete__
        """
    )
)
"""What hands out, or replaces, the memory that a whole does not have here."""
_OF_ROWS = frozenset(
    _words("coalesce is_coalesced indices _indices values _values _nnz sparse_mask sparse_dim dense_dim new")
)
"""What optimizers ask of gradients that have rows of a table alone: they are rows of this rank's part, whose numbers
count from its first row, and their shape is that of the part."""
_OF_NETWORKS = frozenset(
    _words(
        """
        linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding embedding_bag
        layer_norm group_norm batch_norm rms_norm multi_head_attention_forward lstm gru rnn_tanh rnn_relu prelu addmm
        """
    )
)
"""What layers of a network call."""
_OF_SCALERS = frozenset(("_amp_foreach_non_finite_check_and_unscale_", "_amp_non_finite_check_and_unscale_"))


def _build_reads() -> set[Function]:
    found: set[Function] = set()
    for name in _READS:
        for owner in (Tensor, torch):
            value = getattr(owner, name, None)
            if value is not None:
                found.add(value if callable(value) else value.__get__)
    for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
        found.add(getattr(Tensor, name).__set__)
    return found


reads = _build_reads()
"""Functions that a tensor answers by itself."""


def is_of_object(func: Function) -> bool:
    """Return whether a DTensor answers by itself: what it is, its shape, its hooks, the graph that it is in."""
    return func in reads or func in _OF_AUTOGRAD or _name_of(func) in _OF_SHAPE or func == Tensor.register_hook


class PlacedTensor(StandIn, Tensor):
    """A tensor that is this rank's part of a whole one, as torch's functions see it; `Part` is the one that is made."""

    placement: Placement
    part_class: ClassVar[type[PlacedTensor]]
    """Class of what torch's functions return."""
    keeps_memory: ClassVar[bool] = False
    """Whether others hold its memory, so that `data` is written to and not replaced."""

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, a copy on every rank. All ranks call it together."""
        raise NotImplementedError

    def gradient_edge(self) -> Any:
        """Return what stands for it where autograd is asked for its gradient."""
        raise NotImplementedError

    def constructed_by(self, construct: Callable[[Any], Any]) -> Any:
        """Return what `torch.tensor` and the like make of it: a part."""
        return _wrap(construct(self), self.placement)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch element by element, or refuse it."""
        return run_on_parts(func, types, args, dict(kwargs or {}))


class WholeView(StandIn, Tensor):
    """A view of a gathered whole: functions see the part's present values, writes come into every rank's part."""

    origin: PlacedTensor
    whole: Tensor

    def constructed_by(self, construct: Callable[[Any], Any]) -> Any:
        """Return what `torch.tensor` and the like make of the present values."""
        plain(self.whole).copy_(_whole_of(self.origin, self.origin.placement))
        return construct(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on the whole."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which brings parts
        if func in reads or _name_of(func) in _OF_SHAPE:
            return _run_plain(func, args, kwargs or {})
        return _OnWholes(func, _name_of(func)).run(args, dict(kwargs or {}))


def as_part(tensor: Tensor, placement: Placement) -> Any:
    """Make an ordinary tensor know that it is a part; returns it, a `Part`."""
    tensor.__class__ = PlacedTensor.part_class
    tensor.placement = placement  # type: ignore[attr-defined]
    return tensor


def run_on_parts(func: Function, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch that got a part."""
    if func in reads:
        return _run_plain(func, args, kwargs)
    name = _name_of(func)
    if name in _OF_SHAPE:
        return _run_plain(func, args, kwargs) if args[0].is_sparse else _of_shape(func, args, kwargs)
    strangers = [kind for kind in types if kind is not Tensor and not issubclass(kind, PlacedTensor | WholeView)]
    if any(getattr(kind, _HANDLER) is not _DISABLED for kind in strangers):
        return NotImplemented  # another subclass decides first
    if name == "__setitem__" and isinstance(args[1], PlacedTensor) and args[1].placement.is_same_cut(args[0].placement):
        _Elementwise(func, "fill_").run(args, kwargs)
        return None
    if name in _DUNDERS or _plain_name(name) in _ELEMENTWISE:
        return _Elementwise(func, name).run(args, kwargs)
    if name in _OF_ROWS and any(part.is_sparse for part in _parts_in((args, kwargs))):
        found = _run_plain(func, args, kwargs)
        return as_part(found, args[0].placement) if isinstance(found, Tensor) and found.is_sparse else found
    if func in (_GET_DATA, _GET_GRADIENT):
        return _wrap(_run_plain(func, args, kwargs), args[0].placement)
    if func == _SET_DATA:
        return _set_data(*args)
    if func in _NEW or name in _DRAWN_LIKE:
        return _make(func, name, args, kwargs)
    if func in _NORMS and (found := _norm(func, *args, **kwargs)) is not None:
        return found
    if name == "_foreach_norm" and not _wants_gradient(args[0]):
        return norms_of_wholes(args[0], *args[1:], **{"power" if key == "ord" else key: v for key, v in kwargs.items()})
    if func in _OF_AUTOGRAD:
        return _differentiate(func, args, kwargs)
    if name in _OF_SCALERS:
        return _unscale(func, *args)
    return _OnWholes(func, name).run(args, kwargs)


def _unscale(func: Function, gradients: Any, found_inf: Tensor, factor: Tensor) -> Any:
    """Unscale parts of gradients; all ranks know of a number that is none, and skip the same steps."""
    result = _run_plain(func, (gradients, found_inf, factor), {})
    _parts_in([gradients])[0].placement.check_world("GradScaler")
    traffic.add("all_reduce", found_inf)
    with waiting_in(lambda: "the all_reduce of whether gradients are finite"):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
    return result


def _name_of(func: Any) -> str:
    name: str = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
    return name


def _of_shape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask a tensor without memory that has the shape of the whole."""
    if func.__name__ == "__get__" and func.__self__ is _SHAPE:  # type: ignore[attr-defined]
        return torch.Size(args[0].placement.shape)
    metas = [_meta(value) if isinstance(value, PlacedTensor) else value for value in args]
    named = {key: _meta(value) if isinstance(value, PlacedTensor) else value for key, value in kwargs.items()}
    return func(*metas, **named)


def _meta(part: PlacedTensor) -> Tensor:
    return torch.empty(part.placement.shape, dtype=part.dtype, device="meta")


def _make(func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a new tensor; one of the whole's shape is a part. Random numbers are those of rank 0's whole one."""
    placed = args[0].placement
    if name in _DRAWN_LIKE:
        source = torch.empty(placed.shape, dtype=args[0].dtype, device=args[0].device)
        made = _same_everywhere(func(source, *args[1:], **kwargs), placed)
        return as_part(placed.cut(made).clone(), placed)
    is_one = len(args) > 1 and isinstance(args[1], Sequence)
    size = kwargs.get("size", args[1] if is_one else args[1:])
    if not placed.is_cut or name == "new_tensor" or tuple(size) != placed.shape:
        return _run_plain(func, args, kwargs)
    rest = args[2:] if is_one else ()  # new_full's value
    named = {key: value for key, value in kwargs.items() if key != "size"}
    return as_part(_run_plain(func, (args[0], placed.local_shape, *rest), named), placed)


def _same_everywhere(whole: Tensor, placed: Placement) -> Tensor:
    """Return rank 0's value on every rank: generators may be in other states, or on other devices."""
    placed.check_world("what is drawn or written")
    flat = whole.detach().contiguous()
    bits = flat.view(-1).view(torch.uint8)
    traffic.add("broadcast", bits)
    with waiting_in(lambda: f"what is drawn or written for {placed.name}"):
        dist.broadcast(bits, 0)
    return flat


class _Gather(torch.autograd.Function):
    """The whole of a part; its gradient is the mean of the ranks', which all compute the same from it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, placed: Placement, layer: str) -> Tensor:
        ctx.placed, ctx.layer = placed, layer
        return _whole_of(local, placed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        placed: Placement = ctx.placed
        placed.check_world("the gradient of the whole")
        total = gradient.contiguous() / placed.world_size
        traffic.add("all_reduce", total)
        with waiting_in(lambda: f"the gradient of the whole of {placed.name}"):
            dist.all_reduce(total)
        if ctx.layer and (gradient - total).abs().max() > 1e-2 * total.abs().max():
            raise ParallelError(
                f"{ctx.layer}: the gradient of {placed.name}, of a call outside the step, is another one on each rank, "
                "of its own rows, as those of the parameters beside it are: give every rank the same rows, or make "
                "this loss a step of its own, AutoParallel(WithLoss(net, loss))"
            )
        return placed.cut(total).clone(), None, None


def _whole_of(local: Tensor, placed: Placement) -> Tensor:
    part: PlacedTensor = as_part(plain(local), placed)
    return part.full_tensor()


def whole_of(part: PlacedTensor, layer: str = "") -> Tensor:
    """Return the whole of a part, which has a gradient if the part has. All ranks call it together.

    Args:
        layer: the function of a network that asks; then the gradient must be the same on all ranks, as those of the
            network's whole parameters are those of this rank's rows.
    """
    if not _wants_gradient([part]):
        return part.full_tensor()
    with plain_tensors():
        local = part.as_subclass(Tensor)
    whole: Tensor = _Gather.apply(local, part.placement, layer)
    return whole


@functools.cache
def _tell_gathered() -> None:
    """Say, once in a process, that a network is called outside its step."""
    if world.get_rank() == 0:
        log.warning(
            "a network is called outside its step: its cut weights are gathered, each when its layer runs, and all "
            "ranks call it together; `with whole_parameters(net):` gathers once for many calls"
        )


def _wants_gradient(values: Any) -> bool:
    return torch.is_grad_enabled() and any(part.requires_grad for part in _parts_in([values]))


class _OnWholes:
    """One call of a function on the wholes of the parts that it is given."""

    def __init__(self, func: Function, name: str) -> None:
        self._func: Any = func
        self._name = name
        self._layer = name if name in _OF_NETWORKS else ""
        is_dunder = name.endswith("__")
        is_assigned = name == "__setitem__" or (name in _DUNDERS and name.startswith("__i"))
        self._writes = is_assigned if is_dunder else name.endswith("_")
        self._wholes: dict[int, tuple[PlacedTensor, Tensor]] = {}
        """id of a part -> it and its whole"""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it; what it writes into a part, or into a view of one, is rank 0's on every rank."""
        name = self._name
        if torch.is_grad_enabled() and getattr(self._func, "__module__", "") == "torch.nn.init":
            with torch.no_grad():
                return self.run(args, kwargs)
        if name in _OF_MEMORY:
            raise ParallelError(_refusal(name, args, kwargs))
        if name == "__iter__":
            return iter(_OnWholes(torch.unbind, "unbind").run(args, kwargs))
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        targets = target if isinstance(target, list | tuple) else [target]
        written = [value for value in targets if self._writes and isinstance(value, PlacedTensor | WholeView)]
        if kwargs.get("out") is not None:
            written.append(kwargs["out"])
        if any(_wants_gradient([value.origin if isinstance(value, WholeView) else value]) for value in written):
            raise ParallelError(
                f"{name}: written to a parameter that requires a gradient: write under torch.no_grad(), or to its data"
            )
        mine, named = self._with_wholes(args), self._with_wholes(kwargs)
        result = _run_plain(self._func, mine, named)
        for value in written:
            self._write_back(value)
        if self._writes:
            return None if result is None else target
        if kwargs.get("out") is not None:
            return kwargs["out"]
        if name in _DRAWN and isinstance(result, Tensor):
            return _same_everywhere(result, next(iter(self._wholes.values()))[0].placement)
        return self._as_views(result)

    def _with_wholes(self, value: Any) -> Any:
        return pytree.tree_map_only((WholeView, PlacedTensor), self._whole_for, value)

    def _whole_for(self, value: WholeView | PlacedTensor) -> Tensor:
        if isinstance(value, PlacedTensor):
            return self._whole(value)
        self._whole(value.origin, value)
        return value if torch.is_grad_enabled() and value.requires_grad else plain(value)

    def _whole(self, part: PlacedTensor, view: WholeView | None = None) -> Tensor:
        key = id(part) if view is None else id(view.whole)
        if key not in self._wholes:
            if view is None and self._layer:
                _tell_gathered()
            whole = whole_of(part, self._layer) if view is None else view.whole
            if view is not None and not _wants_gradient([part]):
                plain(whole).copy_(_whole_of(part, part.placement))  # as it is by now
            self._wholes[key] = part, whole
        return self._wholes[key][1]

    def _write_back(self, value: PlacedTensor | WholeView) -> None:
        part, whole = self._wholes[id(value.whole) if isinstance(value, WholeView) else id(value)]
        placed = part.placement
        plain(part).copy_(placed.cut(_same_everywhere(whole, placed)))

    def _as_views(self, result: Any) -> Any:
        if isinstance(result, list | tuple):
            made = [self._as_views(item) for item in result]
            return result if all(map(operator.is_, made, result)) else type(result)(made)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        elif type(result) is Tensor and not result.is_sparse:
            memory = result.untyped_storage().data_ptr()
            for part, whole in self._wholes.values():
                if memory and whole.untyped_storage().data_ptr() == memory:
                    result = result.view_as(result) if result is whole else result  # such as flatten() of a vector
                    result.__class__ = WholeView
                    result.origin, result.whole = part, whole
        return result


_HANDLER = "__torch_function__"
_DISABLED = torch._C._disabled_torch_function_impl
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_GET_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _run_plain(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with plain_tensors():
        return func(*args, **kwargs)


def _plain_name(name: str) -> str:
    return name.removeprefix("_foreach_").removeprefix("_fused_").rstrip("_")


def _wrap(value: Any, placement: Placement) -> Any:
    """Make a result of the part's shape a part."""
    if type(value) is Tensor and tuple(value.shape) == placement.local_shape:
        return as_part(value, placement)
    return value


def _parts_in(values: Any) -> list[PlacedTensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, PlacedTensor)]


class _Elementwise:
    """One call of an element-wise function, on tensors or on lists of them."""

    def __init__(self, func: Function, name: str) -> None:
        self._func = func
        self._name = name
        is_dunder = name.endswith("__")
        self._writes = name in _DUNDERS and name.startswith("__i") if is_dunder else name.endswith("_")

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [*args, *kwargs.values()]
        is_of_lists = self._name.startswith(("_foreach", "_fused"))
        lists = [value for value in values if isinstance(value, list | tuple)]
        columns = itertools.zip_longest(*lists) if is_of_lists else [values]
        placed = [parts[0].placement if (parts := _parts_in(column)) else None for column in columns]

        def fit(value: Any, *, is_written: bool = False) -> Any:
            given = value if is_of_lists else [value]
            if not isinstance(given, list | tuple):
                return value
            pairs = zip(given, placed, strict=False)
            fitted = [x if place is None else self._fit(x, place, is_written=is_written) for x, place in pairs]
            return fitted if is_of_lists else fitted[0]

        try:
            mine = [fit(value, is_written=self._writes and not index) for index, value in enumerate(args)]
            named = {key: fit(value, is_written=key == "out") for key, value in kwargs.items()}
        except _NeedsWholes:
            return _OnWholes(self._func, self._name).run(args, kwargs)
        result = _run_plain(self._func, mine, named)
        # What is written to may be an ordinary tensor, such as an optimizer's state: it is a part from now on.
        made = args[0] if self._writes else result
        for value, place in zip(made if is_of_lists else [made], placed, strict=False):
            if place is not None:
                _wrap(value, place)
        return made if not is_of_lists else result

    def _fit(self, value: Any, placed: Placement, *, is_written: bool = False) -> Any:
        """Return this rank's part of an operand."""
        if isinstance(value, WholeView):
            raise _NeedsWholes
        if isinstance(value, PlacedTensor):
            if not value.placement.is_same_cut(placed):
                raise _NeedsWholes
            return value
        if not isinstance(value, Tensor) or not (value.dim() or (is_written and placed.stages)):
            return value
        shape = tuple(value.shape)
        if is_written and placed.stages and shape == placed.shape:
            raise _NeedsWholes  # on the ranks of its stage too, where a whole tensor and a part have one shape
        is_part, is_whole = shape == placed.local_shape, _broadcasts(shape, placed.shape)
        if is_part and (shape == placed.shape or not is_whole or value.is_sparse):
            return value
        if is_part:
            raise ParallelError(
                f"{self._name}: {placed.describe()}, and a tensor of {shape} could be this part or a row of the whole: "
                "give the whole"
            )
        if is_whole and not is_written:
            return placed.cut(value.expand(placed.shape))
        raise _NeedsWholes


class _NeedsWholes(Exception):
    """The parts of this rank do not go together element by element."""


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    if len(shape) > len(whole):
        return False
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(whole), strict=False))


def _set_data(part: PlacedTensor, value: Tensor) -> None:
    placed, shape = part.placement, tuple(value.shape)
    if isinstance(value, PlacedTensor):
        value = plain(value) if value.placement.is_same_cut(placed) else placed.cut(value.full_tensor()).clone()
    elif shape == placed.shape != placed.local_shape:
        value = placed.cut(value).clone()
    elif shape != placed.local_shape:
        raise ParallelError(f"data = a tensor of {shape}: {placed.describe()}: give the whole, or this rank's part")
    if not part.keeps_memory:
        _run_plain(_SET_DATA, (part, value), {})
    elif value.dtype == part.dtype:
        plain(part).copy_(value)
    else:
        raise ParallelError(
            f"data = a tensor of {value.dtype}: {placed.describe()} and stays {part.dtype}: change its network before "
            "AutoParallel's first call"
        )


def _norm(func: Function, tensor: PlacedTensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the norm of the whole, where it is that of its elements in one row and has no gradient; else None."""
    words = dict(zip(("p", "dim", "keepdim"), args, strict=False)) | kwargs
    power = words.get("ord", words.get("p"))
    is_matrix_norm = func is torch.linalg.norm and power is not None and len(tensor.placement.shape) > 1
    is_other = power != "fro" and (is_matrix_norm or isinstance(power, str) or (power is not None and not power > 0))
    has_words = words.get("keepdim") or any(words.get(word) is not None for word in ("dim", "out"))
    if is_other or has_words or _wants_gradient([tensor]):
        return None
    return norms_of_wholes([tensor], 2.0 if power in (None, "fro") else power, words.get("dtype"))[0]


def norms_of_wholes(tensors: Sequence[Tensor], power: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each tensor, of parts that of the whole. All ranks call it together; one all-reduce."""
    power = float(power)
    if not power > 0:
        raise ParallelError(_refusal(f"a norm of order {power:g}", tensors, {}))
    if torch.is_grad_enabled() and any(part.requires_grad for part in _parts_in(tensors)):
        raise ParallelError(
            f"{_refusal('a norm with a gradient', tensors, {})}; for a norm as a number use torch.no_grad() or detach()"
        )
    norms = norms_of_each(tensors, tensors, power, dtype)
    return [
        norm.to(tensor.device, dtype or tensor.dtype.to_real()) for norm, tensor in zip(norms, tensors, strict=True)
    ]


_OF_AUTOGRAD = {
    func: inspect.signature(func) for func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


def _differentiate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass with places of the graph for parts; hooks that it calls see parts as ever.

    Gradients of parts are parts, zeros among them.
    """
    words = _OF_AUTOGRAD[func].bind(*args, **kwargs).arguments
    inputs = words.pop("inputs", None)
    edges = pytree.tree_map_only(PlacedTensor, lambda part: part.gradient_edge(), inputs)
    places = {} if inputs is None else {"inputs": edges}
    makes_zeros = words.pop("materialize_grads", False)
    if makes_zeros and words.get("allow_unused") is None:
        words["allow_unused"] = True
    found = func(**pytree.tree_map_only(PlacedTensor, _without_part, dict(words)), **places)
    if func is not torch.autograd.grad:
        return None

    def gradient_of(owner: Any, gradient: Tensor | None) -> Any:
        if gradient is None and makes_zeros:
            return torch.zeros_like(owner, requires_grad=bool(words.get("create_graph")))
        return _wrap(gradient, owner.placement) if isinstance(owner, PlacedTensor) else gradient

    if isinstance(inputs, dict):
        return {key: gradient_of(owner, found[key]) for key, owner in inputs.items()}
    owners = [inputs] if isinstance(inputs, Tensor) else inputs
    return tuple(map(gradient_of, owners, found))


def _without_part(value: PlacedTensor) -> Tensor:
    with plain_tensors():
        return value.as_subclass(Tensor)


def _refusal(name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    named = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, PlacedTensor | WholeView))
    part = named.origin if isinstance(named, WholeView) else named
    found = f"{name.strip('_') or name}: {part.placement.describe()}"
    return (
        f"{found}, whose memory is not the whole's: full_tensor() gives a copy of the whole, on all ranks together; "
        "to_local() gives this rank's part; with whole_parameters(net) holds wholes for a while"
    )
