"""Dry runs: a job of any size seen from one process, before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.runtime.public_names import loader, names_below

__all__ = sorted(names_below(__name__))

if TYPE_CHECKING:
    from msrun.runtime.simulate.calibration import calibrate as calibrate

__getattr__ = loader(__name__)


def __dir__() -> list[str]:
    return __all__
