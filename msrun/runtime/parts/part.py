"""Part: a tensor that is this rank's part of a cut one, and knows it.

Parameters become parts when AutoParallel cuts them; so do their gradients, the state that optimizers make of them, and
copies. What is right element by element runs on the part, everything else on the whole (`part_functions`): a number of
one part never passes for one of the whole.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import eager_transforms  # a test looks after the names that are used
from torch._functorch import vmap as vmapping
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import dlpack

from msrun.errors import ParallelError
from msrun.runtime.execute.placement import Placement, placements
from msrun.runtime.execute.transfers import start_gather, traffic
from msrun.runtime.groups import axes_group
from msrun.runtime.parts.part_functions import PlacedTensor, as_part
from msrun.runtime.progress import waiting_in
from msrun.runtime.tensors.plain_tensors import plain, plain_tensors

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
        whole = whole.clone() if whole is local else whole.contiguous()
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
            return local
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


@functools.cache
def _part_class(own: type) -> type:
    """Return what a parameter of this class becomes: PartParameter, or it and the user's own class."""
    return PartParameter if own is nn.Parameter else type(own.__name__, (PartParameter, own), {"whole_class": own})


def become_part(parameter: nn.Parameter, placement: Placement) -> None:
    """Make a parameter that holds this rank's part know it; the object and everything that refers to it stay."""
    if not isinstance(parameter, Part):
        parameter.__class__ = _part_class(type(parameter))
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
