"""ShmGroup: torch's process group whose operations go through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.shm import collectives
from msrun.shm.collective_line import Collectives
from msrun.shm.collectives import Collective, Rows, kind_of, op_of, reduction_of
from msrun.shm.mail import Mail, Receive, Send
from msrun.shm.segment import Segment
from msrun.shm.work import ShmWork, TorchGroup, Value, forget, listed, start


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
