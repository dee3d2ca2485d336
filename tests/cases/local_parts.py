"""This rank's part of a parameter, a gradient or a state, however it is cut."""

from __future__ import annotations

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds as an ordinary tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
