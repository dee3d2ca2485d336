"""Where the public names of the runtime are, and how a package loads those below it on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

HOMES = {
    "world": "init release is_initialized device get_local_rank get_local_rank_size",
    "groups": (
        "create_group destroy_group get_process_group_ranks get_world_rank_from_group_rank "
        "get_group_rank_from_world_rank process_group get_rank get_group_size"
    ),
    "parallel.auto_parallel": "AutoParallel",
    "parallel.plan": "ParallelPlan",
    "cost.devices": "DeviceProfile",
    "parallel.verification.report": "VerificationReport",
    "parallel.batch.divided_batch": "MicroBatchInterleaved GradAccumulation",
    "parallel.recomputation": "recompute",
    "parallel.host_operators": "set_target",
    "parallel.pipeline.pipeline": "Pipeline",
    "parallel.gradient": "value_and_grad",
    "parallel.given_strategies": "shard parallelize",
    "parallel.experts": "expert_load",
    "parallel.clip": "clip_grad_norm_ clip_by_global_norm",
    "parallel.context": "ParallelMode set_auto_parallel_context get_auto_parallel_context reset_auto_parallel_context",
    "parallel.modes.own_gradients": "layerwise_parallel",
    "parallel.communication": "all_reduce all_gather reduce_scatter broadcast all_to_all",
    "sharding.named_layout": "Layout",
    "parallel.degrees": "Degrees",
    "parallel.found_degrees": "FoundDegrees search_degrees",
    "parallel.parameters.fusion": "set_comm_fusion",
    "parallel.parameters.layouts": "ParameterLayout find_layouts",
    "parallel.parameters.whole": "whole_parameters",
    "parallel.strategy_file": "read_strategy merge_pipeline_strategys rank_list_for_transform restore_group_info_list",
    "nn.deferred_init": "no_init_parameters init_parameters",
    "embedding.lookup": "EmbeddingLookup",
    "nn.with_loss": "SoftmaxCrossEntropyExpand WithLoss",
    "checkpoint.save": "save_checkpoint",
    "checkpoint.load": "load_checkpoint latest_checkpoint load_param_into_net load_distributed_checkpoint",
    "checkpoint.transform": (
        "transform_checkpoints transform_checkpoint_by_rank merge_sliced_parameter export_checkpoint"
    ),
    "simulate.calibration": "calibrate",
    "progress": "report_progress",
}
"""Module below msrun.runtime -> its public names."""

HOMES_BESIDE = {
    "train.callbacks": (
        "Callback LossMonitor TimeMonitor EarlyStopping LearningRateScheduler OnRequestExit ModelCheckpoint "
        "CheckpointConfig"
    ),
    "train.model": (
        "Model Metric Accuracy TopKCategoricalAccuracy Top1CategoricalAccuracy Top5CategoricalAccuracy AUC Loss"
    ),
    "train.run_context": "RunContext",
    "train.records": "MetricsLogger CSVLogger JSONLogger TensorBoardLogger",
    "server.parameters": "set_ps_context get_ps_context reset_ps_context set_param_ps",
}
"""Module in a room beside the runtime -> those of its names that are public in the runtime, too."""


def names_below(package: str) -> dict[str, str]:
    """Return name -> module for what is public in the modules of a package.

    Args:
        package: `msrun.runtime`, which has the names of the rooms beside it too; a package in it such as
            `msrun.runtime.nn`; or one beside it, `msrun.train`.
    """
    below = {f"msrun.runtime.{home}": names for home, names in HOMES.items()}
    beside = {f"msrun.{home}": names for home, names in HOMES_BESIDE.items()}
    found = {
        home: names
        for home, names in (below | beside).items()
        if home.startswith(f"{package}.") or (package == "msrun.runtime" and home in beside)
    }
    return {name: home for home, names in found.items() for name in names.split()}


def loader(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it imports the module of a public name when the name is first used.

    Raises, when called:
        AttributeError: another name.
    """
    modules = names_below(package)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no name {name!r}; its names are {', '.join(sorted(modules))}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
