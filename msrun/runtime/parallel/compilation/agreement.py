"""What ranks compare of their calls: rank 0's answers to questions, and whether their batches differ."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.runtime import world
from msrun.runtime.agreement import decide, job_store, meetings
from msrun.runtime.execute.transfers import on_long_wait
from msrun.runtime.groups import get_group_size
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.plan import log
from msrun.runtime.parallel.settings import ParallelSettings

on_long_wait.append(meetings.look)


def own_answer(question: Callable[[], int]) -> int:
    """Give a rank that exchanges nothing its own answer."""
    return question()


def answer_of_rank_0(question: Callable[[], int]) -> int:
    """Give every rank rank 0's answer."""
    return question() if get_group_size() == 1 else decide(question)


_STEPS = 2
"""Steps that are compared: one may be equal by chance, such as a first batch of zeros."""
_LAST_LOOK = 100
_DIGEST_BYTES = 1 << 20
"""Of each tensor: enough of its first rows to tell batches apart."""
_ALTERNATIVE = ', or say that each passes the whole batch: dataset_strategy("full_batch")'
_numbers = itertools.count()


class SameBatch:
    """Looks at the batches of one AutoParallel's training steps."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._calls = 0

    def look(self, settings: ParallelSettings, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at the arguments of the next training step."""
        self._calls += 1
        if self._calls > _LAST_LOOK or world.simulation_level() is not None or not settings.takes_parts:
            return
        rank, size = world.get_rank(), world.get_group_size()
        if self._calls <= _STEPS:
            tensors = find_tensors(args, kwargs)
            if tensors:
                job_store().set(self._key(self._calls, rank), str(_digest(tensors)))
        elif rank == 0:
            self._compare(settings, size)

    def _compare(self, settings: ParallelSettings, size: int) -> None:
        store = job_store()
        keys = [[self._key(step, rank) for rank in range(size)] for step in range(1, _STEPS + 1)]
        if not store.check(list(itertools.chain(*keys))):
            return
        self._calls = _LAST_LOOK
        if all(len({store.get(key) for key in of_step}) == 1 for of_step in keys):
            log.warning(
                f"all {size} ranks got the same batch in each of the first {_STEPS} steps, so they do the work of one: "
                "let each read its own part (a dataset of msrun with num_shards=, shard_id=, a DataLoader with "
                f"sampler=DistributedSampler(...)){_ALTERNATIVE if settings.is_captured else ''}"
            )

    def _key(self, step: int, rank: int) -> str:
        return f"msrun_batch/{self._number}/{step}/{rank}"


@torch.no_grad()
def _digest(tensors: Sequence[Tensor]) -> int:
    digest = 0
    for tensor in tensors:
        rows = max(1, _DIGEST_BYTES * len(tensor) // max(tensor.nbytes, 1)) if tensor.dim() else 1
        part = (tensor[:rows] if tensor.dim() else tensor).detach().cpu().contiguous()
        digest = zlib.crc32(part.reshape(-1).view(torch.uint8).numpy().data, digest)
    return digest
