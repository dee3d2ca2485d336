"""Process groups that their members make alone, while other ranks do something else.

`torch.distributed.new_group(use_local_synchronization=True)` is meant for that, but names the group after its ranks and
the number of groups that the process has made before. Ranks that belong to different groups have made different
numbers, give one group different names, and wait for each other for ever (torch 2.11 to 2.13). So the name is fixed
here, by swapping the private function that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

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
