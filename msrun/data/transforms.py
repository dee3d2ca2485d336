"""Transforms of any column, with MindSpore's names. Each works on a batch, or on one sample when called."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from msrun.data.config import parse_count
from msrun.data.source import Transform
from msrun.errors import UsageError

_NUMBER_KINDS = "biufc"


class TypeCast(Transform):
    """Cast to `dtype`, a torch dtype, a numpy dtype or its name; the shape stays.

    Raises:
        UsageError: no such dtype, or one that numpy does not have (bfloat16, float8).
    """

    def __init__(self, dtype: Any) -> None:
        self._dtype = _parse_dtype(dtype)

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        return batch.astype(self._dtype, copy=False)


class OneHot(Transform):
    """Integer labels (N,) -> (N, num_classes) of the same dtype, 1 at the label and 0 elsewhere.

    Raises:
        UsageError: `num_classes` is below 1, or (when applied) a label is no integer or not in 0..num_classes-1.
    """

    def __init__(self, num_classes: int) -> None:
        self._num_classes = parse_count("OneHot: num_classes", num_classes, minimum=1)

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        if not np.issubdtype(batch.dtype, np.integer):
            raise UsageError(f"OneHot: labels have dtype {batch.dtype}; cast them to an integer type first")
        is_outside = (batch < 0) | (batch >= self._num_classes)
        if is_outside.any():
            raise UsageError(
                f"OneHot: label {batch[is_outside].flat[0]} with num_classes={self._num_classes}; labels must be in "
                f"0..{self._num_classes - 1}"
            )
        return (batch[..., None] == np.arange(self._num_classes)).astype(batch.dtype)


def _parse_dtype(dtype: Any) -> np.dtype:
    try:
        if isinstance(dtype, torch.dtype):
            parsed = torch.empty(0, dtype=dtype).numpy().dtype
        else:
            parsed = np.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or parsed.kind not in _NUMBER_KINDS:
        raise UsageError(
            f"TypeCast: {dtype!r} is no type of number that numpy has; use one like torch.float32, torch.int32 or "
            "numpy.int64, and cast further on the device"
        )
    return parsed
