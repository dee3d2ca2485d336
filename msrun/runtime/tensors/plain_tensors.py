"""Plain tensors: what the runtime computes with, past the checks that a user's hands on a cut parameter meet."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""`with plain_tensors():` subclasses of Tensor behave as the tensors that they are; a test looks after this name."""


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's memory on this rank as an ordinary tensor without a graph."""
    with plain_tensors():
        return tensor.detach()


def local_part(tensor: Tensor) -> Tensor:
    """Return the same of this rank's part, if the tensor is a DTensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else plain(tensor)
