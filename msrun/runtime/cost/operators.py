"""What one operator costs on one device: operations and bytes of memory, from the shapes of its tensors.

Seconds follow the roofline (Williams, Waterman, Patterson, CACM 2009): the longer of computing and of moving bytes, and
at the least the time of a launch. It is the one table of operations: stages of a pipeline are divided by it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.sharding.operators.attention import attend_part

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one tensor on one rank."""

    shape: Shape
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of such a tensor."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Work:
    """What an operator does on one rank."""

    operations: float
    """Floating-point operations; a multiplication and an addition are two."""
    read_bytes: float
    written_bytes: float
    dtype: torch.dtype = torch.float32
    """In which it computes."""
    launches: int = 1
    """Kernels; 0 of a view."""

    def seconds(self, device: DeviceProfile) -> float:
        """Return how long it takes."""
        computing = self.operations / device.flops(self.dtype)
        moving = (self.read_bytes + self.written_bytes) / device.memory_bandwidth
        return max(computing, moving, self.launches * device.launch_s)


NOTHING = Work(0.0, 0.0, 0.0, launches=0)


def copy_work(nbytes: int) -> Work:
    """Return what a copy of so many bytes does."""
    return Work(0.0, nbytes, nbytes)


def operations(target: Any, shapes: Sequence[Shape], elements: int) -> float:
    """Return the operations of an operator on the way forward; a view does none.

    Args:
        shapes: those of its tensor inputs.
        elements: those of its results, all together.
    """
    per_element = _PRODUCTS.get(target)
    if per_element is not None:
        return 2.0 * elements * per_element(shapes)
    if target in _ATTENTION:
        return 4.0 * elements * shapes[1][-2]  # two products of (length, head size) with the keys
    return 0.0 if is_view(target) else float(elements)


def forward_work(target: Any, inputs: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> Work:
    """Return what an operator does on the way forward."""
    if is_view(target) or not results:
        return NOTHING
    count = operations(target, [each.shape for each in inputs], sum(each.elements for each in results))
    read = sum(_read(target, index, each, results[0]) for index, each in enumerate(inputs))
    return Work(count, read, sum(each.nbytes for each in results), results[0].dtype)


def backward_work(
    target: Any, inputs: Sequence[TensorSpec], results: Sequence[TensorSpec], differentiable: Sequence[int]
) -> Work:
    """Return what an operator does on the way back.

    A product makes the gradient of each input by one product of its size; attention computes its scores again, so that
    it takes two and a half times its way forward (Dao, FlashAttention-2, 2023, section 3); others are taken to do for
    each gradient what they did forward.

    Args:
        differentiable: indexes of the inputs that have a gradient; nothing is done without any.
    """
    forward = forward_work(target, inputs, results)
    if not differentiable or not forward.launches:
        return NOTHING
    if target in _ATTENTION:
        count, launches = 2.5 * forward.operations, 1
    elif target in _PRODUCTS:
        launches = sum(len(inputs[index].shape) > 1 for index in differentiable)  # not of a bias
        count = forward.operations * launches
    else:
        count, launches = forward.operations * len(differentiable), 1
    written = sum(_read(target, index, inputs[index], results[0]) for index in differentiable)
    return Work(count, forward.read_bytes + forward.written_bytes, written, forward.dtype, max(launches, 1))


def is_attention(target: Any) -> bool:
    """Return whether an operator is attention."""
    return target in _ATTENTION


def is_view(target: Any) -> bool:
    """Return whether an operator only looks at its input in another way."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(returned.alias_info is not None for returned in schema.returns)


def _read(target: Any, index: int, given: TensorSpec, result: TensorSpec) -> int:
    """Return the bytes of one input that are read: of a table the rows that are looked up."""
    return min(given.nbytes, result.nbytes) if target in _LOOKUPS and index == 0 else given.nbytes


def _of_convolution(shapes: Sequence[Shape]) -> int:
    """Multiplications per element of the result: input channels of a group times the kernel."""
    return math.prod(shapes[1][1:])


_PRODUCTS: Mapping[Any, Callable[[Sequence[Shape]], int]] = {
    aten.linear.default: lambda shapes: shapes[0][-1],
    aten.matmul.default: lambda shapes: shapes[0][-1],
    aten.mm.default: lambda shapes: shapes[0][-1],
    aten.bmm.default: lambda shapes: shapes[0][-1],
    aten.mv.default: lambda shapes: shapes[0][-1],
    aten.dot.default: lambda shapes: shapes[0][-1],
    aten.addmm.default: lambda shapes: shapes[1][-1],
    aten.baddbmm.default: lambda shapes: shapes[1][-1],
    aten.conv1d.default: _of_convolution,
    aten.conv2d.default: _of_convolution,
    aten.conv3d.default: _of_convolution,
    aten.conv1d.padding: _of_convolution,
    aten.conv2d.padding: _of_convolution,
    aten.conv3d.padding: _of_convolution,
    aten.convolution.default: _of_convolution,
}
_ATTENTION = {aten.scaled_dot_product_attention.default, attend_part}
_LOOKUPS = {aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx}
