"""Times that have been measured: those of the most alike call, scaled by the model.

A profile made by calibration has points: operators with their operations and bytes, collectives with their ranks and
bytes, each with its seconds. A call like that of a point takes what the point took. Another one takes what the model
(roofline, alpha-beta) says, times how far the model was off at the point that is nearest in the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msrun.runtime.cost.collectives import collective_seconds, copy_seconds, link_of
from msrun.runtime.cost.devices import DeviceProfile, Link, Point
from msrun.runtime.cost.operators import Work
from msrun.runtime.sharding.layout import Axes, Mesh

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
