"""Tensors in memory as a source to read from: a dict, or a file that torch.load maps into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.runtime.checkpoint.tensor_key import TensorKey
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.box import Box, whole


class DictTensors:
    """Reads tensors, and parts of them, from tensors.

    Args:
        path: where they come from, for messages.
        tensors: whole ones, but for those of `boxes`.
        boxes: which parts they are.
    """

    def __init__(
        self, path: Path, tensors: Mapping[TensorKey, Tensor], boxes: Mapping[TensorKey, Box] | None = None
    ) -> None:
        self.path = path
        self._tensors = {
            key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in tensors.items()
        }
        self._boxes = {key: whole(value.shape) for key, value in self._tensors.items()} | dict(boxes or {})
        self.keys: list[TensorKey] = list(tensors)

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._boxes[key].shape

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._tensors[key].dtype

    def boxes(self, key: TensorKey) -> list[Box]:
        """Return the part that is there."""
        return [self._boxes[key]]

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""
        for key, part in parts.items():
            value = self._tensors[key].detach()[part.box.slices_in(self._boxes[key])]
            part.tensor.detach().copy_(value)


def is_tensors(value: Any) -> bool:
    """Return whether something is a dict of names and tensors, as state_dict returns."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )
