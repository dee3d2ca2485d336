"""Model, callbacks, metrics and checkpoints under MindSpore's paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msrun.errors import UsageError, near_miss
from msrun.mindspore.missing import missing_name
from msrun.mindspore.ops.table import note_once
from msrun.runtime import (
    Accuracy,
    Callback,
    CheckpointConfig,
    EarlyStopping,
    LearningRateScheduler,
    Loss,
    LossMonitor,
    Metric,
    ModelCheckpoint,
    OnRequestExit,
    RunContext,
    TimeMonitor,
    Top1CategoricalAccuracy,
    Top5CategoricalAccuracy,
    TopKCategoricalAccuracy,
    export_checkpoint,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    merge_pipeline_strategys,
    merge_sliced_parameter,
    rank_list_for_transform,
    restore_group_info_list,
    save_checkpoint,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from msrun.runtime import Model as _Model

__all__ = [
    "Accuracy",
    "Callback",
    "CheckpointConfig",
    "EarlyStopping",
    "LearningRateScheduler",
    "Loss",
    "LossMonitor",
    "Metric",
    "Model",
    "ModelCheckpoint",
    "OnRequestExit",
    "RunContext",
    "TimeMonitor",
    "Top1CategoricalAccuracy",
    "Top5CategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "export",
    "export_checkpoint",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "load_param_into_net",
    "merge_pipeline_strategys",
    "merge_sliced_parameter",
    "rank_list_for_transform",
    "restore_group_info_list",
    "save_checkpoint",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
]


class Model(_Model):
    """`msrun.runtime.Model` with MindSpore's further arguments.

    Args:
        amp_level: also "O3": the whole network computes in float16.
        boost_level: "O0".
        words: `loss_scale_manager`: of a network in float32 a loss scale changes no gradient, so that it is noted;
            with amp_level O1, O2 or auto the loss scale is dynamic. `keep_batchnorm_fp32` is noted.

    Raises:
        UsageError: an unknown word.
    """

    def __init__(
        self,
        network: Any,
        loss_fn: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        eval_network: Any = None,
        eval_indexes: Any = None,
        amp_level: str = "O0",
        boost_level: str = "O0",
        **words: Any,
    ) -> None:
        known = ("loss_scale_manager", "keep_batchnorm_fp32", "acc_level")
        for word in words:
            if word not in known:
                raise UsageError(f"Model({word}=...): unknown word{near_miss(word, known)}")
            note_once(f"Model({word}=...)")
        if boost_level != "O0":
            note_once(f"Model(boost_level={boost_level!r})")
        if amp_level == "O3" and hasattr(network, "to_float"):
            network.to_float(torch.float16)
            amp_level = "O0"
        super().__init__(network, loss_fn, optimizer, metrics, eval_network, eval_indexes, amp_level)


def export(net: nn.Module, *inputs: Any, file_name: str, file_format: str = "MINDIR", **settings: Any) -> None:
    """Write a network as a program of torch.export, FILE_NAME.pt2: `torch.export.load(path).module()` runs it.

    Args:
        inputs: what it is called with: shapes and types count.
        file_format: "MINDIR" and "AIR" are MindSpore's own and become .pt2 with a note; "ONNX" needs the package onnx.

    Raises:
        UsageError: another format, or ONNX without its package.
    """
    del settings
    path = Path(os.fspath(file_name))
    was_training = net.training
    net.eval()
    try:
        if file_format.upper() == "ONNX":
            try:
                torch.onnx.export(net, tuple(inputs), str(path.with_suffix(".onnx")))
            except ImportError as error:
                raise UsageError(f"export(file_format='ONNX'): {error}; pip install onnx onnxscript") from None
            return
        if file_format.upper() not in ("MINDIR", "AIR", "PT2"):
            raise UsageError(f"export(file_format={file_format!r}): one of MINDIR, ONNX")
        if file_format.upper() != "PT2":
            note_once(f"export(file_format={file_format!r}): a program of torch.export (.pt2) is written; the format")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(torch.export.export(net, tuple(inputs)), path.with_suffix(".pt2"))
    finally:
        net.train(was_training)


def connect_network_with_dataset(network: Any, dataset_helper: Any) -> Any:
    """Return the network: a data set is read by whoever iterates it."""
    del dataset_helper
    return network


def get_metric_fn(name: str, *args: Any, **settings: Any) -> Metric:
    """Return a new metric by its name in MindSpore.

    Raises:
        UsageError: an unknown name.
    """
    known: dict[str, Any] = {"accuracy": Accuracy, "loss": Loss, "top_1_accuracy": Top1CategoricalAccuracy}
    known |= {"top_5_accuracy": Top5CategoricalAccuracy, "acc": Accuracy}
    if name not in known:
        raise UsageError(f"get_metric_fn({name!r}): unknown{near_miss(name, known)}; one of {', '.join(known)}")
    return known[name](*args, **settings)


class History(Callback):
    """What each epoch returned, in `epoch` and `history`."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch: dict[str, list[int]] = {"epoch": []}
        self.history: dict[str, list[Any]] = {"net_output": []}

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Keep the loss."""
        params = run_context.original_args()
        self.epoch["epoch"].append(params.cur_epoch_num)
        self.history["net_output"].append(float(params.net_outputs))


def __getattr__(name: str) -> Any:
    raise missing_name("train", name, __all__)
