"""Metrics of Model.eval: counted on every rank, added up over all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import ParallelError, near_miss


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

    def _quotient(self, above: str, below: str) -> float:
        if not float(self.sums[below]):
            raise ParallelError(f"{type(self).__name__}: nothing was counted; give data with at least one batch")
        return float(self.sums[above] / self.sums[below])


class Accuracy(Metric):
    """The share of samples whose class has the highest score.

    Outputs are scores (n, classes, ...), labels class numbers (n, ...) or one-hot rows like the scores.
    """

    def clear(self) -> None:
        self.sums = _zeros("right", "all")

    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:  # noqa: ARG002 - the interface of Metric
        outputs, label = _scores(type(self).__name__, outputs, label)
        self.sums["right"] += (outputs.argmax(1) == label).sum().cpu()
        self.sums["all"] += label.numel()

    def eval(self) -> float:
        return self._quotient("right", "all")


class TopKCategoricalAccuracy(Metric):
    """The share of samples whose class is among the k highest scores. Shapes as of Accuracy.

    Raises:
        ParallelError: `k` is no whole number of 1 or more, or there are fewer classes.
    """

    def __init__(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ParallelError(f"{type(self).__name__}(k={k!r}): a whole number, 1 or more")
        self._k = k
        super().__init__()

    def clear(self) -> None:
        self.sums = _zeros("right", "all")

    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:  # noqa: ARG002 - the interface of Metric
        outputs, label = _scores(type(self).__name__, outputs, label)
        if outputs.shape[1] < self._k:
            raise ParallelError(f"{type(self).__name__}(k={self._k}): the scores have {outputs.shape[1]} classes")
        self.sums["right"] += (outputs.topk(self._k, 1).indices == label.unsqueeze(1)).sum().cpu()
        self.sums["all"] += label.numel()

    def eval(self) -> float:
        return self._quotient("right", "all")


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


class Loss(Metric):
    """The mean loss over the batches."""

    def clear(self) -> None:
        self.sums = _zeros("loss", "batches")

    def update(self, loss: Tensor | None, outputs: Any, label: Any) -> None:  # noqa: ARG002 - the interface of Metric
        if loss is None:
            raise ParallelError("the metric Loss needs the loss: give Model a loss_fn, or leave the metric out")
        self.sums["loss"] += loss.detach().double().cpu()
        self.sums["batches"] += 1

    def eval(self) -> float:
        return self._quotient("loss", "batches")


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


def _zeros(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros((), dtype=torch.float64) for name in names}


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
