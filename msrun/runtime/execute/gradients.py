"""Gradients on their way from the parts that operators read to the parts that a rank stores.

A gradient is summed over the axes along which it is partial and cut back to the stored part; parameters of one group
travel in one message. Over the micro batches of a step gradients are added up: whole (level1), and sent once at the
end; or of the stored part only (level2 and level3), and sent after every micro batch.

A parameter that no gradient flows to has none, as in one process: an optimizer leaves it alone, weight decay included.
Every rank runs the same graph, so that is the same on all of them; beside others in one message it counts as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.execute.transfers import (
    TensorFuture,
    start_all_reduce,
    start_gather,
    start_gather_of,
    start_reduce_scatter,
)
from msrun.runtime.groups import axes_group
from msrun.runtime.schedule.segments import Segment
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
        leaf, shape = self.leaves.get(name), member.placement.used.local_shape(self.group.mesh, member.placement.shape)
        if member.placement.bounds:
            part = part.reshape(-1)[: math.prod(shape)]
        if leaf is None:
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


def row_gradient(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a sparse tensor of this shape, coalesced: values of equal rows are added up.

    Args:
        rows: (n,) numbers of rows, in any order.
        values: (n, ...) of each.
    """
    rows, values = summed_rows(rows, values)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, tuple(shape), is_coalesced=True, check_invariants=False)


def summed_rows(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows ascending, each once, and the sums of their values."""
    if _is_ascending(rows):
        return rows, values
    rows, place = torch.unique(rows, return_inverse=True)
    return rows, values.new_zeros(rows.shape[0], *values.shape[1:]).index_add_(0, place, values.contiguous())


def coalesced(gradient: Tensor) -> Tensor:
    """Return a sparse gradient whose rows are ascending, each once.

    That of one backward pass is so already, but autograd forgets it when it puts it into `.grad`.
    """
    rows = gradient._indices()
    if gradient.is_coalesced() or len(rows) != 1 or not _is_ascending(rows[0]):
        return gradient.coalesce()
    return torch.sparse_coo_tensor(rows, gradient._values(), gradient.shape, is_coalesced=True, check_invariants=False)


def _is_ascending(rows: Tensor) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def start_row_sum(gradient: Tensor, group: dist.ProcessGroup) -> TensorFuture:
    """Sum the sparse gradients of a group's ranks: the same rows and values on all of them, in rank order.

    The numbers of rows travel first, and are waited for: messages have the size of the largest one.
    """
    gradient = coalesced(gradient)
    rows, values = gradient.indices()[0], gradient.values()
    counts = start_gather(rows.new_tensor([rows.shape[0]]), group).wait().tolist()
    most = max(counts)
    if not most:
        return TensorFuture(gradient)
    of_rows, of_values = start_gather(_padded(rows, most), group), start_gather(_padded(values, most), group)

    def add_up(_: Tensor) -> Tensor:
        def joined(future: TensorFuture) -> Tensor:
            return torch.cat([part[:n] for part, n in zip(future.wait().split(most), counts, strict=True)])

        return row_gradient(joined(of_rows), joined(of_values), gradient.shape)

    return TensorFuture(gradient, None, add_up)


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean over all ranks, which call it together; of sparse gradients one with the rows of all."""
    assert dist.group.WORLD is not None
    start = start_row_sum if value.is_sparse else start_all_reduce
    return start(value, dist.group.WORLD).wait() / dist.get_world_size()


def added(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two gradients; it is sparse if both are."""
    return other + one if one.is_sparse else one + other  # torch adds sparse tensors to others, not the other way


def _padded(values: Tensor, length: int) -> Tensor:
    if values.shape[0] == length:
        return values
    return torch.cat([values, values.new_zeros(length - values.shape[0], *values.shape[1:])])


@dataclass
class GradientGroup:
    """Parameters whose gradients are summed in one message. One per program."""

    members: list[PlacedParameter]
    placeholders: list[str]
    """Names of the members in the local graph."""
    partial_axes: Axes
    mesh: Mesh
    rank: int
    scatters_each: bool = False
    """level2 and level3: only the gradient of the stored part is kept between micro batches."""
    sum_dtype: torch.dtype | None = None
    """The type in which gradients travel and are added up; None: their own."""
    may_be_rows: bool = False
    """Of one member: its gradient may be sparse, and then its rows travel."""

    @property
    def shard_axes(self) -> Axes:
        """The shard axes of all members."""
        return self.members[0].placement.shard_axes

    @property
    def is_sent(self) -> bool:
        """True when its sum is a message; False when every rank has the whole gradient already."""
        return bool(self.shard_axes or self.partial_axes)

    def start(self, grads: list[Tensor]) -> TensorFuture:
        """Start summing the members' gradients, which nobody else may hold; gives those of stored parts in a row.

        A sparse gradient is given as it is, with the rows of all ranks.
        """
        if self.shard_axes:
            return _start_sharded(self, grads)
        ranks = axes_group(self.mesh, self.partial_axes)
        if any(grad.is_sparse for grad in grads):
            (rows,) = grads
            return start_row_sum(rows, ranks)
        return start_all_reduce(flatten(grads), ranks, in_place=True)


def plan_departures(segments: Sequence[Segment], groups: Sequence[GradientGroup]) -> dict[int, list[int]]:
    """Return segment -> the groups whose gradients are complete once its backward pass is done."""
    first: dict[str, int] = {}
    for index, segment in enumerate(segments):
        for name in [*segment.reads, *(crossing.source for crossing in segment.crossings)]:
            first.setdefault(name, index)
    departures: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        departures.setdefault(min(first[name] for name in group.placeholders), []).append(number)
    return departures


class GradientSum:
    """The gradients of one group during one training step."""

    def __init__(self, group: GradientGroup) -> None:
        self.group = group
        self.total: Tensor | None = None
        """Of the stored parts, of what was sent off and has arrived."""
        self._future: TensorFuture | None = None
        self._reached: set[str] = set()
        """Placeholders of the parameters that have a gradient."""

    def add(self, leaf_of: Callable[[str], Tensor]) -> None:
        """Between micro batches: send off what must not be kept whole; the rest stays with the leaves."""
        if self.group.scatters_each and self.group.shard_axes:
            self.settle()
            if self._has_new(leaf_of):
                self._future = self.group.start(self._take(leaf_of))

    def finish(self, leaf_of: Callable[[str], Tensor]) -> PendingGradients:
        """Send off what the leaves hold and return the whole sum, which may still be on its way."""
        self.settle()
        if not self._reached and not self._has_new(leaf_of):
            return PendingGradients(self.group, self._reached, None)
        grads = self._take(leaf_of)
        if not self.group.is_sent:
            return PendingGradients(self.group, self._reached, None, grads)
        return PendingGradients(self.group, self._reached, self.group.start(grads), before=self.total)

    def _has_new(self, leaf_of: Callable[[str], Tensor]) -> bool:
        """Return whether a backward pass has left gradients."""
        return any(leaf_of(name).grad is not None for name in self.group.placeholders)

    def settle(self) -> None:
        """Wait for what was sent off, add it and let go of the message."""
        if self._future is not None:
            part = self._future.wait()
            self.total = part if self.total is None else self.total.add_(part)
            self._future = None

    def _take(self, leaf_of: Callable[[str], Tensor]) -> list[Tensor]:
        grads = []
        for name in self.group.placeholders:
            leaf = leaf_of(name)
            grad = leaf.grad
            if grad is None:
                grad = leaf.new_zeros(leaf.shape)
            else:
                self._reached.add(name)
                if grad.is_sparse and (not self.group.may_be_rows or self.group.shard_axes):
                    grad = grad.to_dense()
            grads.append(_as_type(grad, self.group.sum_dtype or grad.dtype))
            leaf.grad = None
        return grads


class PendingGradients:
    """Gradients of one group on their way to the stored parts."""

    def __init__(
        self,
        group: GradientGroup,
        reached: Set[str],
        future: TensorFuture | None,
        ready: list[Tensor] | None = None,
        before: Tensor | None = None,
    ) -> None:
        self._group = group
        self._reached = reached
        """Placeholders of the parameters that have a gradient; without any, nothing is on its way."""
        self._future = future
        self._ready = ready
        self._before = before
        """Sum of earlier micro batches, in one row."""

    @property
    def is_heavy(self) -> bool:
        """True while the message takes more memory than what comes of it."""
        return self._future is not None and bool(self._group.shard_axes)

    def settle(self) -> None:
        """Wait for the message and let go of it."""
        if self._future is not None:
            flat = self._future.wait()
            flat = flat if self._before is None else flat + self._before
            placed = [m.placement for m in self._group.members]
            if flat.is_sparse:
                self._ready = [flat]
            else:
                rows = flat.reshape(-1).split([place.sent_numel for place in placed])
                pairs = zip(rows, placed, strict=True)
                own = [row[: math.prod(place.local_shape)] if place.bounds else row for row, place in pairs]
                self._ready = [row.view(place.local_shape) for row, place in zip(own, placed, strict=True)]
            self._future = None

    def wait(self) -> dict[str, Tensor]:
        """Return parameter name -> gradient of its stored part, of those that have one."""
        self.settle()
        if not self._reached:
            return {}
        assert self._ready is not None
        members = zip(self._group.members, self._group.placeholders, self._ready, strict=True)
        with plain_tensors():
            return {m.name: _as_type(grad, m.parameter.dtype) for m, name, grad in members if name in self._reached}


IN_FLIGHT = 2
"""Messages that are on their way while gradients are handed out as they arrive."""


class LeavingGradients:
    """The messages of one backward pass, in the order in which they leave, which is the same on all ranks."""

    def __init__(self, hand_out: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        """
        Args:
            hand_out: gets the gradients of one message after the other, {parameter name: gradient of its stored part},
                while the backward pass goes on; None: all of them come at its end. It may communicate.
        """
        self._messages: list[PendingGradients] = []
        self._hand_out = hand_out

    def make_room(self, sums: Sequence[GradientSum]) -> None:
        """Wait for messages that hold whole parameters' worth of memory: the next one shall have their room."""
        for total in sums:
            total.settle()
        for message in self._messages:
            if message.is_heavy:
                message.settle()

    def add(self, message: PendingGradients) -> None:
        """Take a message; hands out what has been on its way for the time of two others."""
        self._messages.append(message)
        while self._hand_out is not None and len(self._messages) > IN_FLIGHT:
            self._hand_out(self._messages.pop(0).wait())

    def arrive(self) -> dict[str, Tensor]:
        """Wait for all, and return what was not handed out."""
        found: dict[str, Tensor] = {}
        for message in self._messages:
            if self._hand_out is None:
                found.update(message.wait())
            else:
                self._hand_out(message.wait())
        self._messages.clear()
        return found


class StepParameters:
    """The parameters of one training step, shared by its micro batches: gathered parts, and sums of gradients."""

    def __init__(self, groups: Sequence[ParameterGroup], gradient_groups: Sequence[GradientGroup]) -> None:
        self.gathered = [GatheredGroup(group) for group in groups]
        self.sums = [GradientSum(group) for group in gradient_groups]
        self._of = {name: gathered for gathered in self.gathered for name in gathered.group.placeholders}

    def leaf(self, name: str) -> Tensor:
        """Return the part that operators read, by its placeholder."""
        return self._of[name].leaves[name]


def _as_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else value.to(dtype)  # once per parameter and step: `to` takes longer to ask


def _join_rows(grads: Sequence[Tensor], members: Sequence[PlacedParameter], count: int) -> Tensor:
    """Return (count, elements of one part); without a copy where there is one gradient of equal parts."""
    rows = [
        filled_up(g, count * m.placement.sent_numel).reshape(count, -1) for g, m in zip(grads, members, strict=True)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def _start_sharded(group: GradientGroup, grads: list[Tensor]) -> TensorFuture:
    """Reduce-scatter along the partial shard axes, then all-reduce along the partial axes that are not cut.

    Where the shard axes hold equal copies, the gradient is only cut. Shard axes stand with those outermost, so
    one slice and one reduce-scatter do.
    """
    count = group.mesh.extent(group.shard_axes)
    rows = _join_rows(grads, group.members, count)
    grads.clear()  # copied, or held by the rows: the message needs the memory
    same = tuple(axis for axis in group.shard_axes if axis not in group.partial_axes)
    summed = tuple(axis for axis in group.shard_axes if axis in group.partial_axes)
    rest = tuple(axis for axis in group.partial_axes if axis not in group.shard_axes)
    if group.shard_axes != same + summed:  # stored for another program: sum everything, then cut
        future = start_all_reduce(rows, axes_group(group.mesh, tuple(sorted(summed + rest))))
        index = group.mesh.index(group.rank, group.shard_axes)
        return TensorFuture(rows, None, lambda _: future.wait()[index : index + 1])
    if same:
        length = group.mesh.extent(summed)
        rows = rows.narrow(0, group.mesh.index(group.rank, same) * length, length)
    future = start_reduce_scatter(rows, axes_group(group.mesh, summed)) if summed else TensorFuture(rows)
    if not rest:
        return future
    others = axes_group(group.mesh, rest)
    return TensorFuture(rows, None, lambda _: start_all_reduce(future.wait(), others, in_place=True).wait())
