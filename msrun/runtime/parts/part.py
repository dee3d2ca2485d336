"""Part: a tensor that is this rank's part of a cut one, and knows it.

Parameters become parts when AutoParallel cuts them; so do their gradients, the state that optimizers make of them, and
copies. What is right element by element runs on the part, norms are those of the whole, and everything else that needs
the whole is refused by name (`part_functions`): a number of one part never passes for one of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import ParallelError
from msrun.runtime.execute.placement import Placement, placements
from msrun.runtime.execute.traffic import traffic
from msrun.runtime.execute.transfers import start_gather
from msrun.runtime.groups import axes_group
from msrun.runtime.parts.part_functions import PlacedTensor, as_part
from msrun.runtime.progress import waiting_in
from msrun.runtime.tensors.plain_tensors import plain, plain_tensors

_GRADIENT: Any = Tensor.grad
_gradient_of: Callable[[Tensor], Tensor | None] = _GRADIENT.__get__
_set_gradient_of: Callable[[Tensor, Tensor | None], None] = _GRADIENT.__set__
_checks_parts = torch._C._is_torch_function_enabled


class Part(PlacedTensor):
    """This rank's part of a whole tensor; `shape` is the part's own, `numel()` counts the elements of the whole."""

    def to_local(self) -> Tensor:
        """Return this rank's part as an ordinary tensor that shares its memory."""
        return plain(self)

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, a copy on every rank. All ranks call it together."""
        placed = self.placement
        placed.check_world("full_tensor()")
        local = plain(self)
        whole = local.new_zeros(placed.shape)
        if placed.is_first_holder and placed.is_held:
            placed.cut(whole).copy_(local)
        # Every element comes from one rank, the others add zero bytes: exact for any type.
        flat = whole.view(-1).view(torch.uint8)
        traffic.add("all_reduce", flat)
        with waiting_in(lambda: f"the parts of {placed.name}"):
            dist.all_reduce(flat)
        return whole

    def gather_in_stage(self) -> Tensor:
        """Return the whole tensor on the ranks of one stage that hold parts of it; they call it together."""
        placed, local = self.placement, plain(self)
        axes = tuple(sorted(placed.stored.used))
        if not axes:
            return local
        if placed.bounds:
            return self.full_tensor()
        placed.check_world("to make it whole")
        flat = start_gather(local.reshape(-1), axes_group(placed.mesh, axes)).wait()
        order: list[int] = []
        for dim, split in enumerate(placed.stored.split):
            order += [*map(axes.index, split), len(axes) + dim]
        extents = (placed.mesh.shape[axis] for axis in axes)
        return flat.view(*extents, *local.shape).permute(order).reshape(placed.shape)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook for the gradient; it gets this rank's part of it."""
        with plain_tensors():
            return Tensor.register_hook(self, _on_part(hook, self.placement))

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
    parameter.placement = placement  # type: ignore[attr-defined]
    placements[parameter] = placement
    with plain_tensors():
        hooks = parameter._backward_hooks or {}
    for number, hook in hooks.items():
        hooks[number] = _on_part(hook, placement)


def _on_part(hook: Callable[[Tensor], Any], placement: Placement) -> Callable[[Tensor], Tensor | None]:
    """Return a hook for a gradient that gives `hook` the gradient as a part."""

    def call(gradient: Tensor) -> Tensor | None:
        answer = hook(as_part(gradient.view_as(gradient), placement))
        return answer.as_subclass(Tensor) if isinstance(answer, Tensor) else None

    return call
