"""Collectives of a program: started now, waited for later, with their gradients, counted."""

from __future__ import annotations

from torch import Tensor

from msrun.runtime.execute.copies import start_copy
from msrun.runtime.execute.tensor_future import TensorFuture
from msrun.runtime.execute.transfers import (
    start_all_reduce,
    start_exchange,
    start_gather,
    start_halo,
    start_reduce_scatter,
)
from msrun.runtime.groups import axes_group
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.halo import Window, add_gradients, gradient_message, join_window, window_message
from msrun.runtime.sharding.layout import Mesh


def start_forward(
    collective: Collective, value: Tensor, mesh: Mesh, rank: int, *, in_place: bool = False
) -> TensorFuture:
    """Start what happens to a value.

    Args:
        in_place: nobody else reads it; an all-reduce may write to it.
    """
    if collective.is_copy:
        return start_copy(value, to_host=collective.kind == "to_host")
    group = axes_group(mesh, collective.axes)
    match collective.kind:
        case "all_reduce":
            return start_all_reduce(value, group, in_place=in_place)
        case "enter":
            return TensorFuture(value)
        case "gather" | "gather_enter":
            return start_gather(value, group, collective.dim)
        case "slice":
            return TensorFuture(_part(collective, value, mesh, rank))
        case "reduce_scatter":
            return start_reduce_scatter(value, group, collective.dim)
        case "exchange":
            return start_exchange(value, group, collective.dim, collective.from_dim)
        case "halo":
            place = _place(collective, mesh, rank)
            message = window_message(value, *place)
            return start_halo(message, group, lambda pieces: join_window(value, pieces, *place))
    raise AssertionError(collective.kind)


def start_backward(
    collective: Collective, grad: Tensor, mesh: Mesh, rank: int, *, in_place: bool = False
) -> TensorFuture:
    """Start what happens to the gradient of the result; gives the gradient of the value. `in_place`: see there."""
    if collective.is_copy:
        return start_copy(grad, to_host=collective.kind == "to_device")
    group = axes_group(mesh, collective.axes)
    match collective.kind:
        case "all_reduce":
            return TensorFuture(grad)
        case "enter":
            return start_all_reduce(grad, group, in_place=in_place)
        case "gather":
            return TensorFuture(_part(collective, grad, mesh, rank))
        case "gather_enter":
            return start_reduce_scatter(grad, group, collective.dim)
        case "slice" | "reduce_scatter":
            return start_gather(grad, group, collective.dim)
        case "exchange":
            return start_exchange(grad, group, collective.from_dim, collective.dim)
        case "halo":
            place = _place(collective, mesh, rank)
            message = gradient_message(grad, *place)
            return start_halo(message, group, lambda pieces: add_gradients(grad, pieces, *place))
    raise AssertionError(collective.kind)


def _place(collective: Collective, mesh: Mesh, rank: int) -> tuple[int, Window, int, int]:
    """Return dimension, window, this rank's index and the number of parts."""
    assert collective.window is not None
    return collective.dim, collective.window, mesh.index(rank, collective.axes), mesh.extent(collective.axes)


def _part(collective: Collective, value: Tensor, mesh: Mesh, rank: int) -> Tensor:
    length = value.shape[collective.dim] // mesh.extent(collective.axes)
    return value.narrow(collective.dim, mesh.index(rank, collective.axes) * length, length).contiguous()
