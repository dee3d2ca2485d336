"""StepSpec: what of a training step the decisions do not say, and its price needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from msrun.runtime.sharding.layout import Axes


@dataclass(frozen=True)
class StepSpec:
    """What of a step the decisions do not say."""

    shard_axes: Mapping[str, Axes] = field(default_factory=dict)
    """parameter -> axes by which optimizer parallel cuts its dimension 0 further"""
    regathers: bool = False
    """Cut parameters are gathered again for the backward pass: level3."""
    optimizer_states: int = 2
    """Tensors of a parameter's size that the optimizer keeps for it: 2 of Adam, 1 of SGD with momentum."""
    sums_wide: bool = True
    """Gradients of 16 bits travel in float32."""
    bucket_bytes: int | None = 25 * 2**20
    """Parameters of at most so many bytes share a message; None: no limit."""
    alone_bytes: int | None = None
    """A parameter of so many bytes shares none; None: all do."""

    def is_alone(self, nbytes: int) -> bool:
        """Return whether a parameter of so many bytes, as a rank stores it, travels alone."""
        return self.alone_bytes is not None and nbytes >= self.alone_bytes

    def summed_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """Return the bytes in which gradients of so many bytes travel."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        return 2 * nbytes if is_half and self.sums_wide else nbytes
