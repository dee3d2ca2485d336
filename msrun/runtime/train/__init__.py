"""Model and its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.runtime.public_names import loader, names_below

__all__ = sorted(names_below(__name__))

if TYPE_CHECKING:
    from msrun.runtime.train.callbacks import Callback as Callback
    from msrun.runtime.train.callbacks import LossMonitor as LossMonitor
    from msrun.runtime.train.callbacks import RunContext as RunContext
    from msrun.runtime.train.model import Model as Model
    from msrun.runtime.train.records import CSVLogger as CSVLogger
    from msrun.runtime.train.records import JSONLogger as JSONLogger
    from msrun.runtime.train.records import MetricsLogger as MetricsLogger
    from msrun.runtime.train.records import TensorBoardLogger as TensorBoardLogger

__getattr__ = loader(__name__)


def __dir__() -> list[str]:
    return __all__
