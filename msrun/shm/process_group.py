"""ShmGroup: torch's process group whose operations go through shared memory."""

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
from msrun.shm import collectives
from msrun.shm.collective_line import Collectives, GlooPart, Mail, Parts, PartsLine, Receive, Send
from msrun.shm.collectives import (
    Collective,
    Rows,
    all_gather,
    all_reduce,
    broadcast,
    kind_of,
    op_of,
    reduction_of,
    scatter,
)
from msrun.shm.segment import NotSharedError, Segment, this_machine
from msrun.shm.work import ShmWork, TorchGroup, Value, Works, forget, listed, start


class ShmGroup(TorchGroup):
    """The ranks of one machine. torch calls its methods; their names and arguments are those of torch's own groups."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, timeout)
        with torch.inference_mode(mode=False):
            self.segment = Segment(store, rank, size, self._timeout_s)
        self.line = Collectives(self.segment)
        self._mail = Mail(self.segment)
        self._is_closed = False

    def shutdown(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        segment = self.segment
        forget(self.line)
        forget(self._mail)
        segment.words[segment.left + segment.rank] = 1
        segment.close()

    def abort(self) -> None:
        self.shutdown()

    # -- collectives --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> ShmWork:
        if any(tensor.is_sparse for tensor in listed(tensors)):
            return self._add_up_sparse(listed(tensors), op_of(opts))
        return self._all_reduce(listed(tensors), opts)

    def _add_up_sparse(self, tensors: list[Tensor], op: Any) -> ShmWork:
        if kind_of(op) != dist.ReduceOp.SUM:
            raise ValueError(f"sparse tensors can be added up, not reduced by {kind_of(op).name}")
        for tensor in tensors:
            own = tensor.detach().coalesce()
            counts = torch.empty(self.size(), dtype=torch.int64)
            self.all_gather_single(counts, torch.tensor([own._nnz()])).wait()
            places = [own.indices().new_empty(own.sparse_dim(), count) for count in counts.tolist()]
            values = [own.values().new_empty(count, *own.values().shape[1:]) for count in counts.tolist()]
            self.allgather([places, values], [own.indices(), own.values()]).wait()
            parts = [
                torch.sparse_coo_tensor(*part, own.shape, check_invariants=False, is_coalesced=True)
                for part in zip(places, values, strict=True)
            ]
            with torch.no_grad():  # a detached sparse tensor would be given other values, not this one
                tensor.copy_(sum(parts[1:], parts[0]).coalesce())
        return ShmWork(self.line, [], tensors, self._timeout_s)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any, root: int | None = None) -> ShmWork:
        op, values = op_of(opts), [Value(tensor) for tensor in tensors]
        made = [collectives.all_reduce(self.segment, v.flat, reduction_of(op, v.flat.dtype), root) for v in values]
        return self._start(made, values, opts)

    def reduce(self, tensors: Any, opts: Any) -> ShmWork:
        return self._all_reduce(listed(tensors), opts, opts.rootRank)

    def broadcast(self, tensors: Any, opts: Any = 0) -> ShmWork:
        root = getattr(opts, "rootRank", opts)
        values = [Value(tensor) for tensor in listed(tensors)]
        return self._start([collectives.broadcast(self.segment, v.flat, root) for v in values], values, opts)

    def allgather(self, results: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> ShmWork:
        made, values = [], []
        for into, tensor in zip(results, tensors, strict=True):
            own, given = Value(tensor, writes=False), [Value(result, reads=False) for result in into]
            made.append(collectives.all_gather(self.segment, [v.flat for v in given], own.flat))
            values += given
        return self._start(made, values, opts)

    def allgather_coalesced(self, results: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> ShmWork:
        by_tensor = [list(column) for column in zip(*results, strict=True)]
        return self.allgather(by_tensor, tensors, opts)

    def all_gather_single(self, result: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        return self.all_gather_single_coalesced([result], [tensor], opts)

    def all_gather_single_coalesced(
        self,
        results: list[Tensor],
        tensors: list[Tensor],
        opts: Any = None,
    ) -> ShmWork:
        made, values = [], []
        for result, tensor in zip(results, tensors, strict=True):
            own, given = Value(tensor, writes=False), Value(result, reads=False)
            parts = _split(given.flat, self.size(), own.flat.numel())
            made.append(collectives.all_gather(self.segment, parts, own.flat))
            values.append(given)
        return self._start(made, values, opts)

    def gather(self, results: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        own = Value(tensors[0], writes=False)
        given = [Value(result, reads=False) for result in results[0]] if self.rank() == opts.rootRank else None
        into = None if given is None else [v.flat for v in given]
        return self._start([collectives.all_gather(self.segment, into, own.flat, opts.rootRank)], given or [], opts)

    def scatter(self, results: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        result = Value(results[0], reads=False)
        own = [Value(t, writes=False).flat for t in tensors[0]] if self.rank() == opts.rootRank else None
        return self._start([collectives.scatter(self.segment, result.flat, own, opts.rootRank)], [result], opts)

    def reduce_scatter(self, results: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> ShmWork:
        pairs: list[tuple[Tensor, Rows]] = [
            (result, [Value(t, writes=False).flat for t in own]) for result, own in zip(results, tensors, strict=True)
        ]
        return self._reduce_scatter(pairs, opts)

    def reduce_scatter_single(self, result: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter_single_coalesced([result], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, results: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> ShmWork:
        pairs: list[tuple[Tensor, Rows]] = [
            (result, _split(Value(tensor, writes=False).flat, self.size(), result.numel()))
            for result, tensor in zip(results, tensors, strict=True)
        ]
        return self._reduce_scatter(pairs, opts)

    def _reduce_scatter(self, pairs: Sequence[tuple[Tensor, Rows]], opts: Any) -> ShmWork:
        op, made, values = op_of(opts), [], []
        for result, own in pairs:
            given = Value(result, reads=False)
            made.append(collectives.reduce_scatter(self.segment, given.flat, own, reduction_of(op, given.flat.dtype)))
            values.append(given)
        return self._start(made, values, opts)

    def all_to_all_single(
        self,
        result: Tensor,
        tensor: Tensor,
        result_rows: list[int],
        rows: list[int],
        opts: Any = None,
    ) -> ShmWork:
        given, own = Value(result, reads=False), Value(tensor, writes=False)
        is_even = not result_rows and not rows
        into, values = _rows(given.flat, result, result_rows, self.size()), _rows(own.flat, tensor, rows, self.size())
        return self._start([collectives.all_to_all(self.segment, into, values, is_even=is_even)], [given], opts)

    def alltoall(self, results: list[Tensor], tensors: list[Tensor], opts: Any = None) -> ShmWork:
        given = [Value(result, reads=False) for result in results]
        own = [Value(tensor, writes=False).flat for tensor in tensors]
        return self._start(
            [collectives.all_to_all(self.segment, [v.flat for v in given], own, is_even=False)], given, opts
        )

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._start([Collective(self.segment, "barrier")], [], opts)

    def begin(self, operation: Collective) -> Collective:
        self.line.add(operation)
        self.line.advance()
        return operation

    def _start(self, made: Sequence[Collective], values: Sequence[Value], opts: Any) -> ShmWork:
        start(self.line, made)
        return self._work(self.line, made, values, opts)

    # -- point to point -----------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> ShmWork:
        value = Value(tensors[0], writes=False)
        made = Send(self.segment, to, tag, value.bytes)
        start(self._mail, [made])
        return self._work(self._mail, [made], [], None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ShmWork:
        return self._receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ShmWork:
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> ShmWork:
        value = Value(tensor, reads=False)
        made = Receive(self.segment, source, tag, value.bytes)
        start(self._mail, [made])
        return self._work(self._mail, [made], [value], None)


def _split(flat: Tensor, ranks: int, length: int) -> Tensor:
    """Cut a tensor into one part per rank: [rank, length]."""
    if flat.numel() != ranks * length:
        raise ValueError(
            f"a tensor of {flat.numel()} numbers for {ranks} ranks of {length} each: {ranks * length} needed"
        )
    return flat.view(ranks, length)


def _rows(flat: Tensor, tensor: Tensor, rows: Sequence[int], ranks: int) -> Rows:
    """Cut a tensor into the rows of each rank; equal ones if none are given."""
    if not rows:
        if tensor.shape[0] % ranks if tensor.dim() else 1:
            raise ValueError(f"{tensor.shape[0] if tensor.dim() else 1} rows cannot be cut for {ranks} ranks evenly")
        return _split(flat, ranks, flat.numel() // ranks)
    if len(rows) != ranks or sum(rows) != tensor.shape[0]:
        raise ValueError(f"rows {list(rows)} for {ranks} ranks of a tensor of {tensor.shape[0]} rows")
    width = flat.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return list(flat.split([count * width for count in rows]))


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
