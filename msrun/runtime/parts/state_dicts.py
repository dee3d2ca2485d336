"""State dicts of cut networks and their optimizers: DTensors go out; DTensors, parts and whole tensors come in.

At rest a cut parameter is a `Part` in the user's own parameter object. A state dict holds a DTensor that shares its
memory, which torch.distributed.checkpoint and get_model_state_dict know.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from msrun.errors import ParallelError
from msrun.runtime import world
from msrun.runtime.execute.placement import Placement
from msrun.runtime.groups import ranks_group
from msrun.runtime.parts.part import Part
from msrun.runtime.parts.part_functions import as_part, reads, run_on_parts
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.tensors.plain_tensors import plain, plain_tensors


class StateTensor(DTensor):
    """A part in a state dict: a DTensor whose whole comes over the runtime's own groups, not the mesh's."""

    __slots__ = ()
    placement: Placement
    is_everywhere: bool
    """False of an optimizer's state, which only the ranks of a parameter's own stages have."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch as on a part; a part that it makes is a state tensor."""
        if func in reads:
            with plain_tensors():
                return func(*args, **(kwargs or {}))
        given: dict[int, tuple[Tensor, Tensor]] = {}  # id of a part -> it, and what it was given as

        def take(value: Tensor) -> Tensor:
            part = value._part() if isinstance(value, StateTensor) else value
            given[id(part)] = part, value
            return part

        def hand_out(part: Part) -> Tensor:
            return given[id(part)][1] if id(part) in given else state_tensor(part, is_everywhere=is_everywhere)

        parts, named = pytree.tree_map_only(Tensor, take, (args, dict(kwargs or {})))
        is_everywhere = all(value.is_everywhere for _, value in given.values() if isinstance(value, StateTensor))
        others = [kind for kind in types if not issubclass(kind, StateTensor)]
        return pytree.tree_map_only(Part, hand_out, run_on_parts(func, others, parts, named))

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor, on all ranks that have it in their state dict; they call it together."""
        del grad_placements
        part = self._part()
        return part.full_tensor() if self.is_everywhere else part.gather_in_stage()

    def _part(self) -> Part:
        """Return this rank's part; DTensors give one without dimensions where other stages hold it."""
        part: Part = as_part(plain(self.to_local()).view(self.placement.local_shape), self.placement)
        return part

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> DTensor:
        """Return the whole tensor as a DTensor of this rank alone. All ranks call it together.

        Raises:
            ParallelError: another mesh, or placements that cut it.
        """
        is_own = device_mesh in (None, self.device_mesh)
        if not is_own or not all(placement.is_replicate() for placement in placements or ()):
            raise ParallelError(f"redistribute: {self.placement.describe()}: only Replicate() can be made of it")
        alone = DeviceMesh(self.device.type, [world.get_rank()], _init_backend=False)
        return DTensor.from_local(self.full_tensor(), alone, [Replicate()], run_check=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateTensor:
        if id(self) not in memo:
            copied: Any = self._part().clone()
            memo[id(self)] = state_tensor(copied, is_everywhere=self.is_everywhere)
        found: StateTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(
            f"{self.placement.describe()}, so the file or message would lack the rest: use save_checkpoint(net, path) "
            "or torch.distributed.checkpoint, or save what AutoParallel's state_dict() returns when all ranks call it"
        )


class _Mesh(DeviceMesh):
    """A mesh whose groups are made by their members when torch's functions for state dicts first ask for them."""

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        names = self.mesh_dim_names
        place = names.index(mesh_dim) if isinstance(mesh_dim, str) and names else int(mesh_dim or 0)
        along = self.mesh.movedim(place, -1).reshape(-1, self.mesh.shape[place])
        own = next(row for row in along.tolist() if world.get_rank() in row)
        return ranks_group(tuple(own))


def state_tensor(part: Part, *, is_everywhere: bool) -> StateTensor:
    """Return a part as a DTensor that shares its memory.

    Args:
        is_everywhere: False: only the ranks of the parameter's own stages have it.
    """
    placed = part.placement
    mesh, placements = _mesh_and_placements(part.device.type, placed)
    shape = torch.Size(placed.shape)
    stride = torch.empty(shape, device="meta").stride()
    found = DTensor.from_local(plain(part), mesh, placements, run_check=False, shape=shape, stride=stride)
    found.__class__ = StateTensor
    found.placement, found.is_everywhere = placed, is_everywhere  # type: ignore[attr-defined]
    return found  # type: ignore[return-value]


def part_of(value: Tensor, placed: Placement) -> Tensor:
    """Return this rank's part of a whole tensor or a DTensor, as an ordinary tensor that may share its memory.

    All ranks call it together where a DTensor is cut otherwise.
    """
    if not isinstance(value, DTensor):
        return placed.cut(value)
    mesh, placements = _mesh_and_placements(value.device.type, placed)
    if value.device_mesh == mesh and list(value.placements) == placements:
        return value.to_local().view(placed.local_shape)
    return placed.cut(value.full_tensor())


def exchange_state(root: nn.Module) -> None:
    """Let the `state_dict` of every module that holds parts give DTensors and its `load_state_dict` take wholes."""
    for module in root.modules():
        hooks = module._load_state_dict_pre_hooks.values()
        is_hooked = any(getattr(hook, "hook", None) is _take for hook in hooks)
        if not is_hooked and any(isinstance(value, Part) for value in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_take)
            module.register_state_dict_post_hook(_hand_out)


def _hand_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, Part) and not isinstance(value, nn.Parameter):  # a parameter: keep_vars
            state_dict[prefix + name] = state_tensor(value, is_everywhere=True)


def _take(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    del strict, missing, unexpected
    name: str
    parameter: Any
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not (isinstance(parameter, Part) and isinstance(value, Tensor)):
            continue
        placed = parameter.placement
        if local_metadata.get("assign_to_params_buffers"):
            errors.append(f"assign=True would replace a cut parameter, {placed.describe()}: load without it")
        elif isinstance(value, Part):
            if not value.placement.is_same_cut(placed):
                errors.append(f"{value.placement.describe()} in the state dict, cut otherwise than the network's own")
        elif tuple(value.shape) == placed.shape:
            state_dict[prefix + name] = as_part(part_of(value, placed), placed)
        else:
            errors.append(f"{placed.describe()}; the state dict has {tuple(value.shape)}, give the whole")
            state_dict[prefix + name] = parameter.detach()


def _mesh_and_placements(kind: str, placed: Placement) -> tuple[DeviceMesh, list[Any]]:
    if not placed.is_even:
        raise ParallelError(
            f"{placed.describe()}, in parts of other sizes than a DTensor can have: use save_checkpoint, or the "
            "state_dict() of AutoParallel"
        )
    holders = placed.holders if placed.stages else tuple(range(placed.world_size // placed.mesh.size))
    cut = [Shard(dim) for dim, axes in enumerate(placed.stored.split) if axes]
    return _device_mesh(kind, placed.mesh, placed.stored, holders), [Replicate(), *cut, Replicate()]


@functools.cache
def _device_mesh(kind: str, mesh: Mesh, layout: TensorLayout, holders: tuple[int, ...]) -> DeviceMesh:
    """Return the ranks that hold a tensor: (pipeline ranks, a dimension for each of the tensor's that is cut, copies).

    The runtime's own groups are not in it: a tensor is cut along several axes of its mesh at once.
    """
    cut = {dim: axes for dim, axes in enumerate(layout.split) if axes}
    order = [*itertools.chain.from_iterable(cut.values()), *layout.copies(mesh)]
    ranks = torch.arange(mesh.size).view(mesh.shape).permute(order)
    ranks = ranks.reshape(*(mesh.extent(axes) for axes in cut.values()), -1)
    ranks = torch.stack([ranks + holder * mesh.size for holder in holders])
    names = ("stage", *(f"dim{dim}" for dim in cut), "copy")
    return _Mesh(kind, ranks, mesh_dim_names=names, _init_backend=False)
