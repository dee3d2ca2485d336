"""Parameters as a network of one rank, or a rank of a mesh, has them in place."""

from msrun.runtime.execute.placement import PlacedParameter, Placement
from msrun.runtime.sharding.layout import Mesh, TensorLayout


def placed(
    name,
    parameter,
    shape=None,
    used=None,
    shard_axes=(),
    *,
    fusion_id=None,
    mesh=Mesh((1,)),  # noqa: B008 - frozen
    rank=0,
    on_host=False,
):
    """Return a parameter that holds its part; by default the whole."""
    shape = tuple(parameter.shape) if shape is None else shape
    layout = used or TensorLayout.replicated(len(shape))
    placement = Placement(name, shape, layout, shard_axes, "test", mesh, rank, mesh.size, on_host=on_host)
    return PlacedParameter(name, parameter, placement, fusion_id)
