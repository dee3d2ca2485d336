"""Metrics in MindSpore's words: `clear`, `update(outputs, labels)`, `eval`. Each rank counts its own, as there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrun.errors import UsageError, near_miss
from msrun.mindspore.missing import missing_name
from msrun.runtime import Accuracy as _Accuracy
from msrun.runtime import Loss, Top1CategoricalAccuracy, Top5CategoricalAccuracy
from msrun.runtime import TopKCategoricalAccuracy as _TopKCategoricalAccuracy
from msrun.runtime.train.metrics import NAMES


def _numbers(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)


def _as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, np.ndarray | list) else value


class _Called:
    """A metric that can be called with one batch."""

    def __call__(self: Any, *inputs: Any) -> Any:
        self.clear()
        self.update(*inputs)
        return self.eval()


class Metric(_Called, ABC):
    """Base of one's own metrics."""

    def __init__(self) -> None:
        self._indexes: list[int] | None = None

    @abstractmethod
    def clear(self) -> None:
        """Begin to count."""

    @abstractmethod
    def update(self, *inputs: Any) -> None:
        """Count one batch: outputs and labels."""

    @abstractmethod
    def eval(self) -> Any:
        """Return the value of what was counted."""

    def set_indexes(self, indexes: list[int]) -> Metric:
        """Choose which inputs `update` gets, in a method under `rearrange_inputs`."""
        self._indexes = indexes
        return self

    _convert_data = staticmethod(_numbers)


def rearrange_inputs(update: Any) -> Any:
    """Let `update` get the inputs that `set_indexes` chose."""

    def chosen(self: Metric, *inputs: Any) -> Any:
        return update(self, *(inputs if self._indexes is None else [inputs[place] for place in self._indexes]))

    return chosen


class Accuracy(_Called, _Accuracy):
    """The share of right answers; by hand `update(outputs, labels)`, in Model over all ranks.

    Args:
        eval_type: "classification", or "multilabel" of outputs and labels of 0 and 1, a sample being right when all
            its labels are.
    """

    def __init__(self, eval_type: str = "classification") -> None:
        if eval_type not in ("classification", "multilabel"):
            raise UsageError(f"Accuracy(eval_type={eval_type!r}): classification or multilabel")
        self._is_multilabel = eval_type == "multilabel"
        super().__init__()

    def update(self, *inputs: Any) -> None:
        """Count one batch."""
        outputs, labels = map(_as_tensor, inputs[-2:])
        if self._is_multilabel:
            rows = (outputs == labels).flatten(2).transpose(1, -1).all(-1) if outputs.dim() > 2 else outputs == labels
            right = rows if outputs.dim() > 2 else rows.all(-1)
            self.sums["right"] += right.sum().cpu()
            self.sums["all"] += right.numel()
        else:
            super().update(None, outputs, labels)


class TopKCategoricalAccuracy(_Called, _TopKCategoricalAccuracy):
    """The share of samples whose class is among the k highest scores."""

    def update(self, *inputs: Any) -> None:
        """Count one batch."""
        super().update(None, *map(_as_tensor, inputs[-2:]))


class MAE(Metric):
    """The absolute differences: their sum over all elements, divided by the number of samples, as MindSpore does."""

    _each = staticmethod(np.abs)

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self._total, self._count = 0.0, 0

    def update(self, *inputs: Any) -> None:
        """Count one batch."""
        outputs, labels = map(_numbers, inputs[-2:])
        self._total += float(self._each(outputs - labels).sum())
        self._count += len(outputs)

    def eval(self) -> float:
        """Return what was counted."""
        if not self._count:
            raise RuntimeError(f"{type(self).__name__}: nothing was counted; give data with at least one batch")
        return self._total / self._count


class MSE(MAE):
    """The squared differences, as MAE."""

    _each = staticmethod(np.square)


class ConfusionMatrix(Metric):
    """How often a class was taken for another: (classes, classes), rows are the labels.

    Args:
        normalize: "no_norm", or divided by the sums over "target" rows, "prediction" columns or "all".
    """

    def __init__(self, num_classes: int, normalize: str = "no_norm", threshold: float = 0.5) -> None:
        super().__init__()
        if normalize not in ("no_norm", "target", "prediction", "all"):
            raise UsageError(f"ConfusionMatrix(normalize={normalize!r}): one of no_norm, target, prediction, all")
        self.num_classes, self.normalize, self.threshold = num_classes, normalize, threshold
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.confusion_matrix = np.zeros((self.num_classes, self.num_classes))

    def update(self, *inputs: Any) -> None:
        """Count one batch of classes, or of scores."""
        outputs, labels = map(_numbers, inputs[-2:])
        if outputs.ndim == labels.ndim + 1:
            outputs = outputs.argmax(1)
        if outputs.dtype.kind == "f":
            outputs = outputs >= self.threshold
        np.add.at(self.confusion_matrix, (labels.astype(int).reshape(-1), outputs.astype(int).reshape(-1)), 1)

    def eval(self) -> np.ndarray:
        """Return the counts, or shares."""
        counts = self.confusion_matrix.astype(float)
        if self.normalize == "no_norm":
            return counts
        over = {"target": 1, "prediction": 0, "all": None}[self.normalize]
        return np.nan_to_num(counts / counts.sum(over, keepdims=True))


class _OfClasses(Metric):
    """A share for each class, from the counts of what was found, what is there and what of it was right."""

    def __init__(self, eval_type: str = "classification") -> None:
        super().__init__()
        if eval_type != "classification":
            raise UsageError(f"{type(self).__name__}(eval_type={eval_type!r}): classification")
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self._right = self._found = self._there = np.zeros(0)

    def update(self, *inputs: Any) -> None:
        """Count one batch of scores (n, classes) and class numbers or one-hot rows."""
        outputs, labels = map(_numbers, inputs[-2:])
        classes = outputs.shape[1]
        labels = labels.argmax(1) if labels.ndim == outputs.ndim else labels
        hot, guess = np.eye(classes)[labels.astype(int).reshape(-1)], np.eye(classes)[outputs.argmax(1).reshape(-1)]
        if not len(self._right):
            self._right, self._found, self._there = (np.zeros(classes) for _ in range(3))
        self._right = self._right + (hot * guess).sum(0)
        self._found, self._there = self._found + guess.sum(0), self._there + hot.sum(0)

    def eval(self, average: bool = False) -> Any:
        """Return the share of each class, or their mean."""
        share = self._share(self._right / (self._found + 1e-7), self._right / (self._there + 1e-7))
        return share.mean() if average else share

    def _share(self, precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class Precision(_OfClasses):
    """Of what was taken for a class, the share that is of it."""

    def _share(self, precision: np.ndarray, _: np.ndarray) -> np.ndarray:
        return precision


class Recall(_OfClasses):
    """Of a class, the share that was taken for it."""

    def _share(self, _: np.ndarray, recall: np.ndarray) -> np.ndarray:
        return recall


class Fbeta(_OfClasses):
    """(1 + beta^2) precision recall / (beta^2 precision + recall)."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def _share(self, precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
        return (1 + self.beta**2) * precision * recall / (self.beta**2 * precision + recall + 1e-7)


class F1(Fbeta):
    """Fbeta with beta 1."""

    def __init__(self) -> None:
        super().__init__(1.0)


METRICS: dict[str, Any] = {
    one.__name__: one
    for one in (
        *(Accuracy, ConfusionMatrix, F1, Fbeta, Loss, MAE, MSE, Metric, Precision, Recall),
        *(Top1CategoricalAccuracy, Top5CategoricalAccuracy, TopKCategoricalAccuracy),
    )
}
"""Name -> class."""
__all__ = list(METRICS)


def get_metric_fn(name: str, *args: Any, **settings: Any) -> Any:
    """Return a new metric by its name in MindSpore.

    Raises:
        UsageError: an unknown name.
    """
    known = {**NAMES} | {kind.lower(): one for kind, one in METRICS.items() if one is not Metric}
    known |= {"acc": Accuracy, "confusion_matrix": ConfusionMatrix}
    if name not in known:
        raise UsageError(f"get_metric_fn({name!r}): unknown{near_miss(name, known)}; one of {', '.join(known)}")
    return known[name](*args, **settings)


def __getattr__(name: str) -> Any:
    raise missing_name("train.metrics", name, __all__)
