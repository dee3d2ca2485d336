"""Messages between the stages of a pipeline: started now, waited for later, counted."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.execute.tensor_future import TensorFuture
from msrun.runtime.execute.traffic import traffic
from msrun.runtime.progress import waiting_in


def start_send(value: Tensor, to_rank: int, group: dist.ProcessGroup, what: Callable[[], str]) -> TensorFuture:
    """Send a tensor to one rank of the group. Nobody may write to it before `wait` has returned.

    Args:
        to_rank: world rank.
        what: name of the message, for whoever asks what this rank waits for.
    """
    traffic.add("send", value)
    value = value.contiguous()

    def describe() -> str:
        return f"send of {what()} to rank {to_rank}"

    with waiting_in(describe):  # the first message between two ranks waits for the other one
        work = dist.isend(value, to_rank, group=group)
    return _Message(value, work, describe)


def start_receive(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    from_rank: int,
    group: dist.ProcessGroup,
    what: Callable[[], str],
) -> TensorFuture:
    """Receive a tensor of known shape from one rank of the group.

    Args:
        from_rank: world rank.
        what: name of the message.
    """
    value = torch.empty(shape, dtype=dtype, device=device)
    traffic.add("receive", value)

    def describe() -> str:
        return f"receive of {what()} from rank {from_rank}"

    with waiting_in(describe):
        work = dist.irecv(value, from_rank, group=group)
    return _Message(value, work, describe)


class _Message(TensorFuture):
    """A message whose name is made only when somebody waits for it."""

    def __init__(self, value: Tensor, work: dist.Work | None, describe: Callable[[], str]) -> None:
        super().__init__(value, work)
        self._describe_message = describe

    def _wait_for_work(self, work: dist.Work) -> None:
        work.wait()  # gloo gives a message up for good when a wait for it times out

    def _describe(self) -> str:
        return self._describe_message()
