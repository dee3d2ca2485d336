"""What torch asks of a process group that is written in Python, beside its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.shm.work import ShmWork

_ProcessGroup: Any = dist.ProcessGroup
"""torch declares forms of its methods that only its own classes have."""

_UNSET = timedelta(0)
"""torch's options have a negative time-out where none is given."""


class TorchGroup(_ProcessGroup):
    """A group of ranks whose tensors are on the CPU."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout_s = timeout.total_seconds()
        self._coalesced: list[Any] | None = None
        self._own_name, self._own_description = "", ""

    def name(self) -> str:
        """Return what torch calls it."""
        return "shm"

    getBackendName = name  # noqa: N815 - torch's name

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

    _set_group_name = setGroupName

    def _set_group_desc(self, text: str) -> None:
        self._own_description = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> TorchGroup:  # noqa: ARG002 - torch's form
        return self

    @property
    def supports_splitting(self) -> bool:
        """No: torch makes sub-groups as new ones."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _work(
        self, line: Any, made: Sequence[Any], values: Sequence[Value], opts: Any, then: Callable[[], None] | None = None
    ) -> ShmWork:
        """Return what torch waits for, as long as its options say; when it is done, `then` is called, and copies are
        written back."""
        given = getattr(opts, "timeout", None)
        most_s = given.total_seconds() if given is not None and given > _UNSET else self._timeout_s
        copied = [value for value in values if value.is_copy]
        finish = partial(_finish, then, copied) if copied or then is not None else None
        work = ShmWork(line, made, [value.tensor for value in values], most_s, finish)
        self._note(work)
        return work

    def _note(self, work: Any) -> None:
        if self._coalesced is not None:
            self._coalesced.append(work)

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002 - torch's form
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:  # noqa: ARG002 - torch's form
        works, self._coalesced = self._coalesced or [], None
        return Works(works)


_OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
"""What torch before 2.13 calls, and what it is called now."""


def _renamed(name: str) -> Callable[..., Any]:
    return lambda group, *words: getattr(group, name)(*words)


for _old, _new in _OLD_NAMES.items():
    setattr(TorchGroup, _old, _renamed(_new))


def _finish(then: Callable[[], None] | None, copied: Sequence[Value]) -> None:
    if then is not None:
        then()
    for value in copied:
        value.write_back()


class Works(dist.Work):
    """Several works, waited for together; then copies are written back."""

    def __init__(self, works: Sequence[Any], copied: Sequence[Value] = ()) -> None:
        super().__init__()
        self._works, self._copied = works, copied

    def _write_back(self) -> bool:
        copied, self._copied = self._copied, ()
        _finish(None, copied)
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        words = () if timeout is None else (timeout,)
        return all(work.wait(*words) for work in self._works) and self._write_back()

    def is_completed(self) -> bool:
        """Return whether all are done."""
        return all(work.is_completed() for work in self._works) and self._write_back()


class Value:
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
        row = self.flat.as_strided(self.flat.shape, (1,))  # one number lies in a row whatever its stride
        return row.view(torch.uint8) if row.dtype != torch.uint8 else row

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


def listed(tensors: Any) -> list[Tensor]:
    """Return tensors that torch gives as one or as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
