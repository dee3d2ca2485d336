"""The older name of `msrun.data`, with the same names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msrun.data import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module("msrun.data"), name)


def __dir__() -> list[str]:
    return dir(import_module("msrun.data"))
