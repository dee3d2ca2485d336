"""Part: a tensor that is this rank's part of a cut one, and knows it.

Parameters become parts when AutoParallel cuts them; so do their gradients, the state that optimizers make of them, and
copies. What is right element by element runs on the part, everything else on the whole (`part_functions`): a number of
one part never passes for one of the whole.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import eager_transforms  # a test looks after the names that are used
from torch._functorch import vmap as vmapping
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils import dlpack

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import world
from msrun.runtime.execute.placement import Placement, placements
from msrun.runtime.execute.transfers import start_gather, traffic
from msrun.runtime.groups import axes_group, ranks_group
from msrun.runtime.parts.part_functions import PlacedTensor, as_part, is_of_object, run_on_parts
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.tensors.plain_tensors import StandIn, plain, plain_tensors

_GRADIENT: Any = Tensor.grad
_gradient_of: Callable[[Tensor], Tensor | None] = _GRADIENT.__get__
_set_gradient_of: Callable[[Tensor, Tensor | None], None] = _GRADIENT.__set__
_checks_parts = torch._C._is_torch_function_enabled


class Part(PlacedTensor):
    """This rank's part of a whole tensor; `shape` and `numel()` are those of the whole."""

    def to_local(self) -> Tensor:
        """Return this rank's part as an ordinary tensor that shares its memory."""
        return plain(self)

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, a copy on every rank. All ranks call it together."""
        placed, local = self.placement, plain(self)
        placed.check_world("full_tensor()")
        whole = self.gather_in_stage() if placed.is_held else local.new_empty(placed.shape)
        whole = whole.contiguous()
        if placed.stages:  # the ranks of other stages get it from the first rank that has it
            flat = whole.view(-1).view(torch.uint8)
            traffic.add("broadcast", flat)
            with waiting_in(lambda: f"the whole of {placed.name}"):
                dist.broadcast(flat, placed.holders[0] * placed.mesh.size)
        return whole

    def gather_in_stage(self) -> Tensor:
        """Return the whole tensor on the ranks of one stage that hold parts of it; they call it together."""
        placed, local = self.placement, plain(self)
        axes = tuple(sorted(placed.stored.used))
        if not axes:
            return local.clone()
        placed.check_world("to make it whole")
        sizes = [end - begin for begin, end in itertools.pairwise(placed.bounds)]
        if sizes:  # all parts of a message are equally large
            rows = local.new_zeros(max(sizes), *local.shape[1:])
            rows[: len(local)] = local
            local = rows
        with waiting_in(lambda: f"the parts of {placed.name}"):
            flat = start_gather(local.reshape(-1).view(torch.uint8), axes_group(placed.mesh, axes)).wait()
        order: list[int] = []
        for dim, split in enumerate(placed.stored.split):
            order += [*map(axes.index, split), len(axes) + dim]
        extents = (placed.mesh.shape[axis] for axis in axes)
        whole = flat.view(local.dtype).view(*extents, *local.shape).permute(order)
        if sizes:
            parts = whole.reshape(len(sizes), len(local), *placed.shape[1:])
            return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.reshape(placed.shape)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook for the gradient; it gets this rank's part of it."""
        with plain_tensors():
            return Tensor.register_hook(self, _on_part(hook, self))

    def gradient_edge(self) -> Any:
        """Return what stands for it where autograd is asked for its gradient."""
        with plain_tensors():
            return get_gradient_edge(self) if self.requires_grad else self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        if id(self) not in memo:
            with plain_tensors():
                value = self.detach().clone(memory_format=torch.preserve_format)
                copied: Part = Tensor._make_subclass(type(self), value, self.requires_grad)
            copied.placement = self.placement
            memo[id(self)] = copied
        found: Part = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(
            f"{self.placement.describe()}, so the file or message would lack the rest: use save_checkpoint(net, path), "
            "or save what AutoParallel's state_dict() returns when all ranks call it"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.placement.describe()}:\n{plain(self)!r}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


PlacedTensor.part_class = Part


class PartParameter(Part, nn.Parameter):
    """A parameter that AutoParallel has cut: the user's own object, of another class."""

    whole_class: type = nn.Parameter
    """Its class while it is whole."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's part, as a Part."""
        if not _checks_parts():  # in the steps of element-wise optimizers
            return _gradient_of(self)
        with plain_tensors():
            gradient = _gradient_of(self)
        if gradient is not None and type(gradient) is Tensor:
            as_part(gradient, self.placement)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        with plain_tensors():
            _set_gradient_of(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class ShardedParameter(PartParameter):
    """A parameter whose part torch's FSDP2 keeps in a DTensor of its own, which shares its memory and has its gradient.

    What autograd adds outside of FSDP2's calls lies with the parameter itself until somebody asks.
    """

    record: Any
    """FSDP2's, of the parameter."""
    keeps_memory = True

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's part, as a Part."""
        meant = self.record.sharded_param
        with plain_tensors():
            own = _gradient_of(self)
        if own is not None:
            self.grad = own if meant.grad is None else own + meant.grad._local_tensor
        if meant.grad is None:
            return None
        known = vars(meant.grad)
        if "part" not in known:
            local = meant.grad._local_tensor.detach()
            known["part"] = as_part(local, self.placement) if type(local) is Tensor else local  # of a dry run
        found: Tensor = known["part"]
        return found

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        meant = self.record.sharded_param
        with plain_tensors():
            _set_gradient_of(self, None)
        meant.grad = None
        if gradient is not None:
            meant.grad = self.record.to_sharded_dtensor(plain(part_of(gradient, self.placement)))
            if isinstance(gradient, Part):
                vars(meant.grad)["part"] = gradient

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        copied = super().__deepcopy__(memo)
        copied.__class__ = _part_class(self.whole_class, PartParameter)
        return copied

    def gradient_edge(self) -> Any:
        """Refuse gradients by name: graphs of calls hold the whole that FSDP2 has gathered."""
        raise StrategyError(
            "torch.autograd.grad and backward(inputs=) of parameters that FSDP2 has cut, which gathers others for "
            'each call: use backward() and .grad, or parallel_mode="semi_auto" with hsdp'
        )


@functools.cache
def _part_class(own: type, kind: type[PartParameter]) -> type:
    """Return what a parameter of this class becomes: a kind of part, or it and the user's own class."""
    return kind if own is nn.Parameter else type(own.__name__, (kind, own), {"whole_class": own})


def become_part(parameter: nn.Parameter, placement: Placement, kind: type[PartParameter] = PartParameter) -> None:
    """Make a parameter that holds this rank's part know it; the object and everything that refers to it stay."""
    if not isinstance(parameter, Part):
        parameter.__class__ = _part_class(type(parameter), kind)
    see_parts()
    parameter.placement = placement  # type: ignore[attr-defined]
    placements[parameter] = placement
    with plain_tensors():
        hooks = parameter._backward_hooks or {}
    for number, hook in hooks.items():
        hooks[number] = _on_part(hook, parameter)  # type: ignore[arg-type]


@functools.cache
def see_parts() -> None:
    """Let those functions of torch see parts that pass `__torch_function__` by; once in a process."""
    for module, name in _WRAPPERS:
        vars(module)[name] = _of_wholes(vars(module)[name])
    exported = vars(dlpack)["to_dlpack"]

    def to_dlpack(tensor: Tensor) -> Any:
        is_part = isinstance(getattr(tensor, "placement", None), Placement)
        return exported(tensor.__dlpack__() if is_part else tensor)  # which is refused by name

    vars(dlpack)["to_dlpack"] = vars(torch)["to_dlpack"] = to_dlpack


_WRAPPERS = (vmapping, "_add_batch_dim"), (eager_transforms, "_wrap_for_grad")
"""What vmap, and grad, vjp and jvp of torch.func make of a tensor that they are given."""


def _of_wholes(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same of the whole of a part."""

    def wrap_whole(value: Any, *rest: Any) -> Any:
        if isinstance(getattr(value, "placement", None), Placement):
            with temporarily_clear_interpreter_stack():  # what is made inside a transform is wrapped already
                value = value.full_tensor()
        return wrap(value, *rest)

    return wrap_whole


def _on_part(hook: Callable[[Tensor], Any], owner: Part) -> Callable[[Tensor], Tensor | None]:
    """Return a hook for the gradient of a part that gives `hook` the gradient as a part."""
    placement = owner.placement
    find_owner: Callable[[], Tensor | None] = weakref.ref(owner)

    def call(gradient: Tensor) -> Tensor | None:
        found = find_owner()
        if found is not None and not isinstance(found, Part):  # the parameter is whole for a while
            return hook(gradient)
        with torch._C._EnableTorchFunction():  # autograd may have been called past the checks of parts
            answer = hook(as_part(gradient.view_as(gradient), placement))
        return answer.as_subclass(Tensor) if isinstance(answer, Tensor) else None

    return call


class CutTensor(StandIn, DTensor):
    """A part in a state dict, as a DTensor: torch's functions do with it what they do with a `Part`."""

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
        """Run a function of torch on a part; a part that it makes is a DTensor."""
        named = dict(kwargs or {})
        if is_of_object(func):
            with plain_tensors():
                return func(*args, **named)
        given: dict[int, CutTensor] = {}  # id of a part -> what it was given as

        def take(value: CutTensor) -> Part:
            part = value.part()
            given[id(part)] = value
            return part

        def hand_out(part: Part) -> Tensor:
            if id(part) in given:
                return given[id(part)]
            is_everywhere = all(value.is_everywhere for value in given.values())
            return as_dtensor(part, part.placement, is_everywhere=is_everywhere)

        parts, named = pytree.tree_map_only(CutTensor, take, (args, named))
        others = [kind for kind in types if not issubclass(kind, CutTensor)]
        return pytree.tree_map_only(Part, hand_out, run_on_parts(func, others, parts, named))

    def part(self) -> Part:
        """Return this rank's part; DTensors give one without dimensions where other stages hold it."""
        with plain_tensors():
            found: Part = as_part(self._local_tensor.detach().view(self.placement.local_shape), self.placement)
        return found

    def constructed_by(self, construct: Callable[[Any], Any]) -> Any:
        """Return what `torch.tensor` and the like make of it: a DTensor of the same parts."""
        return as_dtensor(construct(plain(self.part())), self.placement, is_everywhere=self.is_everywhere)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor, on all ranks that have it in their state dict; they call it together."""
        del grad_placements
        return self.part().full_tensor() if self.is_everywhere else self.part().gather_in_stage()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole as an array; all ranks call it together."""
        return self.full_tensor().numpy(force=force)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> DTensor:
        """Return the whole tensor as a DTensor of this rank alone. All ranks call it together."""
        is_own = device_mesh in (None, self.device_mesh)
        if not is_own or not all(placement.is_replicate() for placement in placements or ()):
            raise ParallelError(f"redistribute: {self.placement.describe()}: only Replicate() can be made of it")
        alone = DeviceMesh(self.device.type, [world.get_rank()], _init_backend=False)
        return DTensor.from_local(self.full_tensor(), alone, [Replicate()], run_check=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> CutTensor:
        if id(self) not in memo:
            memo[id(self)] = as_dtensor(self.part().clone(), self.placement, is_everywhere=self.is_everywhere)
        found: CutTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(
            f"{self.placement.describe()}, so the file or message would lack the rest: use save_checkpoint(net, path) "
            "or torch.distributed.checkpoint, or save what AutoParallel's state_dict() returns when all ranks call it"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def as_dtensor(part: Tensor, placed: Placement, *, is_everywhere: bool) -> CutTensor:
    """Return this rank's part of a tensor as a DTensor that shares its memory.

    Args:
        is_everywhere: False: only the ranks of the parameter's own stages have it.
    """
    mesh, placements = _mesh_and_placements(part.device.type, placed)
    shape = torch.Size(placed.shape)
    stride = torch.empty(shape, device="meta").stride()
    found: Any = DTensor.from_local(plain(part), mesh, placements, run_check=False, shape=shape, stride=stride)
    found.__class__ = CutTensor
    found.placement, found.is_everywhere = placed, is_everywhere
    return found


def lying_as(owner: Tensor, local: Tensor) -> Tensor:
    """Return this rank's part of what lies as its owner does as what its owner is; it shares the part's memory."""
    if isinstance(owner, Part):
        found: Tensor = as_part(local.view_as(local), owner.placement)
        return found
    if isinstance(owner, DTensor):
        mesh, placements = owner.device_mesh, owner.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=owner.shape, stride=owner.stride())
    return local


def parameter_like(owner: Tensor, local: Tensor) -> nn.Parameter:
    """Return the same as a parameter without a gradient."""
    if not isinstance(owner, Part):
        return nn.Parameter(lying_as(owner, local), requires_grad=False)
    found = nn.Parameter(local, requires_grad=False)
    become_part(found, owner.placement)
    return found


def part_of(value: Tensor, placed: Placement) -> Tensor:
    """Return this rank's part of a whole tensor, a part or a DTensor, as an ordinary tensor that may share its memory.

    All ranks call it together where it is cut otherwise.
    """
    if isinstance(value, CutTensor):
        value = value.part()
    if isinstance(value, Part):
        return plain(value) if value.placement.is_same_cut(placed) else placed.cut(value.full_tensor())
    if not isinstance(value, DTensor):
        return value if tuple(value.shape) == placed.local_shape else placed.cut(value)
    mesh, placements = _mesh_and_placements(value.device.type, placed)
    if value.device_mesh == mesh and list(value.placements) == placements:
        return value.to_local().view(placed.local_shape)
    return placed.cut(value.full_tensor())


class _Mesh(DeviceMesh):
    """A mesh whose groups are made by their members when torch's functions for state dicts first ask for them."""

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        names = self.mesh_dim_names
        place = names.index(mesh_dim) if isinstance(mesh_dim, str) and names else int(mesh_dim or 0)
        along = self.mesh.movedim(place, -1).reshape(-1, self.mesh.shape[place])
        own = next(row for row in along.tolist() if world.get_rank() in row)
        return ranks_group(tuple(own))


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
            state_dict[prefix + name] = as_dtensor(value, value.placement, is_everywhere=True)


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
            state_dict[prefix + name] = lying_as(parameter, part_of(value, placed))
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
