"""Model: a small trainer in MindSpore's words, and its metrics, counted on every rank and added up over all of them."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.data.dataset import Dataset
from msrun.errors import ParallelError, near_miss
from msrun.runtime import progress
from msrun.runtime.nn.random_stream import put_random_state, take_random_state
from msrun.runtime.nn.with_loss import WithLoss, returning
from msrun.runtime.parallel.auto_parallel import AutoParallel
from msrun.runtime.parallel.context import has_parallel_mode
from msrun.train.callbacks import Callback
from msrun.train.run_context import (
    DataStream,
    RunContext,
    count_steps,
    find_loss,
    find_start,
    name_callbacks,
)


class Metric(ABC):
    """Base of the metrics: `clear`, then `update` with every batch, then `eval`.

    Keep what is counted in `self.sums`, name -> float64 tensor: it is added up over the ranks before `eval`. With
    samples that several ranks share (`dataset_strategy("full_batch")`) every count comes as often, so that a quotient
    of two of them is right in any case.
    """

    sums: dict[str, Tensor]

    def __init__(self) -> None:
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Begin to count."""

    @abstractmethod
    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:
        """Count one batch of this rank.

        Args:
            loss: of the batch, the mean over the samples of all ranks.
            outputs: what the network returned, (n, ...).
            label: the last of the batch's tensors, (n, ...).
        """

    @abstractmethod
    def eval(self) -> float:
        """Return the value of what was counted.

        Raises:
            ParallelError: nothing was counted.
        """

    def add_up(self) -> None:
        """Add up the counts of all ranks. All ranks call it together."""
        if dist.is_initialized():
            for name in sorted(self.sums):
                dist.all_reduce(self.sums[name])


class _Quotient(Metric):
    """Counts two sums, and is the first by the second."""

    _names = ("right", "all")

    def clear(self) -> None:
        self.sums = {name: torch.zeros((), dtype=torch.float64) for name in self._names}

    def eval(self) -> float:
        above, below = (float(self.sums[name]) for name in self._names)
        if not below:
            raise ParallelError(f"{type(self).__name__}: nothing was counted; give data with at least one batch")
        return above / below


class Accuracy(_Quotient):
    """The share of samples whose class has the highest score.

    Outputs are scores (n, classes, ...), labels class numbers (n, ...) or one-hot rows like the scores.
    """

    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:  # noqa: ARG002 - the interface of Metric
        outputs, label = _scores(type(self).__name__, outputs, label)
        self.sums["right"] += (outputs.argmax(1) == label).sum().cpu()
        self.sums["all"] += label.numel()


class TopKCategoricalAccuracy(_Quotient):
    """The share of samples whose class is among the k highest scores. Shapes as of Accuracy.

    Raises:
        ParallelError: `k` is no whole number of 1 or more, or there are fewer classes.
    """

    def __init__(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ParallelError(f"{type(self).__name__}(k={k!r}): a whole number, 1 or more")
        self._k = k
        super().__init__()

    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:  # noqa: ARG002 - the interface of Metric
        outputs, label = _scores(type(self).__name__, outputs, label)
        if outputs.shape[1] < self._k:
            raise ParallelError(f"{type(self).__name__}(k={self._k}): the scores have {outputs.shape[1]} classes")
        self.sums["right"] += (outputs.topk(self._k, 1).indices == label.unsqueeze(1)).sum().cpu()
        self.sums["all"] += label.numel()


class Top1CategoricalAccuracy(TopKCategoricalAccuracy):
    """TopKCategoricalAccuracy(1)."""

    def __init__(self) -> None:
        super().__init__(1)


class Top5CategoricalAccuracy(TopKCategoricalAccuracy):
    """TopKCategoricalAccuracy(5)."""

    def __init__(self) -> None:
        super().__init__(5)


class AUC(Metric):
    """The area under the ROC curve: how often a sample of class 1 has a higher score than one of class 0.

    Outputs are scores (n,) or (n, 1), labels 0 or 1 of the same number. Scores are counted in `BINS` equal bins of
    [0, 1]; a pair in one bin counts half, so the value is exact but for such pairs. (Hanley, McNeil 1982.)

    Args:
        from_logits: the sigmoid of the scores is counted; it keeps their order. Else they must lie in [0, 1].

    Raises:
        ParallelError: with `update`, another shape, scores outside of [0, 1] or labels that are neither 0 nor 1; with
            `eval`, only one class was counted.
    """

    BINS = 2**16

    def __init__(self, from_logits: bool = False) -> None:
        self._from_logits = from_logits
        super().__init__()

    def clear(self) -> None:
        self.sums = {name: torch.zeros(self.BINS, dtype=torch.float64) for name in ("class 0", "class 1")}

    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:  # noqa: ARG002 - the interface of Metric
        if not isinstance(outputs, Tensor) or not isinstance(label, Tensor) or outputs.numel() != label.numel():
            raise ParallelError(f"AUC: needs a score for each label, got {_shape(outputs)} and {_shape(label)}")
        scores, label = outputs.detach().double().reshape(-1).cpu(), label.reshape(-1).cpu()
        if self._from_logits:
            scores = scores.sigmoid()
        if not ((scores >= 0) & (scores <= 1)).all():
            raise ParallelError("AUC: scores outside of 0 to 1; give AUC(from_logits=True) for logits")
        if not ((label == 0) | (label == 1)).all():
            raise ParallelError("AUC: labels must be 0 or 1")
        bins = (scores * self.BINS).long().clamp(max=self.BINS - 1)
        for name, is_own in (("class 0", label == 0), ("class 1", label == 1)):
            self.sums[name] += torch.bincount(bins[is_own], minlength=self.BINS)

    def eval(self) -> float:
        low, high = self.sums["class 0"], self.sums["class 1"]
        if not low.sum() or not high.sum():
            raise ParallelError("AUC: needs samples of both classes; give more data")
        below = low.cumsum(0) - low / 2
        return float((high * below).sum() / (low.sum() * high.sum()))


class Loss(_Quotient):
    """The mean loss over the batches."""

    _names = ("loss", "batches")

    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:  # noqa: ARG002 - the interface of Metric
        if loss is None:
            raise ParallelError("the metric Loss needs the loss: give Model a loss_fn, or leave the metric out")
        self.sums["loss"] += loss.detach().double().cpu()
        self.sums["batches"] += 1


NAMES: Mapping[str, type[Metric]] = {
    "accuracy": Accuracy,
    "acc": Accuracy,
    "auc": AUC,
    "loss": Loss,
    "top_1_accuracy": Top1CategoricalAccuracy,
    "top_5_accuracy": Top5CategoricalAccuracy,
}
"""MindSpore's names of metrics, for `Model(metrics={"accuracy"})`."""


def build_metrics(metrics: Mapping[str, Any] | Iterable[str] | None) -> dict[str, Any]:
    """Return name -> metric.

    Args:
        metrics: names of `NAMES`, or name -> metric; a metric has `update` with `clear` and `eval`, or with `reset` and
            `compute` as those of torchmetrics do.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        names = [metrics] if isinstance(metrics, str) else sorted(metrics)
        for name in names:
            if name not in NAMES:
                near = near_miss(str(name), NAMES)
                raise ParallelError(f"Model(metrics={name!r}): unknown metric{near}; known are {', '.join(NAMES)}")
        return {name: NAMES[name]() for name in names}
    for name, metric in metrics.items():
        if not hasattr(metric, "update") or not (hasattr(metric, "eval") or hasattr(metric, "compute")):
            raise ParallelError(
                f"Model(metrics={{{name!r}: {type(metric).__name__}}}): no metric; give Accuracy(), a subclass of "
                "Metric, or one of torchmetrics"
            )
    return dict(metrics)


def clear_metric(metric: Any) -> None:
    """Begin to count."""
    metric.reset() if hasattr(metric, "reset") else metric.clear()


def update_metric(metric: Any, loss: Tensor | None, outputs: Any, label: Any) -> None:
    """Count one batch of this rank; in a pipeline only ranks of the last stage have outputs."""
    if outputs is None and not isinstance(metric, Loss):
        return
    if isinstance(metric, Metric):
        metric.update(loss, outputs, label)
    else:
        metric.update(outputs, label)


def finish_metric(metric: Any, *, is_shared: bool) -> float:
    """Return the value over all ranks. All ranks call it together.

    Args:
        is_shared: the ranks train one network.
    """
    if isinstance(metric, Metric) and is_shared:
        metric.add_up()
    return float(metric.compute() if hasattr(metric, "compute") else metric.eval())


def _scores(name: str, outputs: Any, label: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(outputs, Tensor) or not isinstance(label, Tensor) or outputs.dim() < 2:
        raise ParallelError(
            f"{name}: needs scores (n, classes, ...) and labels, got {_shape(outputs)} and {_shape(label)}"
        )
    if label.shape == outputs.shape:
        label = label.argmax(1)
    if label.shape != (outputs.shape[0], *outputs.shape[2:]):
        raise ParallelError(
            f"{name}: labels {tuple(label.shape)} do not fit scores {tuple(outputs.shape)}; give class numbers, or "
            "one-hot rows like the scores"
        )
    return outputs, label


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


Data = Iterable[Sequence[Tensor] | Mapping[str, Tensor]]
Batches = Iterable[Sequence[Tensor]]
Callbacks = Callback | Sequence[Callback] | None
AMP_LEVELS = ("O0", "O1", "O2", "auto")


class Model:
    """Train, evaluate and ask a network.

    A module runs in the mode that `set_auto_parallel_context` has set, if any, as if it came with its AutoParallel.

    Args:
        network: a module, or an AutoParallel of one. Without `loss_fn` its result is the loss.
        loss_fn: joined with the network as `loss_fn(network(*inputs), label)`.
        optimizer: any torch optimizer over the network's parameters.
        metrics: of `eval`: names ("accuracy", "loss", "top_1_accuracy", "top_5_accuracy"), or name -> metric.
        eval_network: what `eval` runs in place of network and loss: it returns (loss, outputs, label).
        eval_indexes: where these three stand among its results.
        amp_level: "O0": as the network has it; "O1", "O2", "auto": the operators for which torch's autocast does so
            compute in float16, with a dynamic loss scale, as `AutoParallel.mixed_precision("float16", "dynamic")`.

    Raises:
        ParallelError: `loss_fn` for an AutoParallel, which must hold its loss itself; an unknown metric or level.
    """

    with_loss: type[WithLoss] = WithLoss
    """Joins the network with its loss."""

    def __init__(
        self,
        network: nn.Module | AutoParallel,
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Mapping[str, Any] | Iterable[str] | None = None,
        eval_network: nn.Module | None = None,
        eval_indexes: Sequence[int] | None = None,
        amp_level: str = "O0",
    ) -> None:
        if loss_fn is not None and isinstance(network, AutoParallel):
            raise ParallelError(
                "Model(AutoParallel(net), loss_fn): wrap the loss first, AutoParallel(WithLoss(net, loss))"
            )
        if amp_level not in AMP_LEVELS:
            raise ParallelError(
                f"Model(amp_level={amp_level!r}): one of {', '.join(AMP_LEVELS)}; for weights of 16 bits (O3) give "
                "network.half()"
            )
        if eval_indexes is not None and (eval_network is None or len(eval_indexes) != 3):
            raise ParallelError(
                f"Model(eval_indexes={eval_indexes!r}): the places of loss, outputs and label among what eval_network "
                "returns; give three, with an eval_network"
            )
        self.network: Any = self.with_loss(network, loss_fn) if loss_fn is not None else network
        if not isinstance(network, AutoParallel) and (has_parallel_mode() or amp_level != "O0"):
            mode = None if has_parallel_mode() else "stand_alone"
            self.network = AutoParallel(self.network, parallel_mode=mode)
        if amp_level != "O0":
            self.network.mixed_precision("float16", "dynamic")
        self.optimizer = optimizer
        self._metrics = build_metrics(metrics)
        self._eval_network = None if eval_network is None else self._beside(eval_network)
        self._eval_indexes = tuple(eval_indexes or (0, 1, 2))

    @property
    def train_network(self) -> Any:
        """What is trained: the network with its loss, in its AutoParallel if it has one."""
        return self.network

    # -- training -----------------------------------------------------------------------------------------------

    def train(
        self,
        epoch: int,
        train_dataset: Data,
        callbacks: Callbacks = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train for `epoch` epochs over a dataset that yields tuples of tensors, label last, or dicts of them.

        Args:
            dataset_sink_mode: run the steps of an epoch without a look at them: callbacks are told of the last step
                alone, and no loss is waited for before.
            sink_size: steps of an epoch in sink mode; the data begins anew whenever it ends. -1 is all of the data.
            initial_epoch: epochs that count as done, from 0.
            resume_from: a checkpoint to go on from, such as `latest_checkpoint(directory)`: network, optimizer, random
                numbers, callbacks and the place in the data continue as if training had never stopped. None begins
                anew.

        Raises:
            ParallelError: no optimizer, a dataset that yields nothing, or a loss that is not finite.
            CheckpointError: the checkpoint is missing, incomplete or one of another network.
        """
        self._train(epoch, train_dataset, callbacks, dataset_sink_mode, sink_size, initial_epoch, resume_from)

    def fit(
        self,
        epoch: int,
        train_dataset: Data,
        valid_dataset: Iterable[Sequence[Tensor]] | None = None,
        valid_frequency: int | Sequence[int] = 1,
        callbacks: Callbacks = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train as `train` does, and evaluate on the way.

        Args:
            valid_dataset: what to evaluate on; its metrics are in `context.metrics` as `eval_NAME`.
            valid_frequency: evaluate after every so many epochs, or after the epochs of a list, from 1.
        """

        def evaluate(context: RunContext) -> None:
            number = context.cur_epoch_num
            is_due = number % valid_frequency == 0 if isinstance(valid_frequency, int) else number in valid_frequency
            if valid_dataset is not None and is_due:
                _tell(context, "on_eval_begin")
                values = self.eval(valid_dataset)
                context.metrics = {f"eval_{name}": value for name, value in values.items()}
                _tell(context, "on_eval_end")

        self._train(epoch, train_dataset, callbacks, dataset_sink_mode, sink_size, initial_epoch, resume_from, evaluate)

    def _train(
        self,
        epoch: int,
        dataset: Data,
        callbacks: Callbacks,
        dataset_sink_mode: bool,
        sink_size: int,
        initial_epoch: int,
        resume_from: str | os.PathLike[str] | None,
        at_epoch_end: Callable[[RunContext], None] | None = None,
    ) -> None:
        if self.optimizer is None:
            raise ParallelError("Model.train: no optimizer; give Model(network, optimizer=...)")
        if isinstance(sink_size, bool) or not isinstance(sink_size, int) or (sink_size < 1 and sink_size != -1):
            raise ParallelError(f"Model.train(sink_size={sink_size!r}): a whole number of steps, or -1 for all")
        steps = sink_size if dataset_sink_mode and sink_size > 0 else 0  # of an epoch; 0: a pass over the data
        listeners = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        listeners.sort(key=lambda listener: getattr(listener, "saves_others", False))
        context = RunContext(
            self.network, epoch, steps or count_steps(dataset), optimizer=self.optimizer, callbacks=listeners
        )
        start = find_start(self.network, self.optimizer, initial_epoch, resume_from)
        stream = DataStream(dataset, start)
        first, done = start.position.epoch, start.position.step_in_epoch  # and how many steps of it are done
        if steps and start.position.step:
            first, done = divmod(start.position.step, steps)
        context.cur_step_num, context.position = start.position.step, start.position
        left = (epoch - first) * context.batch_num - done
        progress.begin_run(start.position.step, start.position.step + left if context.batch_num else 0)
        for key, listener in name_callbacks(listeners):
            if key in start.callback_states:
                listener.load_state_dict(start.callback_states[key])
        _tell(context, "on_train_begin")
        for number in range(first, epoch):
            self.network.train()
            context.cur_epoch_num = number + 1
            if not steps or number == first:
                done_of_pass = stream.begin_pass()
            context.random_of_epoch = stream.random_of_pass
            context.step_in_epoch = done if number == first else 0
            if not steps:
                context.step_in_epoch = done_of_pass
            _tell(context, "on_train_epoch_begin")
            self._run_epoch(context, stream, steps, is_sunk=dataset_sink_mode)
            if context.step_in_epoch == 0:
                raise ParallelError("Model.train: the dataset yields no batch; give more samples or smaller batches")
            if at_epoch_end is not None:
                at_epoch_end(context)
            context.check_finite()
            _tell(context, "on_train_epoch_end")
            if context.stop_requested:
                break
        _tell(context, "on_train_end")

    def _run_epoch(self, context: RunContext, stream: DataStream, steps: int, *, is_sunk: bool) -> None:
        if is_sunk:
            _tell(context, "on_train_step_begin")
        is_empty = False
        while not context.stop_requested and not (steps and context.step_in_epoch == steps):
            batch = stream.next()
            if batch is None:
                if not steps or is_empty:
                    break
                stream.begin_pass()
                is_empty = True
                continue
            is_empty = False
            if not is_sunk:
                _tell(context, "on_train_step_begin")
            self._step(batch, context)
            context.position, context.random_of_epoch = stream.position, stream.random_of_pass
            if not is_sunk:
                _tell(context, "on_train_step_end")
        if is_sunk and context.step_in_epoch:
            context.check_finite()
            _tell(context, "on_train_step_end")

    def _step(self, batch: Any, context: RunContext) -> None:
        assert self.optimizer is not None
        if not isinstance(self.network, AutoParallel):  # which counts its steps itself
            progress.begin_step()
        outputs = _call(self.network, batch)
        find_loss(outputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        context.note_step(outputs)

    # -- evaluation ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval(
        self, valid_dataset: Batches, callbacks: Callbacks = None, dataset_sink_mode: bool = False
    ) -> dict[str, float]:
        """Return the metrics over a dataset, of all ranks together, and leave the network in its mode.

        Args:
            dataset_sink_mode: without effect: nothing is looked at before the end in any case.

        Raises:
            ParallelError: no metrics, or outputs and labels that do not fit them.
        """
        del dataset_sink_mode
        if not self._metrics:
            raise ParallelError('Model.eval: no metrics; give Model(network, loss_fn, metrics={"accuracy"})')
        listeners = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        context = RunContext(self.network, 1, count_steps(valid_dataset), callbacks=listeners)
        _tell(context, "on_eval_begin")
        for metric in self._metrics.values():
            clear_metric(metric)
        network = self.network if self._eval_network is None else self._eval_network
        with _evaluating(self.network), _evaluating(network), returning(_module_of(network), "both") as has_loss:
            if self._eval_network is None and not has_loss:
                raise ParallelError(
                    "Model.eval: the network holds its loss, so its outputs are not known; give Model a loss_fn, "
                    "AutoParallel(WithLoss(net, loss)), or an eval_network"
                )
            for batch in valid_dataset:
                results: Sequence[Any] = network(*batch)
                if self._eval_network is None:
                    results = (*results, batch[-1])
                loss, outputs, label = (results[index] for index in self._eval_indexes)
                for metric in self._metrics.values():
                    update_metric(metric, loss, outputs, label)
        is_shared = isinstance(self.network, AutoParallel) and not self.network.settings.is_lone
        context.metrics = {name: finish_metric(metric, is_shared=is_shared) for name, metric in self._metrics.items()}
        _tell(context, "on_eval_end")
        return context.metrics

    @torch.no_grad()
    def predict(self, *inputs: Tensor) -> Any:
        """Return the network's result, without its loss and without gradients; each rank's part of the batch."""
        with _evaluating(self.network), returning(_module_of(self.network), "outputs"):
            return self.network(*inputs)

    # -- layouts ------------------------------------------------------------------------------------------------

    def infer_train_layout(
        self, train_dataset: Data, dataset_sink_mode: bool = True, sink_size: int = -1
    ) -> dict[str, Any]:
        """Cut the network for training, without a step, and return how: parameter -> layout.

        It is what `load_distributed_checkpoint(model.train_network, files, layout)` takes. All ranks call it together.

        Args:
            dataset_sink_mode: without effect, as sink_size: the layout does not depend on them.

        Raises:
            ParallelError: the dataset yields nothing, or the network has no AutoParallel.
        """
        del dataset_sink_mode, sink_size
        random = take_random_state()
        dataset = copy.copy(train_dataset) if isinstance(train_dataset, Dataset) else train_dataset
        batch = next(iter(dataset), None)
        put_random_state(random)
        if batch is None:
            raise ParallelError("Model.infer_train_layout: the dataset yields no batch; give more samples")
        return self._layouts(batch)

    def infer_predict_layout(self, *predict_data: Tensor) -> dict[str, Any]:
        """Cut the network for `predict`, without running it, and return how: parameter -> layout.

        Raises:
            ParallelError: the network has no AutoParallel.
        """
        with torch.no_grad(), returning(_module_of(self.network), "outputs"):
            return self._layouts(predict_data)

    def _layouts(self, batch: Any) -> dict[str, Any]:
        from msrun.runtime.parallel.parameters.layouts import find_layouts

        network = self.network
        if not isinstance(network, AutoParallel):
            raise ParallelError(
                "Model: without a parallel mode there is no layout to infer; give Model(AutoParallel(net)), or call "
                "set_auto_parallel_context(parallel_mode=...) before"
            )
        if isinstance(batch, Mapping):
            network.build_plan(**batch)
        else:
            network.build_plan(*batch)
        return find_layouts(network)

    def _beside(self, network: nn.Module) -> Any:
        """Return a network over the same parameters that runs as the trained one does."""
        if not isinstance(self.network, AutoParallel):
            return network
        parallel = AutoParallel(network, parallel_mode=self.network.settings.parallel_mode)
        parallel.settings = self.network.settings
        return parallel


def _call(network: Any, batch: Any) -> Any:
    return network(**batch) if isinstance(batch, Mapping) else network(*batch)


def _module_of(network: Any) -> Any:
    return network.network if isinstance(network, AutoParallel) else network


@contextmanager
def _evaluating(network: Any) -> Iterator[None]:
    """Switch dropout and batch statistics to evaluation, and back."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _tell(context: RunContext, moment: str) -> None:
    for listener in context.callbacks:
        getattr(listener, moment)(context)
