"""Groups of ranks: by name, as MindSpore has them, and by mesh axes, as the partitioned graph needs them.

Named groups are made by all ranks together, as in MindSpore; the others by their members, when they first need them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from msrun.errors import WorldError, near_miss
from msrun.runtime.progress import waiting_in
from msrun.runtime.world import at_release, world

if TYPE_CHECKING:
    from msrun.runtime.sharding.layout import Mesh

_NAMING = "_hash_ranks_to_str"


def new_member_group(ranks: Sequence[int], **settings: Any) -> dist.ProcessGroup:
    """Make a group; only its members call, in one order for all groups, and once for the same ranks.

    Args:
        settings: further ones of `torch.distributed.new_group`.
    """
    with _named_after_ranks():
        made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **settings)
    return made


@contextmanager
def _named_after_ranks() -> Iterator[None]:
    original = getattr(distributed_c10d, _NAMING)
    setattr(distributed_c10d, _NAMING, lambda ranks: "members-" + "-".join(map(str, ranks)))
    try:
        yield
    finally:
        setattr(distributed_c10d, _NAMING, original)


_named: dict[str, tuple[tuple[int, ...], dist.ProcessGroup | None]] = {}
_by_axes: dict[tuple[Mesh, tuple[int, ...]], dist.ProcessGroup] = {}
"""(mesh, axes) -> this rank's own group"""
_by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""This rank's groups, which their members have made"""


def create_group(group: str, rank_ids: Sequence[int]) -> None:
    """Make a named group. Called by every rank of the world, members or not.

    Raises:
        WorldError: the name is taken, fewer than two ranks, a repeated rank, or one outside the world.
    """
    ranks = tuple(rank_ids)
    if group in _named:
        raise WorldError(f"group {group!r} exists already with ranks {list(_named[group][0])}: destroy_group it first")
    if len(ranks) < 2 or len(set(ranks)) != len(ranks):
        raise WorldError(f"group {group!r} of ranks {list(ranks)}: two or more different ranks are needed")
    size = world().world_size
    outside = [rank for rank in ranks if not 0 <= rank < size]
    if outside:
        raise WorldError(f"group {group!r}: rank {outside[0]} is outside the world; ranks are 0 to {size - 1}")
    _named[group] = (ranks, _new_group(ranks))


def _new_group(ranks: tuple[int, ...], *, by_members: bool = False) -> Any:
    """Make torch's group with its ranks in this very order; torch sorts them unless told not to.

    Args:
        by_members: only the members call; otherwise all ranks of the world do.

    Raises:
        WorldError: an order that is not ascending, with a torch that cannot keep it.
    """
    if list(ranks) == sorted(ranks):
        return new_member_group(ranks) if by_members else dist.new_group(list(ranks))
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise WorldError(
            f"a group of ranks in the order {list(ranks)} is needed, and torch {torch.__version__} can only sort them: "
            "install torch 2.13, or give the ranks in ascending order"
        )
    return (new_member_group if by_members else dist.new_group)(list(ranks), sort_ranks=False)


def destroy_group(group: str) -> None:
    """Forget a named group.

    Raises:
        WorldError: no such group.
    """
    ranks, process_group = _find(group)
    if process_group is not None and world().global_rank in ranks:
        dist.destroy_process_group(process_group)
    del _named[group]


def get_process_group_ranks(group: str) -> list[int]:
    """Return the world ranks of a named group, in group order."""
    return list(_find(group)[0])


def get_world_rank_from_group_rank(group: str, group_rank: int) -> int:
    """Return the world rank of a member."""
    ranks = _find(group)[0]
    if not 0 <= group_rank < len(ranks):
        raise WorldError(f"rank {group_rank} of group {group!r}: the group has ranks 0 to {len(ranks) - 1}")
    return ranks[group_rank]


def get_group_rank_from_world_rank(world_rank: int, group: str) -> int:
    """Return a member's rank inside a named group."""
    ranks = _find(group)[0]
    if world_rank not in ranks:
        raise WorldError(f"world rank {world_rank} is not in group {group!r}; its ranks are {list(ranks)}")
    return ranks.index(world_rank)


def get_rank(group: str | None = None) -> int:
    """Return this process's rank in the world, or in a named group."""
    rank = world().global_rank
    return rank if group is None else get_group_rank_from_world_rank(rank, group)


def get_group_size(group: str | None = None) -> int:
    """Return the number of ranks in the world, or in a named group."""
    return world().world_size if group is None else len(get_process_group_ranks(group))


def process_group(group: str) -> dist.ProcessGroup:
    """Return torch's process group behind a name, for torch's own collectives."""
    found = _find(group)[1]
    if found is None:
        raise WorldError(f"group {group!r} has no process group: this process is alone")
    return found


def carries_by_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether gloo carries a group's tensors of a device; of several backends torch names only the first."""
    return bool(group._get_backend(device).name() == "gloo")


def axes_group(mesh: Mesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of ranks that differ from this one only along `axes`, most significant axis first.

    Its members alone make it, at their first call; later calls only look it up.

    Raises:
        WorldError: this rank is not in the mesh.
    """
    if (mesh, axes) not in _by_axes:
        rank = world().global_rank
        if rank not in mesh.ranks:
            raise WorldError(f"rank {rank} is not in the mesh {mesh.shape} from {mesh.first_rank}")
        _by_axes[mesh, axes] = ranks_group(mesh.members(rank, axes))
    return _by_axes[mesh, axes]


def ranks_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of these ranks, in this order, made by its members alone at their first call.

    Members of several such groups make them in the same order.
    """
    if ranks not in _by_ranks:
        is_world = ranks == tuple(range(world().world_size))
        with waiting_in(lambda: f"making a group of {len(ranks)} ranks"):
            made = dist.group.WORLD if is_world else _new_group(ranks, by_members=True)
        assert made is not None
        _by_ranks[ranks] = made
    return _by_ranks[ranks]


def forget_groups() -> None:
    """Drop every group; torch destroys them together with the world."""
    _named.clear()
    _by_ranks.clear()
    _by_axes.clear()


def _find(group: str) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    if group not in _named:
        raise WorldError(f"no group {group!r}{near_miss(group, _named)}: make it with create_group on every rank")
    return _named[group]


at_release(forget_groups)
