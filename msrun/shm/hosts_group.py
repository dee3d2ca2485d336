"""HostsGroup: a group over several hosts. Inside a host its ranks meet in shared memory; one rank of each host, its
leader, speaks with the other leaders over gloo.

An operation has three parts: to the leader, between the leaders, from the leader. What has no such parts (messages,
gather, all-to-all, tensors of unequal size), or is not faster so (broadcast, long sums), goes over gloo among all.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from msrun import contract
from msrun.shm.collective_line import GlooPart, Parts, PartsLine
from msrun.shm.collectives import Collective, all_gather, all_reduce, broadcast, kind_of, op_of, reduction_of, scatter
from msrun.shm.process_group import ShmGroup
from msrun.shm.segment import NotSharedError, this_machine
from msrun.shm.work import ShmWork, TorchGroup, Value, Works, listed, start

_Op: Any = dist.ReduceOp.RedOpType
_BETWEEN = {_Op.SUM: _Op.SUM, _Op.AVG: _Op.SUM, _Op.MIN: _Op.MIN, _Op.MAX: _Op.MAX, _Op.PRODUCT: _Op.PRODUCT}
"""How hosts reduce what was reduced on each of them; a mean is a sum that every rank divides in the end."""
_TYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64
}  # fmt: skip
"""What gloo reduces."""
_MOST_BYTES = 2 << 20
"""Most that is reduced on each host first: gloo's ring is faster beyond it, as its ranks share the adding up."""
_Local = Callable[[ShmGroup], Collective]
_Between = Callable[[Any], Any]


class HostsGroup(TorchGroup):
    """The ranks of several hosts.

    Args:
        hosts: the ranks of the group on each host, ascending.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, hosts: Sequence[Sequence[int]]) -> None:
        super().__init__(rank, size, timeout)
        self._hosts, self._host = hosts, next(index for index, ranks in enumerate(hosts) if rank in ranks)
        here = hosts[self._host]
        self._is_leader = here[0] == rank
        self._is_even = len({len(ranks) for ranks in hosts}) == 1
        self._order = [rank for ranks in hosts for rank in ranks]
        self._is_in_order = self._order == sorted(self._order)
        self._up, self._down = self._share(store, here)
        if self._is_leader:
            self._leaders = _gloo(PrefixStore("leaders", store), self._host, len(hosts), timeout)
        self._all = _gloo(PrefixStore("all", store), rank, size, timeout)
        self._line = PartsLine([self._up.line, self._down.line])

    def _share(self, store: Any, here: Sequence[int]) -> list[ShmGroup]:
        rank, timeout, reason = self.rank(), timedelta(seconds=self._timeout_s), ""
        made: list[ShmGroup] = []
        try:
            for way in ("up", "down"):
                own = PrefixStore(f"{way} {self._host}", store)
                made.append(ShmGroup(own, here.index(rank), len(here), timeout))
        except NotSharedError as error:
            reason = str(error)
        store.set(f"reason {rank}", reason)
        reasons = [bytes(found).decode() for found in store.multi_get([f"reason {r}" for r in range(self.size())])]
        if any(reasons):
            for group in made:
                group.shutdown()
            raise NotSharedError(next(filter(None, reasons)))
        return made

    def shutdown(self) -> None:
        self._up.shutdown()
        self._down.shutdown()

    def abort(self) -> None:
        self.shutdown()

    def _work_of(
        self,
        name: str,
        parts: tuple[_Local | None, _Between, _Local | None],
        values: Sequence[Value],
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> ShmWork:
        """Begin an operation.

        Args:
            parts: to the leader, between the leaders, from the leader; None: nothing there.
            finish: called on every rank when all is done.
        """

        def local(group: ShmGroup, make: _Local | None) -> Callable[[], Any]:
            return lambda: None if make is None else group.begin(make(group))

        def between() -> Any:
            return GlooPart(parts[1](self._leaders)) if self._is_leader else None

        count = sum(value.flat.numel() for value in values)
        text = f"{name} of {self.size()} ranks on {len(self._hosts)} hosts, {count} numbers"
        begin = [(self._up.line, local(self._up, parts[0])), (None, between)]
        begin.append((self._down.line, local(self._down, parts[2])))
        made = Parts(text, begin)
        start(self._line, [made])
        return self._work(self._line, [made], values, opts, finish)

    # -- operations of three parts ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        first, kind = listed(tensors)[0], kind_of(op_of(opts))
        if len(listed(tensors)) > 1 or first.is_sparse or not _is_faster(first, kind):
            return self._over_gloo("allreduce", tensors, opts)
        value = Value(first)
        flat, local = value.flat, reduction_of(_BETWEEN[kind], value.flat.dtype)
        parts = (
            lambda group: all_reduce(group.segment, flat, local, 0),
            lambda leaders: leaders.allreduce([flat], _reduction_options(_BETWEEN[kind])),
            lambda group: broadcast(group.segment, flat, 0),
        )
        return self._work_of("all_reduce", parts, [value], opts, lambda: _divide(flat, kind, self.size()))

    def all_gather_single(self, result: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if not self._is_even or result.numel() != tensor.numel() * self.size():
            return self._over_gloo("all_gather_single", result, tensor, opts)
        own, given = Value(tensor, writes=False), Value(result, reads=False)
        whole = given.flat.view(self.size(), -1)
        by_host = whole if self._is_in_order else torch.empty_like(whole)
        block = torch.empty_like(by_host[: len(self._hosts[0])])

        def finish() -> None:
            if by_host is not whole:
                whole[self._order] = by_host

        parts = (
            lambda group: all_gather(group.segment, block if self._is_leader else None, own.flat, 0),
            lambda leaders: leaders.all_gather_single(by_host.view(-1), block.view(-1)),
            lambda group: broadcast(group.segment, by_host.view(-1), 0),
        )
        return self._work_of("all_gather", parts, [given], opts, finish)

    def reduce_scatter_single(self, result: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        kind = kind_of(op_of(opts))
        if not (self._is_even and _is_faster(tensor, kind) and tensor.numel() == result.numel() * self.size()):
            return self._over_gloo("reduce_scatter_single", result, tensor, opts)
        given = Value(result, reads=False)
        rows = tensor.detach().reshape(self.size(), -1)
        by_host = rows.clone() if self._is_in_order else rows[self._order]
        local, count = reduction_of(_BETWEEN[kind], tensor.dtype), len(self._hosts[0])
        own = by_host[self._host * count :][:count].unbind(0) if self._is_leader else None
        parts = (
            lambda group: all_reduce(group.segment, by_host.view(-1), local, 0),
            lambda leaders: leaders.allreduce([by_host.view(-1)], _reduction_options(_BETWEEN[kind])),
            lambda group: scatter(group.segment, given.flat, own, 0),
        )
        return self._work_of("reduce_scatter", parts, [given], opts, lambda: _divide(given.flat, kind, self.size()))

    def barrier(self, opts: Any = None) -> Any:

        def wait(group: ShmGroup) -> Collective:
            return Collective(group.segment, "barrier")

        return self._work_of("barrier", (wait, lambda leaders: leaders.barrier(), wait), [], opts)

    # -- the others ---------------------------------------------------------------------------------------------

    def _over_gloo(self, name: str, *words: Any) -> Any:
        copied: list[Value] = []

        def in_a_row(word: Any) -> Any:
            if isinstance(word, list):
                return [in_a_row(each) for each in word]
            if not isinstance(word, Tensor) or word.is_sparse or word.is_contiguous():
                return word
            copied.append(Value(word))
            return copied[-1].flat.view(word.shape)

        work = getattr(self._all, name)(*(in_a_row(word) for word in words if word is not None))
        work = Works([work], copied) if copied else work
        self._note(work)
        return work


for _name in (
    "reduce", "broadcast", "allgather", "allgather_coalesced", "all_gather_single_coalesced", "allreduce_coalesced",
    "gather", "scatter", "reduce_scatter", "reduce_scatter_single_coalesced", "alltoall", "all_to_all_single", "send",
    "recv", "recv_anysource",
):  # fmt: skip
    setattr(HostsGroup, _name, functools.partialmethod(HostsGroup._over_gloo, _name))


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group of gloo's with the methods that torch calls."""
    cpu = torch.device("cpu")
    group: Any = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _is_faster(tensor: Tensor, kind: Any) -> bool:
    """Return whether numbers are reduced on each host first."""
    return kind in _BETWEEN and tensor.dtype in _TYPES and tensor.nbytes <= _MOST_BYTES


def _reduction_options(kind: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = kind
    return options


def _divide(total: Tensor, kind: Any, ranks: int) -> None:
    """Make a sum a mean, where that was asked for."""
    if kind == _Op.AVG:
        total.div_(ranks) if total.is_floating_point() else total.div_(ranks, rounding_mode="trunc")


_said: list[str] = []


def register() -> None:
    """Let torch know the backend; once in a process."""
    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, devices=["cpu"])
    # From 2.15 on torch hooks a recorder into groups of other backends than these; it fails on groups in Python.
    recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add("shm")


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the group: of one host, of several, or gloo's where no two ranks can share memory."""
    hosts = _hosts(store, rank, size)
    try:
        if len(hosts) == 1:
            return ShmGroup(store, rank, size, timeout)
        if len(hosts) < size:
            return HostsGroup(store, rank, size, timeout, hosts)
    except NotSharedError as error:
        if rank == 0 and not _said:  # once, of the first group
            _said.append(str(error))
            text = f"msrun.runtime: the backend shm cannot run here ({error}): gloo is used"
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the log
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _hosts(store: Any, rank: int, size: int) -> list[list[int]]:
    """Return the ranks of the group on each host, by first rank; all ranks say where they are."""
    world = os.environ.get(contract.WORLD_SIZE)
    if world is not None and world == os.environ.get(contract.LOCAL_WORLD_SIZE):
        return [list(range(size))]
    place = [*this_machine(), os.environ.get(contract.GROUP_RANK, "0")]  # hosts of a rehearsal are one machine
    store.set(f"host {rank}", " ".join(place))
    found: dict[bytes, list[int]] = {}
    for other, host in enumerate(store.multi_get([f"host {other}" for other in range(size)])):
        found.setdefault(bytes(host), []).append(other)
    return list(found.values())
