"""Transforms of any column under MindSpore's paths; see `msrun.runtime.data.transforms`."""

from __future__ import annotations

from msrun.runtime.data.transforms import OneHot, TypeCast

__all__ = ["OneHot", "TypeCast"]
