"""What torch's DTensor gets wrong without a word, put right: parameters under FSDP2 are DTensors.

- A number read from one (`item()`, `float()`, `if`) is that of this rank's part: here it is that of the whole.
- `parameter.data = value` changes nothing that is computed with: here the value comes into this rank's part.
- Random numbers on the CPU are the same ones in every rank's part: here every rank draws the whole, as one process
  does, and keeps its part. On devices torch sees to that.

Found with torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

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


@functools.cache
def mend_dtensors() -> None:
    """Put it right from now on; once in a process."""
    # torch's own loss_parallel() adds to them, too
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten._local_scalar_dense.default] = _read_number
    if world.device().type == "cpu":
        handlers |= dict.fromkeys((*_DRAWN_IN_PLACE, *_DRAWN_LIKE), _draw)
    DTensor.data = property(Tensor.data.__get__, _set_data)  # type: ignore[assignment,attr-defined]


def _read_number(operator: Any, args: tuple[Any, ...], _: Any) -> Any:
    """Return the value of a tensor of one element; all ranks call it together."""
    return operator(args[0].full_tensor())


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
