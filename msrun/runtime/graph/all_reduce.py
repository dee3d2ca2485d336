"""The all-reduce: a sum over the ranks of a group, started now and waited for later, counted.

gloo's goes round a ring in many steps: with anything from 16 numbers to half a megabyte 1.4 ms between two processes of
one machine, 5 ms between four, 20 ms between eight (two processors). A short message goes to every other rank at once
instead: 0.3 to 0.5, 2 to 3, 4 to 10 ms. Each rank adds up what came, in rank order: all get the same bits. Over a slow
network only very short messages are better off so.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.graph.pending import Pending, name_of, traffic
from msrun.runtime.shared_host import share_host

_SHORT_BYTES = 64 << 10
"""Most that a rank sends to all others together; a ring of more than two sends less."""
_SHORT_BYTES_ON_A_HOST = 2 << 20
"""The same where no network lies between the ranks."""


def start_all_reduce(value: Tensor, group: dist.ProcessGroup, *, in_place: bool = False) -> Pending:
    """Sum over the group. `value` is not changed, unless `in_place`: then nobody may read it any more."""
    traffic.add("all_reduce", value)
    name = name_of("all_reduce", group)
    own = value.contiguous() if in_place else value.clone(memory_format=torch.contiguous_format)
    if _goes_at_once(own, group):
        return _start_at_once(own, group, name)
    return Pending(own, dist.all_reduce(own, group=group, async_op=True), name=name)


def _goes_at_once(value: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether each rank sends all of it to each other one. A single number has no ring to go through."""
    others = dist.get_world_size(group) - 1
    if value.numel() < 2 or others < 1 or value.device.type != "cpu" or dist.get_backend(group) != "gloo":
        return False
    sent = value.numel() * value.element_size() * others
    if sent <= _SHORT_BYTES:
        return True
    return sent <= _SHORT_BYTES_ON_A_HOST and share_host(dist.get_process_group_ranks(group))


def _start_at_once(value: Tensor, group: dist.ProcessGroup, name: str) -> Pending:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = value if size == 2 else torch.cat([value] * (size - 1))
    received = torch.empty_like(sent)
    rows = [value.shape[0] if other != rank else 0 for other in range(size)]
    work = dist.all_to_all_single(received, sent, rows, rows, group=group, async_op=True)

    def add_up(got: Tensor) -> Tensor:
        if size == 2:  # in either order
            return value.add_(got)
        parts = list(got.chunk(size - 1))
        parts.insert(rank, value)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    return Pending(received, work, add_up, name, value.shape)
