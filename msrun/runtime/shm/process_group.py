"""ShmGroup: torch's process group whose operations go through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.shm.collective_line import Collectives
from msrun.runtime.shm.collectives import (
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    Exchange,
    Rows,
    Scatter,
)
from msrun.runtime.shm.mail import Mail, Receive, Send
from msrun.runtime.shm.reduction import reduction_of
from msrun.runtime.shm.segment import Segment
from msrun.runtime.shm.work import ShmWork, forget, start

_SUM = dist.ReduceOp.SUM
_ProcessGroup: Any = dist.ProcessGroup
"""torch declares forms of its methods that only its own classes have."""


class ShmGroup(_ProcessGroup):
    """The ranks of one machine. torch calls its methods; their names and arguments are those of torch's own groups."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout_s = timeout.total_seconds()
        with torch.inference_mode(mode=False):
            self._segment = Segment(store, rank, size, self._timeout_s)
        self._collectives = Collectives(self._segment)
        self._mail = Mail(self._segment)
        self._is_closed = False
        self._coalesced: list[ShmWork] | None = None
        self._own_name, self._own_description = "", ""

    # -- what it is ---------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return what torch calls it."""
        return "shm"

    def name(self) -> str:
        """Return what torch calls it."""
        return "shm"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch gave the group."""
        return self._own_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Take the name that torch gives the group."""
        self._own_name = name

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._own_name

    @property
    def group_desc(self) -> str:
        """What torch says of the group."""
        return self._own_description

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    def _set_group_desc(self, text: str) -> None:
        self._own_description = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ShmGroup:  # noqa: ARG002 - torch's form
        return self

    @property
    def supports_splitting(self) -> bool:
        """No: torch makes sub-groups as new ones."""
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: others that still wait for this rank are told so."""
        if self._is_closed:
            return
        self._is_closed = True
        segment = self._segment
        forget(self._collectives)
        forget(self._mail)
        segment.words[segment.left + segment.rank] = 1
        segment.close()

    def abort(self) -> None:
        """Leave the group."""
        self.shutdown()

    # -- collectives --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> ShmWork:
        """Reduce tensors over the ranks, in place."""
        return self._all_reduce(_listed(tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        """Reduce tensors over the ranks, in place."""
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any, root: int | None = None) -> ShmWork:
        op = getattr(opts, "reduceOp", opts if opts is not None else _SUM)
        values = [_Value(tensor) for tensor in tensors]
        made = [AllReduce(self._segment, v.flat, reduction_of(op, v.flat.dtype), root) for v in values]
        return self._start(made, values)

    def reduce(self, tensors: Any, opts: Any) -> ShmWork:
        """Reduce tensors over the ranks, to one of them."""
        return self._all_reduce(_listed(tensors), opts, opts.rootRank)

    def broadcast(self, tensors: Any, opts: Any = 0) -> ShmWork:
        """Give the root's tensors to all."""
        root = getattr(opts, "rootRank", opts)
        values = [_Value(tensor) for tensor in _listed(tensors)]
        return self._start([Broadcast(self._segment, v.flat, root) for v in values], values)

    def allgather(self, results: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> ShmWork:  # noqa: ARG002
        """Give every rank's tensor to all, as tensors of their own."""
        made, values = [], []
        for into, tensor in zip(results, tensors, strict=True):
            own, given = _Value(tensor, writes=False), [_Value(result, reads=False) for result in into]
            made.append(AllGather(self._segment, [v.flat for v in given], own.flat))
            values += given
        return self._start(made, values)

    def allgather_coalesced(self, results: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> ShmWork:
        """Give several tensors of every rank to all."""
        by_tensor = [list(column) for column in zip(*results, strict=True)]
        return self.allgather(by_tensor, tensors, opts)

    def all_gather_single(self, result: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        """Give every rank's tensor to all, one after the other in one tensor."""
        return self.all_gather_single_coalesced([result], [tensor], opts)

    def all_gather_single_coalesced(
        self,
        results: list[Tensor],
        tensors: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> ShmWork:
        """Give several tensors of every rank to all."""
        made, values = [], []
        for result, tensor in zip(results, tensors, strict=True):
            own, given = _Value(tensor, writes=False), _Value(result, reads=False)
            parts = _split(given.flat, self.size(), own.flat.numel())
            made.append(AllGather(self._segment, parts, own.flat))
            values.append(given)
        return self._start(made, values)

    def gather(self, results: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        """Give every rank's tensor to one."""
        own = _Value(tensors[0], writes=False)
        given = [_Value(result, reads=False) for result in results[0]] if self.rank() == opts.rootRank else None
        into = None if given is None else [v.flat for v in given]
        return self._start([AllGather(self._segment, into, own.flat, opts.rootRank)], given or [])

    def scatter(self, results: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        """Give each rank its tensor of the root's."""
        result = _Value(results[0], reads=False)
        own = [_Value(t, writes=False).flat for t in tensors[0]] if self.rank() == opts.rootRank else None
        return self._start([Scatter(self._segment, result.flat, own, opts.rootRank)], [result])

    def reduce_scatter(self, results: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> ShmWork:
        """Reduce, and give each rank its tensor."""
        pairs: list[tuple[Tensor, Rows]] = [
            (result, [_Value(t, writes=False).flat for t in own]) for result, own in zip(results, tensors, strict=True)
        ]
        return self._reduce_scatter(pairs, opts)

    def reduce_scatter_single(self, result: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        """Reduce, and give each rank its part of the tensor."""
        return self.reduce_scatter_single_coalesced([result], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, results: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> ShmWork:
        """Reduce, and give each rank its part of each tensor."""
        pairs: list[tuple[Tensor, Rows]] = [
            (result, _split(_Value(tensor, writes=False).flat, self.size(), result.numel()))
            for result, tensor in zip(results, tensors, strict=True)
        ]
        return self._reduce_scatter(pairs, opts)

    def _reduce_scatter(self, pairs: Sequence[tuple[Tensor, Rows]], opts: Any) -> ShmWork:
        op = getattr(opts, "reduceOp", opts if opts is not None else _SUM)
        made, values = [], []
        for result, own in pairs:
            given = _Value(result, reads=False)
            made.append(Exchange(self._segment, given.flat, own, reduction_of(op, given.flat.dtype)))
            values.append(given)
        return self._start(made, values)

    def all_to_all_single(
        self,
        result: Tensor,
        tensor: Tensor,
        result_rows: list[int],
        rows: list[int],
        opts: Any = None,  # noqa: ARG002
    ) -> ShmWork:
        """Give each rank its rows of every rank's tensor."""
        given, own = _Value(result, reads=False), _Value(tensor, writes=False)
        is_even = not result_rows and not rows
        into, values = _rows(given.flat, result, result_rows, self.size()), _rows(own.flat, tensor, rows, self.size())
        return self._start([Exchange(self._segment, into, values, is_even=is_even)], [given])

    def alltoall(self, results: list[Tensor], tensors: list[Tensor], opts: Any = None) -> ShmWork:  # noqa: ARG002
        """Give each rank its tensor of every rank's."""
        given = [_Value(result, reads=False) for result in results]
        own = [_Value(tensor, writes=False).flat for tensor in tensors]
        return self._start([Exchange(self._segment, [v.flat for v in given], own, is_even=False)], given)

    def barrier(self, opts: Any = None) -> ShmWork:  # noqa: ARG002
        """Wait for all ranks."""
        return self._start([Barrier(self._segment)], [])

    def _start(self, made: Sequence[Collective], values: Sequence[_Value]) -> ShmWork:
        start(self._collectives, made)
        return self._work(self._collectives, made, values)

    def _work(self, line: Any, made: Sequence[Any], values: Sequence[_Value]) -> ShmWork:
        copied = [value for value in values if value.is_copy]

        def finish() -> None:
            for value in copied:
                value.write_back()

        work = ShmWork(line, made, [value.tensor for value in values], self._timeout_s, finish if copied else None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # -- point to point -----------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> ShmWork:
        """Send a tensor to a rank."""
        value = _Value(tensors[0], writes=False)
        made = Send(self._segment, to, tag, value.bytes)
        start(self._mail, [made])
        return self._work(self._mail, [made], [])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ShmWork:
        """Receive a tensor from a rank."""
        return self._receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ShmWork:
        """Receive a tensor from whoever sends one first."""
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> ShmWork:
        value = _Value(tensor, reads=False)
        made = Receive(self._segment, source, tag, value.bytes)
        start(self._mail, [made])
        return self._work(self._mail, [made], [value])

    # -- several at once ----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002 - torch's form
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:  # noqa: ARG002 - torch's form
        works, self._coalesced = self._coalesced or [], None
        return _Works(works)


class _Works(dist.Work):
    """Several works, waited for together."""

    def __init__(self, works: Sequence[ShmWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Return whether all are done."""
        return all(work.is_completed() for work in self._works)


class _Value:
    """A tensor of the caller's, flat: the tensor's own memory where it lies in a row, else a copy.

    Args:
        reads, writes: whether the operation needs what is there, and whether it leaves something there.

    Raises:
        ValueError: a tensor that is not on the CPU, or sparse.
    """

    def __init__(self, tensor: Tensor, *, reads: bool = True, writes: bool = True) -> None:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            what = str(tensor.layout).removeprefix("torch.") if tensor.is_cpu else tensor.device
            raise ValueError(f"the backend shm carries dense tensors of the CPU, not {what}: use gloo or nccl for them")
        self.tensor = tensor
        if torch.is_inference_mode_enabled() or tensor.is_inference():
            with torch.inference_mode(mode=False):  # the operation may end outside it
                self._set(_alias(tensor), reads, writes)
        else:
            self._set(tensor.detach(), reads, writes)

    def _set(self, plain: Tensor, reads: bool, writes: bool) -> None:
        self.is_copy = False
        if not plain.is_contiguous():
            self.is_copy = writes
            plain = plain.contiguous() if reads else torch.empty(plain.shape, dtype=plain.dtype)
        self.flat = plain if plain.dim() == 1 else plain.view(-1)

    @property
    def bytes(self) -> Tensor:
        """Its memory."""
        return self.flat.view(torch.uint8) if self.flat.dtype != torch.uint8 else self.flat

    def write_back(self) -> None:
        """Copy what has come to where the caller's tensor lies."""
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory that is none of inference mode, if that is off."""
    if not tensor.is_inference():
        return tensor.detach()
    place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(*place)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _split(flat: Tensor, ranks: int, length: int) -> Tensor:
    """Cut a tensor into one part per rank: [rank, length].

    Raises:
        ValueError: it has not as many numbers as all parts together.
    """
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


def register() -> None:
    """Let torch know the backend; once in a process."""
    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, devices=["cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ShmGroup:
    return ShmGroup(store, rank, size, timeout)
