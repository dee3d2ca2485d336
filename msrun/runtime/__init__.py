"""What runs inside a worker: the parallel-training runtime. One flat namespace, loaded on first use.

    from msrun.runtime import init, AutoParallel, MicroBatchInterleaved, Model, LossMonitor, no_init_parameters

`msrun.runtime.optim` and `.data` hold optimizers and datasets; `.nn`, `.parallel`, `.simulate` and `.train` the names
of this one that are defined there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from msrun.runtime.public_names import names_below
from msrun.runtime.requirements import require_packages

_MODULES = names_below(__name__)
_ROOMS = {"data": "msrun", "train": "msrun"} | dict.fromkeys(("nn", "optim", "parallel", "simulate"), __name__)

__all__ = sorted(_MODULES)  # the rooms stay out: `import *` must not hide torch.nn or torch.optim

require_packages()

if TYPE_CHECKING:
    from msrun.runtime.checkpoint.load import latest_checkpoint as latest_checkpoint
    from msrun.runtime.checkpoint.load import load_checkpoint as load_checkpoint
    from msrun.runtime.checkpoint.load import load_distributed_checkpoint as load_distributed_checkpoint
    from msrun.runtime.checkpoint.load import load_param_into_net as load_param_into_net
    from msrun.runtime.checkpoint.save import save_checkpoint as save_checkpoint
    from msrun.runtime.checkpoint.transform import export_checkpoint as export_checkpoint
    from msrun.runtime.checkpoint.transform import merge_sliced_parameter as merge_sliced_parameter
    from msrun.runtime.checkpoint.transform import transform_checkpoint_by_rank as transform_checkpoint_by_rank
    from msrun.runtime.checkpoint.transform import transform_checkpoints as transform_checkpoints
    from msrun.runtime.cost.devices import DeviceProfile as DeviceProfile
    from msrun.runtime.embedding.lookup import EmbeddingLookup as EmbeddingLookup
    from msrun.runtime.groups import (
        create_group as create_group,
    )
    from msrun.runtime.groups import (
        destroy_group as destroy_group,
    )
    from msrun.runtime.groups import (
        get_group_rank_from_world_rank as get_group_rank_from_world_rank,
    )
    from msrun.runtime.groups import (
        get_process_group_ranks as get_process_group_ranks,
    )
    from msrun.runtime.groups import (
        get_world_rank_from_group_rank as get_world_rank_from_group_rank,
    )
    from msrun.runtime.groups import (
        process_group as process_group,
    )
    from msrun.runtime.nn.deferred_init import init_parameters as init_parameters
    from msrun.runtime.nn.deferred_init import no_init_parameters as no_init_parameters
    from msrun.runtime.nn.with_loss import SoftmaxCrossEntropyExpand as SoftmaxCrossEntropyExpand
    from msrun.runtime.nn.with_loss import WithLoss as WithLoss
    from msrun.runtime.parallel.auto_parallel import AutoParallel as AutoParallel
    from msrun.runtime.parallel.batch.divided_batch import GradAccumulation as GradAccumulation
    from msrun.runtime.parallel.batch.divided_batch import MicroBatchInterleaved as MicroBatchInterleaved
    from msrun.runtime.parallel.clip import clip_by_global_norm as clip_by_global_norm
    from msrun.runtime.parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from msrun.runtime.parallel.communication import all_gather as all_gather
    from msrun.runtime.parallel.communication import all_reduce as all_reduce
    from msrun.runtime.parallel.communication import all_to_all as all_to_all
    from msrun.runtime.parallel.communication import broadcast as broadcast
    from msrun.runtime.parallel.communication import reduce_scatter as reduce_scatter
    from msrun.runtime.parallel.context import ParallelMode as ParallelMode
    from msrun.runtime.parallel.context import get_auto_parallel_context as get_auto_parallel_context
    from msrun.runtime.parallel.context import reset_auto_parallel_context as reset_auto_parallel_context
    from msrun.runtime.parallel.context import set_auto_parallel_context as set_auto_parallel_context
    from msrun.runtime.parallel.experts import expert_load as expert_load
    from msrun.runtime.parallel.given_strategies import parallelize as parallelize
    from msrun.runtime.parallel.given_strategies import shard as shard
    from msrun.runtime.parallel.gradient import value_and_grad as value_and_grad
    from msrun.runtime.parallel.host_operators import set_target as set_target
    from msrun.runtime.parallel.modes.own_gradients import layerwise_parallel as layerwise_parallel
    from msrun.runtime.parallel.parameters.fusion import set_comm_fusion as set_comm_fusion
    from msrun.runtime.parallel.parameters.layouts import ParameterLayout as ParameterLayout
    from msrun.runtime.parallel.parameters.layouts import find_layouts as find_layouts
    from msrun.runtime.parallel.parameters.whole import whole_parameters as whole_parameters
    from msrun.runtime.parallel.pipeline.pipeline import Pipeline as Pipeline
    from msrun.runtime.parallel.plan import ParallelPlan as ParallelPlan
    from msrun.runtime.parallel.recomputation import recompute as recompute
    from msrun.runtime.parallel.strategy_file import merge_pipeline_strategys as merge_pipeline_strategys
    from msrun.runtime.parallel.strategy_file import rank_list_for_transform as rank_list_for_transform
    from msrun.runtime.parallel.strategy_file import read_strategy as read_strategy
    from msrun.runtime.parallel.strategy_file import restore_group_info_list as restore_group_info_list
    from msrun.runtime.parallel.verification.report import VerificationReport as VerificationReport
    from msrun.runtime.progress import report_progress as report_progress
    from msrun.runtime.sharding.named_layout import Layout as Layout
    from msrun.runtime.simulate.calibration import calibrate as calibrate
    from msrun.runtime.world import (
        device as device,
    )
    from msrun.runtime.world import (
        get_group_size as get_group_size,
    )
    from msrun.runtime.world import (
        get_local_rank as get_local_rank,
    )
    from msrun.runtime.world import (
        get_local_rank_size as get_local_rank_size,
    )
    from msrun.runtime.world import (
        get_rank as get_rank,
    )
    from msrun.runtime.world import (
        init as init,
    )
    from msrun.runtime.world import (
        is_initialized as is_initialized,
    )
    from msrun.runtime.world import (
        release as release,
    )
    from msrun.server.parameters import get_ps_context as get_ps_context
    from msrun.server.parameters import reset_ps_context as reset_ps_context
    from msrun.server.parameters import set_param_ps as set_param_ps
    from msrun.server.parameters import set_ps_context as set_ps_context
    from msrun.train.callbacks import Callback as Callback
    from msrun.train.callbacks import CheckpointConfig as CheckpointConfig
    from msrun.train.callbacks import EarlyStopping as EarlyStopping
    from msrun.train.callbacks import LearningRateScheduler as LearningRateScheduler
    from msrun.train.callbacks import LossMonitor as LossMonitor
    from msrun.train.callbacks import ModelCheckpoint as ModelCheckpoint
    from msrun.train.callbacks import OnRequestExit as OnRequestExit
    from msrun.train.callbacks import TimeMonitor as TimeMonitor
    from msrun.train.model import AUC as AUC
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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in _ROOMS:
        value = importlib.import_module(f"{_ROOMS[name]}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no name {name!r}; its names are {', '.join(__dir__())}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
