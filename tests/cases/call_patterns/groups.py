"""Groups with a name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from call_patterns.pattern import pattern, refused
from msrun.errors import WorldError
from msrun.runtime import (
    create_group,
    destroy_group,
    get_group_rank_from_world_rank,
    get_group_size,
    get_process_group_ranks,
    get_rank,
    get_world_rank_from_group_rank,
    process_group,
)


@pattern
def named_group_keeps_the_order_of_its_ranks() -> None:
    create_group("odd order", [3, 1, 2])
    assert get_process_group_ranks("odd order") == [3, 1, 2]
    assert get_world_rank_from_group_rank("odd order", 0) == 3
    assert get_group_rank_from_world_rank(1, "odd order") == 1
    assert get_group_size("odd order") == 3
    if get_rank() == 0:
        assert "not in group" in refused(WorldError, get_rank, "odd order")
    else:
        assert dist.get_rank(process_group("odd order")) == get_rank("odd order")
        parts = [torch.empty(1) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([float(get_rank())]), group=process_group("odd order"))
        assert [int(part) for part in parts] == [3, 1, 2]
    assert "exists already" in refused(WorldError, create_group, "odd order", [0, 1])
    destroy_group("odd order")
    assert "no group" in refused(WorldError, get_process_group_ranks, "odd order")


@pattern
def illegal_groups_are_refused_with_the_legal_range() -> None:
    assert "two or more different ranks" in refused(WorldError, create_group, "one", [1])
    assert "two or more different ranks" in refused(WorldError, create_group, "twice", [1, 1])
    assert "ranks are 0 to 3" in refused(WorldError, create_group, "outside", [1, 4])
