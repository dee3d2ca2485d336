"""Parameters as a network of one rank, or a rank of a mesh, has them in place."""

from __future__ import annotations

from torch import nn

from msrun.runtime.execute.placement import PlacedParameter, Placement
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout


def placed(
    name: str,
    parameter: nn.Parameter,
    shape: tuple[int, ...] | None = None,
    used: TensorLayout | None = None,
    shard_axes: Axes = (),
    *,
    fusion_id: int | None = None,
    mesh: Mesh = Mesh((1,)),  # noqa: B008 - frozen
    rank: int = 0,
    on_host: bool = False,
) -> PlacedParameter:
    """Return a parameter that holds its part; by default the whole."""
    shape = tuple(parameter.shape) if shape is None else shape
    layout = used or TensorLayout.replicated(len(shape))
    placement = Placement(name, shape, layout, shard_axes, "test", mesh, rank, mesh.size, on_host=on_host)
    return PlacedParameter(name, parameter, placement, fusion_id)
