"""What torch's DTensor gets wrong without a word, put right: parameters under FSDP2 are DTensors.

- A number read from one (`item()`, `float()`, `if`) is that of this rank's part: here it is that of the whole.
- `parameter.data = value` changes nothing that is computed with: here the value comes into this rank's part.
- A view that a part alone cannot show (`parameter[:4]`, `parameter.chunk(2)[1]`) is of a gathered copy, so that writes
  into it are lost: here it shows the present values, and what is written into it comes into every rank's part.
- A sum of norms adds up those of the parts: here each is made whole before.
- What is cut cannot be joined with what is left whole: here wholes are joined.
- Random numbers on the CPU are the same ones in every rank's part: here every rank draws the whole, as one process
  does, and keeps its part. On devices torch sees to that.
- What torch has no rule for (`_OF_WHOLE`) is done with the whole, and cut again.
- An ordinary tensor beside one is the whole, the same on every rank, as in one process; torch raises an error.

Found with torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from msrun.errors import ParallelError
from msrun.runtime import world

_aten = torch.ops.aten
_DRAWN_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_DRAWN_LIKE = (
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)
_VIEWS = (
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.diagonal.default,
    _aten.unfold.default,
)
"""Operators whose result a part may not be able to show; the others keep every row and column where it is."""
_OF_WHOLE = (
    _aten.index_put_.default,
    _aten.index_copy_.default,
    _aten.index_add_.default,
    _aten.index_fill_.int_Scalar,
    _aten.masked_scatter_.default,
    _aten.renorm_.default,
    _aten.fill_.Tensor,
)
_JOINS = (_aten.stack.default, _aten.cat.default)
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim)


@functools.cache
def mend_dtensors() -> None:
    """Put it right from now on; once in a process."""
    # torch's own loss_parallel() adds to them, too
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten._local_scalar_dense.default] = _read_number
    handlers |= dict.fromkeys(_VIEWS, _view) | dict.fromkeys(_SUMS, _sum)
    handlers |= dict.fromkeys(_OF_WHOLE, _write_whole) | dict.fromkeys(_JOINS, _join)
    handlers[_aten._foreach_mul_.Tensor] = _scale_each
    if world.device().type == "cpu":
        handlers |= dict.fromkeys((*_DRAWN_IN_PLACE, *_DRAWN_LIKE), _draw)
    DTensor._op_dispatcher._allow_implicit_replication = True
    as_torch_ends = DTensor._op_dispatcher._dispatch_fast_path_python_tail

    def end(operator: Any, args: Any, kwargs: Any, mesh: Any, sharding: Any, *rest: Any) -> Any:
        """Return the plain tensor that was written, such as an average made before, where torch expects a DTensor."""
        spec, is_written = sharding.output_spec, rest[2]
        if is_written and isinstance(spec, DTensorSpec) and spec.is_replicated() and not isinstance(args[0], DTensor):
            return args[0]
        return as_torch_ends(operator, args, kwargs, mesh, sharding, *rest)

    DTensor._op_dispatcher._dispatch_fast_path_python_tail = end  # type: ignore[method-assign,assignment]
    DTensor.numpy = _to_numpy  # type: ignore[method-assign,assignment]
    DTensor.data = property(Tensor.data.__get__, _set_data)  # type: ignore[assignment,attr-defined]


def _read_number(operator: Any, args: tuple[Any, ...], _: Any) -> Any:
    """Return the value of a tensor of one element; all ranks call it together."""
    return operator(args[0].full_tensor())


def _as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = own


def _sum(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if isinstance(first, DTensor) and any("Norm" in type(placement).__name__ for placement in first.placements):
        args = (first.redistribute(placements=[Replicate()] * first.device_mesh.ndim), *args[1:])
    return _as_torch_does(operator, args, kwargs)


def _join(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Join, as `clip_grad_norm_` does with the norms of parameters that are cut and of those left whole."""
    joined = args[0]
    if len({value.device_mesh for value in joined if isinstance(value, DTensor)}) == 1:
        return _as_torch_does(operator, args, kwargs)
    return operator([v.full_tensor() if isinstance(v, DTensor) else v for v in joined], *args[1:], **kwargs)


def _scale_each(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply all by one number, mesh by mesh: torch takes the number for one of the first one's mesh."""
    by_mesh: dict[Any, list[Any]] = {}
    for value in args[0]:
        by_mesh.setdefault(getattr(value, "device_mesh", None), []).append(value)
    for values in by_mesh.values():
        _as_torch_does(operator, (values, *args[1:]), kwargs)


def _view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seen = _as_torch_does(operator, args, kwargs)
    part = args[0]
    first = seen[0] if isinstance(seen, list | tuple) else seen
    if _memory(first.to_local()) == _memory(part.to_local()):
        return seen
    whole = part.full_tensor()
    return _of_whole(operator(whole, *args[1:], **kwargs), part, whole)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


class ViewOfWhole(DTensor):
    """A view of a cut tensor that needs the whole: shows its present values, and hands on what is written into it.

    All ranks use it together. Every use gathers the whole again.
    """

    _part: DTensor
    _whole: Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        seen = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, ViewOfWhole)]
        for value in seen:
            value._whole.copy_(value._part.full_tensor())
        if func._schema.is_mutable:
            func(*pytree.tree_map_only(DTensor, _whole_of, args), **pytree.tree_map_only(DTensor, _whole_of, kwargs))
            # a view that was read has another copy of the whole, without what was written
            for value in pytree.tree_leaves(_written(func, args, kwargs)):
                if isinstance(value, ViewOfWhole):
                    value._part.copy_(_cut_like(value._whole, value._part))
            return args[0]
        own, result = seen[0], super().__torch_dispatch__(func, types, args, kwargs)
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return _of_whole(pytree.tree_map_only(DTensor, DTensor.to_local, result), own._part, own._whole)
        return result


def _written(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator writes to."""
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    marks = {a.name: a.alias_info for a in operator._schema.arguments}
    return [value for name, value in given.items() if marks[name] is not None and marks[name].is_write]


def _write_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to the whole, and into every rank's part what it has of it; all ranks call it together."""
    part = args[0]
    args, kwargs = pytree.tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    whole = operator(args[0].clone(), *args[1:], **kwargs)
    if isinstance(part, DTensor):
        part.to_local().copy_(_cut_like(whole, part).to_local())
    else:
        part.copy_(whole)
    return part


def _to_numpy(tensor: DTensor, *, force: bool = False) -> Any:
    """Return the whole as an array; all ranks call it together."""
    return tensor.full_tensor().numpy(force=force)


def _whole_of(value: DTensor) -> Tensor:
    return value.to_local() if isinstance(value, ViewOfWhole) else value.full_tensor()


def _of_whole(seen: Any, part: DTensor, whole: Tensor) -> Any:
    """Return views of the whole of a part as DTensors that know it."""

    def wrap(value: Tensor) -> ViewOfWhole:
        mesh = part.device_mesh
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        view = ViewOfWhole(value, spec, requires_grad=False)
        view._part, view._whole = part, whole
        return view

    return pytree.tree_map_only(Tensor, wrap, seen)


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part = args[0]
    whole = operator(torch.empty(part.shape, dtype=part.dtype), *args[1:], **kwargs)
    own = _cut_like(whole, part)
    return part.copy_(own) if operator in _DRAWN_IN_PLACE else own


def _cut_like(whole: Tensor, part: DTensor) -> DTensor:
    return distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)


def _set_data(parameter: DTensor, value: Tensor) -> None:
    if (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise ParallelError(
            f"data = a tensor of {tuple(value.shape)}, {value.dtype}: the parameter is cut over the ranks and stays of "
            f"{tuple(parameter.shape)}, {parameter.dtype}: change its network before AutoParallel's first call"
        )
    with torch.no_grad():
        own = value.detach() if isinstance(value, DTensor) else _cut_like(value.detach(), parameter)
        parameter.detach().copy_(own)
