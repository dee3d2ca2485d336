"""Parameters as the program stores and uses them: gathered before use, in groups that travel in one message.

At rest a rank holds the part that a parameter's placement says. Before the first operator that reads it, it is gathered
over its shard axes to the part that `placement.used` says. How gradients come back to the stored parts is in
`gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.execute.transfers import TensorFuture, start_gather_of
from msrun.runtime.groups import axes_group
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.tensors.plain_tensors import plain_tensors

NEVER_FUSE = 0
"""`set_comm_fusion(module, 0)`: its parameters travel alone."""


@dataclass
class ParameterGroup:
    """Parameters that are gathered in one message. One per program."""

    members: list[PlacedParameter]
    placeholders: list[str]
    """Names of the members in the local graph."""
    partial_axes: Axes
    mesh: Mesh
    rank: int
    regathers: bool = False
    """The gathered parts are freed after the forward pass and gathered again before the backward pass: level3, and
    modules recomputed with `parallel_optimizer_comm_recompute`."""
    dtype: torch.dtype | None = None
    """Type in which they travel and operators read them, in mixed precision; None: their own."""

    @property
    def shard_axes(self) -> Axes:
        """The shard axes of all members."""
        return self.members[0].placement.shard_axes

    def read(self, member: PlacedParameter) -> Tensor:
        """Return a member's stored part in the type in which operators read it."""
        value = member.part
        return value if self.dtype is None else value.to(self.dtype)

    def local_bytes(self) -> int:
        """Return the bytes of the members' stored parts."""
        return sum(part.numel() * part.element_size() for part in (m.part for m in self.members))

    def gathered_bytes(self) -> int:
        """Return the bytes that gathering takes on top of the stored parts; 0 when they are used as they are stored."""
        count = sum(m.sent_numel for m in self.members)
        item = (self.dtype or self.members[0].parameter.dtype).itemsize
        return count * item * self.mesh.extent(self.shard_axes) if self.shard_axes else 0


@dataclass
class GatheredGroup:
    """A group during one training step, from the first gather to the last backward pass."""

    group: ParameterGroup
    leaves: dict[str, Tensor] = field(default_factory=dict)
    """placeholder -> the part that operators read; autograd adds up its gradient"""
    _future: TensorFuture | None = None
    _read_by: list[TensorFuture] = field(default_factory=list)
    """messages on their way that are read from the leaves' memory"""

    def start_gather(self) -> None:
        """Start gathering; nothing moves for parameters that are stored as they are used."""
        group = self.group
        if group.shard_axes and self._future is None and not self._is_present():
            parts = [
                filled_up(group.read(m), m.placement.sent_numel) if m.placement.bounds else group.read(m)
                for m in group.members
            ]
            self._future = start_gather_of(parts, axes_group(group.mesh, group.shard_axes))

    def wait(self) -> None:
        """Make the leaves hold values."""
        if self._is_present():
            return
        group = self.group
        if not group.shard_axes:
            with plain_tensors():
                self.leaves = {
                    name: group.read(m).requires_grad_(m.parameter.requires_grad)
                    for name, m in zip(group.placeholders, group.members, strict=True)
                }
            return
        self.start_gather()
        assert self._future is not None
        gathered = self._future.wait()
        self._future = None
        with plain_tensors():
            parts = gathered.split([m.placement.sent_numel for m in group.members], dim=1)
            for name, member, part in zip(group.placeholders, group.members, parts, strict=True):
                self._fill(name, part, member)

    def _is_present(self) -> bool:
        if not self.group.regathers:
            return bool(self.leaves)
        return bool(self.leaves) and all(leaf.untyped_storage().size() > 0 for leaf in self.leaves.values())

    def _fill(self, name: str, part: Tensor, member: PlacedParameter) -> None:
        """Put a gathered part, (ranks, elements of one), into the leaf: one copy, or none where the part will do."""
        leaf = self.leaves.get(name)
        if member.placement.bounds:
            part = part.reshape(-1)[: math.prod(member.placement.shape)]
        if leaf is None:
            shape = member.placement.used.local_shape(self.group.mesh, member.placement.shape)
            is_own = part.untyped_storage().nbytes() == part.numel() * part.element_size()
            if is_own or (part.is_contiguous() and not self.group.regathers):
                whole = part.view(shape)
            else:  # to be freed, its storage must be its own
                whole = part.new_empty(shape)
                whole.view(part.shape).copy_(part)
            self.leaves[name] = whole.requires_grad_(member.parameter.requires_grad)
            return
        # Operators saved this very storage for the backward pass: fill it again without counting a new version.
        leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(leaf):  # type: ignore[attr-defined]
            leaf.view(part.shape).copy_(part)

    def held_bytes(self) -> int:
        """Return the bytes of gathered parts that are held or on their way now."""
        if not self.group.shard_axes:
            return 0
        storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in self.leaves.values()}
        return sum(storages.values()) + (self.group.gathered_bytes() if self._future is not None else 0)

    def lend(self, message: TensorFuture) -> None:
        """Keep the memory until a message that is read from it has arrived."""
        self._read_by.append(message)

    def free(self) -> None:
        """Give the gathered memory back until the parameters are read again; gradients stay."""
        for message in self._read_by:
            message.wait()
        self._read_by.clear()
        for leaf in self.leaves.values():
            leaf.untyped_storage().resize_(0)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors in one row."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat


def filled_up(value: Tensor, count: int) -> Tensor:
    """Return a tensor, or its elements in one row of `count` that zeros fill up."""
    missing = count - value.numel()
    return value if not missing else torch.cat([value.reshape(-1), value.new_zeros(missing)])
