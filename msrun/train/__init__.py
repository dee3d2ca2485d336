"""Model and its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.runtime.public_names import loader, names_below

__all__ = sorted(names_below(__name__))

if TYPE_CHECKING:
    from msrun.train.callbacks import Callback as Callback
    from msrun.train.callbacks import CheckpointConfig as CheckpointConfig
    from msrun.train.callbacks import EarlyStopping as EarlyStopping
    from msrun.train.callbacks import LearningRateScheduler as LearningRateScheduler
    from msrun.train.callbacks import LossMonitor as LossMonitor
    from msrun.train.callbacks import ModelCheckpoint as ModelCheckpoint
    from msrun.train.callbacks import OnRequestExit as OnRequestExit
    from msrun.train.callbacks import TimeMonitor as TimeMonitor
    from msrun.train.model import Accuracy as Accuracy
    from msrun.train.model import Loss as Loss
    from msrun.train.model import Metric as Metric
    from msrun.train.model import Model as Model
    from msrun.train.model import Top1CategoricalAccuracy as Top1CategoricalAccuracy
    from msrun.train.model import Top5CategoricalAccuracy as Top5CategoricalAccuracy
    from msrun.train.model import TopKCategoricalAccuracy as TopKCategoricalAccuracy
    from msrun.train.records import CSVLogger as CSVLogger
    from msrun.train.records import JSONLogger as JSONLogger
    from msrun.train.records import MetricsLogger as MetricsLogger
    from msrun.train.records import TensorBoardLogger as TensorBoardLogger
    from msrun.train.run_context import RunContext as RunContext

__getattr__ = loader(__name__)


def __dir__() -> list[str]:
    return __all__
