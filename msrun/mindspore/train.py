"""Model, callbacks, metrics and checkpoints under MindSpore's paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.context import ParallelMode  # noqa: F401 - mindspore.train.model.ParallelMode
from msrun.mindspore.import_paths import take_names
from msrun.mindspore.metrics import *  # noqa: F403
from msrun.mindspore.metrics import METRICS, get_metric_fn
from msrun.mindspore.missing import missing_names
from msrun.mindspore.ops.table import note_once, taking
from msrun.mindspore.tensor import Parameter
from msrun.runtime import Callback, RunContext
from msrun.runtime import Model as _Model
from msrun.runtime import load_checkpoint as _load_checkpoint
from msrun.runtime import save_checkpoint as _save_checkpoint
from msrun.runtime.nn.with_loss import WithLoss
from msrun.runtime.parallel.placed_cells import SharedBatches, is_placed, share_batch, share_values

_OF_RUNTIME = """
CheckpointConfig EarlyStopping LearningRateScheduler LossMonitor ModelCheckpoint OnRequestExit TimeMonitor
export_checkpoint load_distributed_checkpoint load_param_into_net merge_pipeline_strategys merge_sliced_parameter
rank_list_for_transform restore_group_info_list transform_checkpoint_by_rank transform_checkpoints
"""
__all__ = [
    *METRICS, *take_names(__name__, runtime, _OF_RUNTIME), "Callback", "Model", "RunContext", "data_sink", "export",
    "load_checkpoint", "save_checkpoint",
]  # fmt: skip
__getattr__ = missing_names("train", __all__)
_OF_MODEL = """
self network loss_fn=None optimizer=None metrics=None eval_network=None eval_indexes=None amp_level='O0'
boost_level='O0' loss_scale_manager=None keep_batchnorm_fp32=None acc_level=None
"""
_OF_LOAD = """
ckpt_file_name net=None strict_load=False filter_prefix=None * optimizer=None choice_func=None format='ckpt'
"""
_OF_SAVE = """
save_obj ckpt_file_name integrated_save=True async_save=False append_dict=None choice_func=None * optimizer=None
epoch_num=0 step_in_epoch=0 step_num=0
"""


class _WithLoss(WithLoss):
    """A network with its loss, of which a loss for each row becomes one number: the value is their mean, which
    LossMonitor prints, and the gradient that of their sum, as in MindSpore."""

    def forward(self, *inputs: Any) -> Any:
        """Return the loss, or what else is asked for."""
        found = super().forward(*inputs)
        if self.returns == "outputs":
            return found
        losses, *others = found if self.returns == "both" else (found,)
        if losses.dim():
            mean = losses.mean()
            losses = mean + (losses.numel() - 1) * (mean - mean.detach())
        return (losses, *others) if others else losses


class Model(_Model):
    """`msrun.runtime.Model` with MindSpore's further arguments.

    Args:
        amp_level: also "O3": the whole network computes in float16.
        boost_level: "O0".
        loss_scale_manager: of a network in float32 a loss scale changes no gradient, so that it is noted; with
            amp_level O1, O2 or auto the loss scale is dynamic. `keep_batchnorm_fp32` is noted.

    Raises:
        UsageError: an unknown word, or an optimizer whose `loss_scale` is not that of a FixedLossScaleManager that
            leaves out no step: its gradients would be off by a factor.
    """

    with_loss = _WithLoss

    @partial(taking, _OF_MODEL, owner="Model")
    def __init__(self, network: Any, metrics: Any, amp_level: str, **words: Any) -> None:
        _check_scales(words["optimizer"], words["loss_scale_manager"])
        for word in ("boost_level", "loss_scale_manager", "keep_batchnorm_fp32", "acc_level"):
            if words.pop(word) not in (None, "O0"):
                note_once(f"Model({word}=...)")
        if amp_level == "O3" and hasattr(network, "to_float"):
            network.to_float(torch.float16)
            amp_level = "O0"
        if metrics is not None and not isinstance(metrics, dict):
            names = [metrics] if isinstance(metrics, str) else sorted(metrics)
            metrics = {name: get_metric_fn(name) for name in names}
        super().__init__(network, metrics=metrics, amp_level=amp_level, **words)
        self._is_placed = is_placed(network)
        if self._is_placed:
            share_values(self.network)

    def _step(self, batch: Any, context: RunContext) -> None:
        super()._step(share_batch(batch) if self._is_placed else batch, context)

    def eval(self, valid_dataset: Any, *args: Any, **words: Any) -> dict[str, float]:
        """Return the metrics over a data set; see `msrun.runtime.Model.eval`."""
        return super().eval(SharedBatches(valid_dataset) if self._is_placed else valid_dataset, *args, **words)


def _check_scales(optimizer: Any, manager: Any) -> None:
    multiplied = 1.0 if manager is None or manager.get_drop_overflow_update() else float(manager.get_loss_scale())
    divided = float(getattr(optimizer, "loss_scale", 1.0))
    if multiplied != divided:
        raise UsageError(
            f"Model: the loss is multiplied by {multiplied:g} and the gradients are divided by {divided:g}; give the "
            "optimizer's loss_scale to FixedLossScaleManager(loss_scale, drop_overflow_update=False), or leave both out"
        )


@partial(taking, _OF_SAVE)
def save_checkpoint(save_obj: Any, ckpt_file_name: Any, choice_func: Any, **words: Any) -> Path:
    """Write a network, a list of {"name": ..., "data": ...} or a dict; see `msrun.runtime.save_checkpoint`.

    Args:
        ckpt_file_name: `.ckpt` is added where it is missing.
        choice_func: of a name: whether it is saved.
    """
    path = os.fspath(ckpt_file_name)
    path = path if path.endswith(".ckpt") or not words["integrated_save"] else f"{path}.ckpt"
    network = save_obj
    if not isinstance(save_obj, nn.Module) or choice_func is not None:
        named = save_obj.state_dict() if isinstance(save_obj, nn.Module) else save_obj
        rows = named.items() if isinstance(named, dict) else ((row["name"], row["data"]) for row in named)
        network = _as_network({name: one for name, one in rows if choice_func is None or choice_func(name)})
    return _save_checkpoint(network, path, **words)


def _as_network(tensors: dict[str, Any]) -> nn.Module:
    """Return modules that hold tensors by their dotted names."""
    network = nn.Module()
    for name, value in tensors.items():
        module, (*path, last) = network, name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_buffer(last, torch.as_tensor(value).detach())
    return network


@partial(taking, _OF_LOAD)
def load_checkpoint(
    ckpt_file_name: Any, net: Any, strict_load: bool, filter_prefix: Any, optimizer: Any, choice_func: Any, format: str
) -> dict[str, Any]:
    """Return name -> parameter of a checkpoint, without those whose name begins with a prefix; see
    `msrun.runtime.load_checkpoint`. Where training had begun, how far it was is in it too (`epoch_num`, ...).

    Args:
        choice_func: of a name: whether it is loaded.

    Raises:
        UsageError: `format` other than "ckpt".
    """
    if format != "ckpt":
        raise UsageError(f'load_checkpoint(format={format!r}): "ckpt"')
    if net is not None:
        return _load_checkpoint(ckpt_file_name, net, optimizer, strict_load=strict_load)
    found = _load_checkpoint(ckpt_file_name)
    counts = ("epoch_num", "step_in_epoch", "step_num")
    if not any(found[name] for name in counts):
        found = {name: value for name, value in found.items() if name not in counts}
    make: Any = Parameter
    spared = (filter_prefix,) if isinstance(filter_prefix, str) else tuple(filter_prefix or ())
    return {
        name: make(value, name=name) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
        if not (spared and name.startswith(spared)) and (choice_func is None or choice_func(name))
    }


def export(net: nn.Module, *inputs: Any, file_name: str, file_format: str = "MINDIR", **settings: Any) -> None:
    """Write a network as a program of torch.export, FILE_NAME.pt2: `torch.export.load(path).module()` runs it.

    Args:
        inputs: what it is called with: shapes and types count.
        file_format: "MINDIR" and "AIR" are MindSpore's own and become .pt2 with a note; "ONNX" needs the package onnx.

    Raises:
        UsageError: another format, or ONNX without its package.
    """
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


class _InternalCallbackParam(dict[str, Any]):
    """What callbacks of a loop of one's own are given: a dict whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = dict.__setitem__


def data_sink(
    fn: Any, dataset: Any, sink_size: int = 1, jit_config: Any = None, input_signature: Any = None
) -> Callable[[], Any]:
    """Return a function without arguments: `sink_size` calls of `fn`, each with the next batch. Gives the last result.

    After the last batch the data set begins again.
    """
    batches: list[Any] = [iter(())]

    def next_batch() -> Any:
        for _ in range(2):
            for batch in batches[0]:
                return batch
            batches[0] = iter(dataset.create_tuple_iterator())
        raise UsageError("data_sink: the data set has no batches")

    def run() -> Any:
        result = None
        for _ in range(sink_size):
            result = fn(*next_batch())
        return result

    return run


def connect_network_with_dataset(network: Any, dataset_helper: Any) -> Any:
    """Return the network: a data set is read by whoever iterates it."""
    return network


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
