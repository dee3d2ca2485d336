"""Transforms of any column under MindSpore's paths; see `msrun.runtime.data.transforms`."""

from __future__ import annotations

from typing import Any

from msrun.mindspore.missing import missing_name
from msrun.runtime.data.transforms import OneHot, TypeCast

__all__ = ["OneHot", "TypeCast"]


def __getattr__(name: str) -> Any:
    raise missing_name("dataset.transforms", name, __all__)
