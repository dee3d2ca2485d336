"""Agreement: all ranks capture in the same call, or none does; otherwise all are told instead of waiting for ever.

A rank that meets a batch of a new shape captures its network again and takes part in no collective meanwhile. When the
others have no reason to capture, their next collective would wait for it in vain. Asking each other in every step would
cost a message per step, so nobody asks: a rank that is about to capture writes so in the job's store and waits there
for the others. One that has waited in a collective for longer than a moment looks into the store; a rank that captures
in the very call that it runs itself will never come, and it refuses the call for all. Steps without such a wait cost
nothing.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CaptureError
from msrun.runtime import progress, world
from msrun.runtime.agreement import decide
from msrun.runtime.execute.transfers import on_long_wait
from msrun.runtime.groups import get_group_size
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.plan import log
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.world import at_release, simulation_level

_PREFIX = "msrun_capture"
_REFUSED = f"{_PREFIX}/refused"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.2


class Agreement:
    """This rank's side of it. All ranks make the same calls in the same order."""

    def __init__(self) -> None:
        self._world = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew, with a new world; its ranks may share the store with the old one."""
        self._world += 1
        self._call = 0
        self._captures = False

    def begin_call(self) -> None:
        """Count a call of a parallel network; it runs what was captured unless `meet` follows."""
        self._call += 1
        self._captures = False

    def meet(self, rank: int, world_size: int, what: str) -> None:
        """Wait until every rank is about to capture in this call.

        Args:
            what: what is captured, for the other ranks' messages.
        """
        self._captures = True
        if simulation_level() is not None:
            return
        store = job_store()
        store.set(self._announced_by(), f"rank {rank} got {what}")
        store.set(self._key(rank), "")
        keys = [self._key(other) for other in range(world_size)]
        pause_s, deadline = _FIRST_PAUSE_S, time.monotonic() + store.timeout.total_seconds()
        with progress.waiting_in(lambda: "the agreement to capture"):
            while not store.check(keys):
                _raise_if_refused(store)
                if time.monotonic() > deadline:
                    raise CaptureError(f"rank {rank} got {what} and waited in vain for the other ranks to capture too")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def look(self) -> None:
        """Refuse this call for all ranks when another one captures in it; called while this rank waits for others."""
        if not dist.is_initialized():
            return
        store = job_store()
        _raise_if_refused(store)
        if not self._captures and store.check([self._announced_by()]):
            other = store.get(self._announced_by()).decode()
            store.set(
                _REFUSED,
                f"{other}, which no rank had before, while other ranks go on with shapes that they know: give every "
                "rank a batch of the same shape in each step (drop the last, smaller one)",
            )
            _raise_if_refused(store)

    def _announced_by(self) -> str:
        return self._key("announced")

    def _key(self, what: int | str) -> str:
        return f"{_PREFIX}/{self._world}/{self._call}/{what}"


def job_store() -> Any:
    """Return the store that the job's processes have in common; torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


def _raise_if_refused(store: Any) -> None:
    if store.check([_REFUSED]):
        raise CaptureError(store.get(_REFUSED).decode())


agreement = Agreement()
"""Of this process."""
on_long_wait.append(agreement.look)
at_release(agreement.forget)


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
