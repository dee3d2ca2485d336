"""The tensors of a network, and what this rank holds of each: a box in the whole, whatever strategy put it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # a test looks after this name
from torch.nn.parallel import DistributedDataParallel

from msrun.errors import CheckpointError
from msrun.runtime.execute.placement import is_held, placement_of
from msrun.runtime.nn.with_loss import WithLoss
from msrun.runtime.parallel.batch.divided_batch import DividedBatch
from msrun.runtime.parallel.modes.own_gradients import is_layerwise
from msrun.runtime.parallel.network_module import NetworkModule
from msrun.runtime.parts.on_servers import VALUE, find_remote
from msrun.runtime.sharding.layout import Box, whole
from msrun.runtime.tensors.plain_tensors import local_part
from msrun.runtime.world import world

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Chunk:
    """A tensor of this rank and the box that it fills."""

    tensor: Tensor
    box: Box


@dataclass(frozen=True)
class NetworkState:
    """Everything of a network that lasts, under the user's names."""

    tensors: dict[str, Tensor]
    """Parameters and persistent buffers: the network's own objects."""
    extra: dict[str, Any]
    """What modules return from get_extra_state."""
    module: nn.Module
    """The network without the wrappers around it."""
    own: frozenset[str] = frozenset()
    """Names of parameters that this rank has cut by hand: each rank has a tensor of its own under the name."""


def find_box(tensor: Tensor) -> Box:
    """Return which part of the whole tensor this rank holds; the whole of it before AutoParallel has placed it.

    The box of a parameter that other stages of a pipeline hold is empty.
    """
    remote = find_remote(tensor)
    if remote is not None and remote.is_table and remote.is_placed:
        return find_share(remote.shape)
    placed = placement_of(tensor)
    if placed is None and isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Box(tuple(tensor.shape), tuple(offsets), tuple(sizes))
    if placed is None:
        return whole(tensor.shape)
    shape, mesh = placed.shape, placed.mesh
    if not is_held(tensor):
        return Box(shape, (0,) * len(shape), (0,) * len(shape))
    if mesh.ranks.stop > world().world_size:
        raise CheckpointError(
            f"a parameter of shape {shape} is cut over {mesh.size} ranks, but this process has left their world: "
            "call save_checkpoint and load_checkpoint before release()"
        )
    slices = placed.slices
    return Box(shape, tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))


def find_share(shape: Sequence[int]) -> Box:
    """Return the rows of a tensor on servers that this rank saves and loads; of one with few rows, all of it."""
    rank, ranks, rows = world().global_rank, world().world_size, shape[0] if shape else 0
    if rows < ranks:
        return whole(shape)
    begin, end = rank * rows // ranks, (rank + 1) * rows // ranks
    return Box(tuple(shape), (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))


def find_chunk(tensor: Tensor, box: Box) -> Chunk:
    """Return this rank's elements of a tensor, as they lie in its memory, with the box that they fill.

    Those of a table on servers are a copy; `give_back` sends what is written to it.
    """
    remote = find_remote(tensor)
    if remote is not None and remote.is_table and remote.is_placed:
        begin, count = box.offsets[0], box.sizes[0]
        return Chunk(remote.read(VALUE, begin, begin + count, remote.dtype), box)
    return Chunk(local_part(tensor), box)


def give_back(tensor: Tensor, part: Chunk) -> None:
    """Send what was read into a part of a tensor to the servers, if it is on them already.

    Every rank has the whole of what is no table: rank 0's is sent.
    """
    remote = find_remote(tensor)
    if remote is None or not remote.is_placed:
        return
    if remote.is_table:
        remote.write(VALUE, part.box.offsets[0], part.tensor)
    elif world().global_rank == 0:
        remote.write(VALUE, 0, remote.rows_of(part.tensor))


def find_network_state(network: Any) -> NetworkState:
    """Return the tensors of a network; AutoParallel, WithLoss and other wrappers leave no trace in the names."""
    if isinstance(network, NetworkModule):
        network = network.network
    if not isinstance(network, nn.Module):
        raise CheckpointError(
            f"checkpoints need the network, not {type(network).__name__}: give the module whose parameters are "
            "trained; for an AutoParallel of a step function that is the network that it closes over"
        )
    outer, before = network, ""
    while isinstance(network, WithLoss | DividedBatch | DistributedDataParallel):
        inner = "module" if isinstance(network, DistributedDataParallel) else "network"
        network, before = getattr(network, inner), f"{before}{inner}."
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    own: set[str] = set()
    for long_name, value in outer.state_dict(keep_vars=True).items():
        name = long_name.removeprefix(before)
        if name in tensors or name in extra:
            raise CheckpointError(f"two parameters are both called {name}: rename the one of the loss function")
        if is_layerwise(value):
            own.add(name)
        if isinstance(value, Tensor) and not name.endswith(_EXTRA_STATE):
            tensors[name] = value
        else:
            extra[name] = value
    return NetworkState(tensors, extra, network, frozenset(own))


def set_extra_state(state: NetworkState, extra: dict[str, Any]) -> None:
    """Give modules what their get_extra_state returned when the checkpoint was written."""
    for name, value in extra.items():
        path = name.removesuffix(_EXTRA_STATE).removesuffix(".")
        state.module.get_submodule(path).set_extra_state(value)


def find_chunks(state: NetworkState) -> dict[str, Chunk]:
    """Return this rank's part of every tensor that it holds."""
    for name, tensor in state.tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"parameter {name} has no value yet: save after the first step, or call init_parameters(net) before; "
                "a copy made when the network had no values gets none: copy it after the first step"
            )
    held = {name: tensor for name, tensor in state.tensors.items() if is_held(tensor)}
    return {name: find_chunk(tensor, find_box(tensor)) for name, tensor in held.items()}
