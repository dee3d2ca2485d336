"""A recording: what the operators of a training step on fake tensors take, in memory, in time and on the wire.

Every operator and every collective that torch dispatches is seen here, whoever calls it. Memory is counted storage by
storage, from the operator that makes it to the moment when nobody refers to it any more, as a real step does it; what
an operator takes inside its kernel is not seen. Time is that of one stream of operators and one of messages: a message
begins when it is started and the one before it has arrived, and holds the operators up when they wait for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import (
    NOTHING,
    Work,
    is_view,
    measured_collective_seconds,
    operations,
    operator_seconds,
)
from msrun.runtime.execute import transfers
from msrun.runtime.execute.transfers import TensorFuture


def format_bytes(count: float) -> str:
    """Return a number of bytes with a unit: 0, 512 B, 1.50 MB; powers of 1024."""
    if not count:
        return "0"
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Return a time with a unit: 1.23 s, 45.6 ms, 7 us."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
_INPUT = {"_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_": 1}
_INPUT |= {"alltoall_base_": 1, "alltoall_": 1}
"""Which argument of a collective this rank gives; else the first."""


def message_of(func: Any, args: Any) -> tuple[str, int] | None:
    """Return a collective's name, or "send" and "receive", and the bytes that this rank gives; None of other calls."""
    name = func.__name__.partition(".")[0]
    if name not in COLLECTIVES:
        return None
    given = [leaf for leaf in pytree.tree_leaves(args[_INPUT.get(name, 0)]) if isinstance(leaf, Tensor)]
    return COLLECTIVES[name], sum(tensor.numel() * tensor.element_size() for tensor in given)


def work_of(func: Any, args: Any, kwargs: Any, result: Any, made: Sequence[Tensor]) -> Work:
    """Return what a call does; of one that only makes a view, or memory without values, nothing.

    Args:
        made: the tensors of its result.
    """
    made = made or _written(func, args, kwargs)
    elements = sum(tensor.numel() for tensor in made)
    if not elements or "empty" in func.__name__ or (is_view(func) and not func._schema.is_mutable):
        return NOTHING
    read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    if known is not None:
        count = float(known(*args, **kwargs, out_val=result))
    else:
        count = operations(func, [tuple(tensor.shape) for tensor in read], elements)
    return Work(count, float(sum(map(_bytes, read))), float(sum(map(_bytes, made))), made[0].dtype)


def operator_name(func: Any, work: Work) -> str:
    """Return the name under which a device profile has the points of an operator."""
    return f"{func} {str(work.dtype).removeprefix('torch.')}"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator without a result writes, such as those of `_foreach_copy_`."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | {**kwargs}
    written = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return what of a tensor is moved: an expanded one has less memory than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


ACTIVATIONS, RECOMPUTED, BACKWARD = "activations", "recompute", "backward"
MESSAGES, GRADIENTS, OPTIMIZER, HOST = "messages", "gradients", "optimizer", "host"
"""What memory is for: values of the forward pass, of its second run, and of the backward pass; what is sent or
received, gathered parameters too; gradients of parameters; values of the optimizer's step; what lies on the host."""
BETWEEN_STAGES = ("send", "receive")


@dataclass(frozen=True)
class Span:
    """Something that takes time."""

    name: str
    begin_s: float
    end_s: float
    is_message: bool
    phase: str
    nbytes: int = 0
    """Of a message, on this rank."""
    ranks: tuple[int, ...] = ()
    """That exchange the message; of one between two stages, all of the line."""


@dataclass
class Memory:
    """Bytes over time, as a list of changes."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """(storage, bytes more or less) in order"""
    kinds: dict[int, str] = field(default_factory=dict)
    """storage -> what it is for"""
    held: dict[int, int] = field(default_factory=dict)
    """storage -> its bytes now"""
    now: int = 0
    peak: int = 0
    peak_at: int = 0
    """Number of changes before it."""

    def change(self, storage: int, nbytes: int) -> None:
        """Count bytes."""
        self.changes.append((storage, nbytes))
        self.held[storage] = self.held.get(storage, 0) + nbytes
        self.now += nbytes
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, len(self.changes)

    def at_peak(self) -> dict[str, int]:
        """Return the bytes at the peak by what they are for."""
        found: dict[str, int] = {}
        for storage, nbytes in self.changes[: self.peak_at]:
            kind = self.kinds[storage]
            found[kind] = found.get(kind, 0) + nbytes
        return {kind: size for kind, size in found.items() if size}


class Recording(TorchDispatchMode):
    """Records what runs under it. Put it inside a FakeTensorMode.

    Args:
        device: prices every operator and message.
        given: tensors that are there before; they are not counted.
        beside: operations that the device does beside its operators although the program waits for them: it only
            makes streams wait.
        around_s: what the program itself takes for every message.
    """

    def __init__(
        self, device: DeviceProfile, given: Sequence[Tensor], beside: Collection[str] = (), around_s: float = 0.0
    ) -> None:
        super().__init__()
        self._around_s = around_s
        self._beside = beside
        self.device = device
        self.memory = Memory()
        self.spans: list[Span] = []
        self.clock_s = 0.0
        self.phase = ACTIVATIONS
        self._wire_s = 0.0
        self._numbers: dict[int, int] = {}
        """address of a living storage -> its number"""
        self._given = {tensor.untyped_storage()._cdata: tensor for tensor in given}
        self._sent: list[float] = []
        """when the messages of the newest collectives arrive, until somebody holds them"""
        self._arrivals: weakref.WeakKeyDictionary[TensorFuture, float] = weakref.WeakKeyDictionary()
        self._groups: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Let what is made inside be for something else."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(resize)  # type: ignore[method-assign]
        transfers.on_message.append(self._hold)
        transfers.on_wait.append(self._wait)
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            transfers.on_message.remove(self._hold)
            transfers.on_wait.remove(self._wait)

    def kind_of(self, tensors: Sequence[Tensor], kind: str) -> None:
        """Say what the memory of tensors is for."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.memory.kinds[number] = kind

    def seconds(self, *, messages: bool) -> float:
        """Return how long all messages, or all operators, take one after the other."""
        return sum(span.end_s - span.begin_s for span in self.spans if span.is_message is messages)

    def finish(self) -> None:
        """Let the step end when its last message has arrived."""
        self.clock_s = max(self.clock_s, self._wire_s)

    # -- what torch calls ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._message(func, args)
            return result
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._add(tensor)
        self._compute(func, args, kwargs, result, made)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any, made: Sequence[Tensor]) -> None:
        work = work_of(func, args, kwargs, result, made)
        if work.launches:
            seconds = operator_seconds(operator_name(func, work), work, self.device)
            self._take(func.__name__, seconds)

    def _take(self, name: str, seconds: float) -> None:
        if seconds:
            self.spans.append(Span(name, self.clock_s, self.clock_s + seconds, is_message=False, phase=self.phase))
            self.clock_s += seconds

    def _message(self, func: Any, args: Any) -> None:
        found = message_of(func, args)
        if found is None:
            return
        name, nbytes = found
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._add(tensor)
        self.kind_of(tensors, MESSAGES)
        ranks = self._ranks(
            next(dist.ProcessGroup.unbox(leaf) for leaf in args if isinstance(leaf, torch.ScriptObject))
        )
        link = self.device.in_host if self._is_inside(ranks) else self.device.between_hosts
        seconds = measured_collective_seconds(name, nbytes, len(ranks), link, self.device)
        if name in BETWEEN_STAGES:  # what a stage waits for only the whole schedule tells
            self.spans.append(self._sending(name, self.clock_s, self.clock_s, nbytes, ranks))
            return
        self._take("around a message", self._around_s)
        begin = max(self.clock_s, self._wire_s)
        self._wire_s = begin + seconds
        self._sent.append(self._wire_s)
        if _is_waited_for(func, args) and name not in self._beside:
            self.clock_s = self._wire_s
        self.spans.append(self._sending(name, begin, self._wire_s, nbytes, ranks))

    def _sending(self, name: str, begin_s: float, end_s: float, nbytes: int, ranks: tuple[int, ...]) -> Span:
        return Span(name, begin_s, end_s, is_message=True, phase=self.phase, nbytes=nbytes, ranks=ranks)

    def _ranks(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = tuple(dist.get_process_group_ranks(group))
        return self._groups[name]

    def _is_inside(self, ranks: Sequence[int]) -> bool:
        return min(ranks) // self.device.devices_per_host == max(ranks) // self.device.devices_per_host

    # -- messages on their way ----------------------------------------------------------------------------------

    def _hold(self, message: TensorFuture) -> None:
        if self._sent:
            self._arrivals[message] = max(self._sent)
            self._sent.clear()

    def _wait(self, message: TensorFuture) -> None:
        self.clock_s = max(self.clock_s, self._arrivals.get(message, 0.0))

    # -- memory -------------------------------------------------------------------------------------------------

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers or key in self._given:
            return
        number = len(self.memory.kinds)
        self._numbers[key] = number
        self.memory.kinds[number] = self.phase
        self.memory.change(number, storage.nbytes())
        weakref.finalize(storage, self._remove, key, number).atexit = False

    def _remove(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self.memory.change(number, -self.memory.held[number])

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            number = self._numbers.get(storage._cdata)
            if number is not None:
                self.memory.change(number, storage.nbytes() - before)
            return result

        return resized


def _is_waited_for(func: Any, args: Sequence[Any]) -> bool:
    """Return whether torch waits for a collective before it returns to its caller (`async_op=False`)."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    return not given.get("async_op", True)
