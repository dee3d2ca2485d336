"""Transforms of any column under MindSpore's paths; see `msrun.data.transforms`."""

from __future__ import annotations

from typing import Any

from msrun.data.transforms import OneHot, TypeCast
from msrun.mindspore.missing import missing_names

__all__ = ["Compose", "OneHot", "TypeCast"]
__getattr__ = missing_names("dataset.transforms", __all__)


class Compose:
    """Several transforms as one: each gets what the one before it has given."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, *columns: Any) -> Any:
        for transform in self.transforms:
            result = transform(*columns)
            columns = result if isinstance(result, tuple) else (result,)
        return columns[0] if len(columns) == 1 else columns
