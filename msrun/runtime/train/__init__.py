"""Model and its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.runtime.public_names import loader, names_below

__all__ = sorted(names_below(__name__))

if TYPE_CHECKING:
    from msrun.runtime.train.callbacks import Callback as Callback
    from msrun.runtime.train.callbacks import CheckpointConfig as CheckpointConfig
    from msrun.runtime.train.callbacks import EarlyStopping as EarlyStopping
    from msrun.runtime.train.callbacks import LearningRateScheduler as LearningRateScheduler
    from msrun.runtime.train.callbacks import LossMonitor as LossMonitor
    from msrun.runtime.train.callbacks import ModelCheckpoint as ModelCheckpoint
    from msrun.runtime.train.callbacks import OnRequestExit as OnRequestExit
    from msrun.runtime.train.callbacks import TimeMonitor as TimeMonitor
    from msrun.runtime.train.metrics import Accuracy as Accuracy
    from msrun.runtime.train.metrics import Loss as Loss
    from msrun.runtime.train.metrics import Metric as Metric
    from msrun.runtime.train.metrics import Top1CategoricalAccuracy as Top1CategoricalAccuracy
    from msrun.runtime.train.metrics import Top5CategoricalAccuracy as Top5CategoricalAccuracy
    from msrun.runtime.train.metrics import TopKCategoricalAccuracy as TopKCategoricalAccuracy
    from msrun.runtime.train.model import Model as Model
    from msrun.runtime.train.records import CSVLogger as CSVLogger
    from msrun.runtime.train.records import JSONLogger as JSONLogger
    from msrun.runtime.train.records import MetricsLogger as MetricsLogger
    from msrun.runtime.train.records import TensorBoardLogger as TensorBoardLogger
    from msrun.runtime.train.run_context import RunContext as RunContext

__getattr__ = loader(__name__)


def __dir__() -> list[str]:
    return __all__
