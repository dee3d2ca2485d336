"""What one operator or one collective costs on one device: by shapes and links, or as it was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from msrun.runtime.cost.devices import DeviceProfile, Link, Point
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.attention import attend_part, ring_attention

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
        keys = shapes[0 if target is ring_attention else 1]
        return 4.0 * elements * keys[-2]  # two products of (length, head size) with the keys
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


def has_device_kernels(target: Any) -> bool:
    """Return whether what an operator keeps depends on the device: attention, sums of bags, batch norm."""
    return target in _ATTENTION or target in _BAGS or target == aten.batch_norm.default


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
_ATTENTION = {aten.scaled_dot_product_attention.default, attend_part, ring_attention}
_BAGS = {aten.embedding_bag.default, aten.embedding_bag.padding_idx, aten._embedding_bag.default}
_LOOKUPS = {aten.embedding.default, *_BAGS}


def link_of(mesh: Mesh, axes: Axes, device: DeviceProfile) -> Link:
    """Return the slowest class of links that a group along these axes of a mesh crosses.

    Ranks fill the hosts one after the other; the group is that of the mesh's first rank.
    """
    first = mesh.first_rank
    last = first + sum((mesh.shape[axis] - 1) * mesh.stride(axis) for axis in axes)
    is_inside = first // device.devices_per_host == last // device.devices_per_host
    return device.in_host if is_inside else device.between_hosts


def collective_seconds(operation: str, nbytes: float, ranks: int, link: Link) -> float:
    """Return how long one collective takes; nothing by one rank.

    Args:
        operation: a word of the run-time counter: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, halo,
            ring, send, receive.
        nbytes: of the input on this rank; of a halo, what the rank sends.
    """
    if ranks <= 1 and operation not in ("send", "receive"):
        return 0.0
    tree = math.ceil(math.log2(ranks)) if ranks > 1 else 1
    passed = nbytes * (ranks - 1) / max(ranks, 1)
    steps = ranks - 1
    match operation:
        case "all_gather":
            seconds = _seconds(steps, nbytes * steps, link)
        case "reduce_scatter" | "all_to_all":
            seconds = _seconds(steps, passed, link)
        case "all_reduce":
            seconds = min(_seconds(2 * steps, 2 * passed, link), _seconds(tree, tree * nbytes, link))
        case "broadcast":
            seconds = min(_seconds(tree, tree * nbytes, link), _seconds(tree + steps, 2 * passed, link))
        case "halo":  # with the neighbours on both sides
            seconds = _seconds(min(steps, 2), nbytes, link)
        case "ring":  # from one neighbour to the other, a rank's part at a time
            seconds = _seconds(steps, nbytes, link)
        case "send" | "receive":
            seconds = _seconds(1, nbytes, link)
        case _:
            raise ValueError(f"unknown collective {operation!r}")
    return link.start_s + seconds


def copy_seconds(nbytes: float, link: Link) -> float:
    """Return how long a copy between device and host takes."""
    return _seconds(1, nbytes, link)


def _seconds(steps: int, nbytes: float, link: Link) -> float:
    return steps * link.alpha_s + nbytes / link.bytes_per_s


_COPIES = ("to_host", "to_device")


def operator_seconds(name: str, work: Work, device: DeviceProfile) -> float:
    """Return how long an operator takes, with what its caller needs to start it.

    Args:
        name: of the operator with its overload and the type in which it computes: "aten.mm.default float32".
    """

    def model(operations: float, nbytes: float) -> float:
        return Work(operations, nbytes, 0.0, work.dtype, work.launches).seconds(device)

    place = work.operations, work.read_bytes + work.written_bytes
    return _from_nearest(device.operators.get(name, ()), place, model) + device.overhead_s


def measured_collective_seconds(operation: str, nbytes: float, ranks: int, link: Link, device: DeviceProfile) -> float:
    """Return how long a collective takes over a link; points count for links inside a host."""

    def model(count: float, size: float) -> float:
        return collective_seconds(operation, size, round(count), link)

    points = device.collectives.get(operation, ()) if link == device.in_host else ()
    return _from_nearest(points, (ranks, nbytes), model)


def message_seconds(
    operation: str, nbytes: float, mesh: Mesh, axes: Axes, device: DeviceProfile, *, waits: bool = True
) -> float:
    """Return what a step waits for a collective along axes of a mesh, or for a copy between device and host.

    Args:
        operation: a word of the run-time counter; `to_host` and `to_device` are the copies.
        waits: ranks come to it from computing; False right after another one, or where nothing waits for it alone.
    """
    if operation in _COPIES:
        return copy_seconds(nbytes, device.to_host)
    ranks = mesh.extent(axes)
    wait_s = device.wait_s if waits and ranks > 1 else 0.0
    return wait_s + measured_collective_seconds(operation, nbytes, ranks, link_of(mesh, axes, device), device)


def _from_nearest(points: Sequence[Point], place: tuple[float, float], model: Callable[[float, float], float]) -> float:
    seconds = model(*place)
    if not points or not seconds:
        return seconds
    first, second, measured_s = min(points, key=lambda point: _distance(point, place))
    return measured_s * seconds / model(first, second)


def _distance(point: Point, place: tuple[float, float]) -> float:
    return sum(abs(math.log((known + 1) / (asked + 1))) for known, asked in zip(point, place, strict=False))
