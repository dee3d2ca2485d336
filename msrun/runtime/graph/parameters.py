"""Parameters as the program stores and uses them: gathered before use, gradients reduced after, fused in groups.

At rest a rank holds the part that `stored` says. Before the first operator that reads it, a parameter is gathered over
its shard axes to the part that `used` says; afterwards its gradient is summed over the axes along which it is partial
and cut back to the stored part. Parameters of one fusion group travel in one message each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from msrun.runtime.graph.collectives import Pending, start_all_reduce, start_gather, start_reduce_scatter
from msrun.runtime.groups import axes_group
from msrun.runtime.layout import Axes, Mesh, TensorLayout

NEVER_FUSE = 0
"""`set_comm_fusion(module, 0)`: its parameters travel alone."""


@dataclass
class StoredParameter:
    """One parameter on this rank."""

    name: str
    parameter: nn.Parameter
    """The user's object; holds this rank's part."""
    shape: tuple[int, ...]
    """Global shape."""
    used: TensorLayout
    shard_axes: Axes
    """Further cut of dimension 0 by optimizer parallel; empty when left whole."""
    reason: str
    """Why it is cut, or why it is left whole."""
    fusion_id: int | None = None
    """None: fused by size."""

    @property
    def stored(self) -> TensorLayout:
        """The layout at rest."""
        return layout_at_rest(self.used, self.shard_axes)


def layout_at_rest(used: TensorLayout, shard_axes: Axes) -> TensorLayout:
    """Return the layout in which operators use a parameter with dimension 0 cut further over the shard axes."""
    if not shard_axes:
        return used
    return TensorLayout((used.split[0] + shard_axes, *used.split[1:]))


@dataclass
class ParameterGroup:
    """Parameters that are gathered, and whose gradients are reduced, in one message. One per program."""

    members: list[StoredParameter]
    placeholders: list[str]
    """Names of the members in the local graph."""
    partial_axes: Axes
    mesh: Mesh
    rank: int
    regathers: bool = False
    """level3: the gathered parts are freed after the forward pass and gathered again before the backward pass."""
    dtype: torch.dtype | None = None
    """Type in which they travel and operators read them, in mixed precision; None: their own."""
    sums_wide: bool = True
    """Their gradients of 16 bits are added up in float32."""

    @property
    def shard_axes(self) -> Axes:
        """The shard axes of all members."""
        return self.members[0].shard_axes

    def read(self, member: StoredParameter) -> Tensor:
        """Return a member's stored part in the type in which operators read it."""
        value = member.parameter.detach()
        return value if self.dtype is None else value.to(self.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type in which gradients are added up."""
        dtype = self.dtype or self.members[0].parameter.dtype
        is_short = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if self.sums_wide and is_short else dtype

    def local_bytes(self) -> int:
        """Return the bytes of the members' stored parts."""
        return sum(m.parameter.numel() * m.parameter.element_size() for m in self.members)


@dataclass
class GatheredGroup:
    """A group during one step, from the first gather to the last gradient."""

    group: ParameterGroup
    leaves: dict[str, Tensor] = field(default_factory=dict)
    """placeholder -> the part that operators read; autograd adds up its gradient"""
    _pending: Pending | None = None

    def start_gather(self) -> None:
        """Start gathering; nothing moves for parameters that are stored as they are used."""
        group = self.group
        if group.shard_axes and self._pending is None and not self._is_present():
            flat = _flatten([group.read(m) for m in group.members])
            self._pending = start_gather(flat.unsqueeze(0), axes_group(group.mesh, group.shard_axes))

    def wait(self) -> None:
        """Make the leaves hold values."""
        if self._is_present():
            return
        group = self.group
        if not group.shard_axes:
            self.leaves = {
                name: group.read(m).requires_grad_(m.parameter.requires_grad)
                for name, m in zip(group.placeholders, group.members, strict=True)
            }
            return
        self.start_gather()
        assert self._pending is not None
        gathered = self._pending.wait()
        self._pending = None
        parts = gathered.split([m.parameter.numel() for m in group.members], dim=1)
        for name, member, part in zip(group.placeholders, group.members, parts, strict=True):
            shape = member.used.local_shape(group.mesh, member.shape)
            self._fill(name, part.reshape(shape), member.parameter.requires_grad)

    def _is_present(self) -> bool:
        return bool(self.leaves) and all(leaf.untyped_storage().size() > 0 for leaf in self.leaves.values())

    def _fill(self, name: str, value: Tensor, requires_grad: bool) -> None:
        leaf = self.leaves.get(name)
        if leaf is None:
            own = value.clone() if self.group.regathers else value  # its storage must be its own to be freed
            self.leaves[name] = own.requires_grad_(requires_grad)
            return
        # Operators saved this very storage for the backward pass: fill it again without counting a new version.
        leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(leaf):  # type: ignore[attr-defined]
            leaf.copy_(value)

    def free(self) -> None:
        """level3: give the gathered memory back until the backward pass."""
        for leaf in self.leaves.values():
            leaf.untyped_storage().resize_(0)

    def start_reduce(self) -> PendingGradients:
        """Start summing the leaves' gradients into the stored parts."""
        group = self.group
        grads = []
        for name in group.placeholders:
            leaf = self.leaves[name]
            grad = leaf.grad if leaf.grad is not None else leaf.new_zeros(leaf.shape)
            grads.append(grad.to(group.sum_dtype))
            leaf.grad = None
        if group.shard_axes:
            return PendingGradients(group, _start_sharded(group, grads))
        if group.partial_axes:
            axes = axes_group(group.mesh, group.partial_axes)
            return PendingGradients(group, start_all_reduce(_flatten(grads), axes, in_place=True))
        return PendingGradients(group, None, grads)


def _start_sharded(group: ParameterGroup, grads: Sequence[Tensor]) -> Pending:
    """Reduce-scatter along the partial shard axes, then all-reduce along the partial axes that are not cut.

    Where the shard axes hold equal copies, the gradient is only cut. Shard axes stand with those outermost, so
    one slice and one reduce-scatter do.
    """
    count = group.mesh.extent(group.shard_axes)
    rows = torch.cat([grad.reshape(count, -1) for grad in grads], dim=1)
    same = tuple(axis for axis in group.shard_axes if axis not in group.partial_axes)
    summed = tuple(axis for axis in group.shard_axes if axis in group.partial_axes)
    rest = tuple(axis for axis in group.partial_axes if axis not in group.shard_axes)
    if group.shard_axes != same + summed:  # stored for another program: sum everything, then cut
        pending = start_all_reduce(rows, axes_group(group.mesh, tuple(sorted(summed + rest))))
        index = group.mesh.index(group.rank, group.shard_axes)
        return Pending(rows, None, lambda _: pending.wait()[index : index + 1])
    if same:
        length = group.mesh.extent(summed)
        rows = rows.narrow(0, group.mesh.index(group.rank, same) * length, length)
    pending = start_reduce_scatter(rows, axes_group(group.mesh, summed)) if summed else Pending(rows)
    if not rest:
        return pending
    others = axes_group(group.mesh, rest)
    return Pending(rows, None, lambda _: start_all_reduce(pending.wait(), others, in_place=True).wait())


class PendingGradients:
    """Gradients of one group on their way to the stored parts."""

    def __init__(self, group: ParameterGroup, pending: Pending | None, ready: list[Tensor] | None = None) -> None:
        self._group = group
        self._pending = pending
        self._ready = ready

    def wait(self) -> dict[str, Tensor]:
        """Return parameter name -> gradient of its stored part."""
        members = self._group.members
        if self._pending is not None:
            flat = self._pending.wait().reshape(-1)
            parts = flat.split([m.parameter.numel() for m in members])
            self._ready = [part.view(m.parameter.shape) for part, m in zip(parts, members, strict=True)]
        assert self._ready is not None
        return {m.name: grad.to(m.parameter.dtype) for m, grad in zip(members, self._ready, strict=True)}


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
