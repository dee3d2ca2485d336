"""Metrics in MindSpore's words: `clear`, `update(outputs, labels)`, `eval`. Each rank counts its own, as there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrun.errors import UsageError, near_miss
from msrun.mindspore.missing import missing_names
from msrun.runtime import Accuracy as _Accuracy
from msrun.runtime import Loss, Top1CategoricalAccuracy, Top5CategoricalAccuracy
from msrun.runtime import TopKCategoricalAccuracy as _TopKCategoricalAccuracy
from msrun.train.model import NAMES


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
        outputs, labels = map(_as_tensor, inputs[-2:])
        if self._is_multilabel:
            hits = outputs == labels
            right = (hits.flatten(2).transpose(1, -1) if hits.dim() > 2 else hits).all(-1)
            self.sums["right"] += right.sum().cpu()
            self.sums["all"] += right.numel()
        else:
            super().update(None, outputs, labels)


class TopKCategoricalAccuracy(_Called, _TopKCategoricalAccuracy):
    """The share of samples whose class is among the k highest scores."""

    def update(self, *inputs: Any) -> None:
        super().update(None, *map(_as_tensor, inputs[-2:]))


class _Counted(Metric):
    """A metric of a sum, to which each batch adds what `_count` says of its outputs and labels."""

    _sum: Any
    _count: Any

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self._sum = 0

    def update(self, *inputs: Any) -> None:
        self._sum = self._sum + self._count(*map(_numbers, inputs[-2:]))

    @property
    def _counted(self) -> np.ndarray:
        if not isinstance(self._sum, np.ndarray):
            raise RuntimeError(f"{type(self).__name__}: nothing was counted; give data with at least one batch")
        return self._sum


class MAE(_Counted):
    """The absolute differences: their sum over all elements, divided by the number of samples, as MindSpore does."""

    _each = staticmethod(np.abs)

    def _count(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.array([self._each(outputs - labels).sum(), len(outputs)])

    def eval(self) -> float:
        return float(self._counted[0] / self._counted[1])


class MSE(MAE):
    """The squared differences, as MAE."""

    _each = staticmethod(np.square)


def _confusion(outputs: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Return how often a class was taken for another: (classes, classes), rows are the labels."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (labels.astype(int).reshape(-1), outputs.astype(int).reshape(-1)), 1)
    return counts


class ConfusionMatrix(_Counted):
    """How often a class was taken for another: (classes, classes), rows are the labels.

    Args:
        normalize: "no_norm", or divided by the sums over "target" rows, "prediction" columns or "all".
    """

    def __init__(self, num_classes: int, normalize: str = "no_norm", threshold: float = 0.5) -> None:
        if normalize not in ("no_norm", "target", "prediction", "all"):
            raise UsageError(f"ConfusionMatrix(normalize={normalize!r}): one of no_norm, target, prediction, all")
        self.num_classes, self.normalize, self.threshold = num_classes, normalize, threshold
        super().__init__()

    def clear(self) -> None:
        self._sum = np.zeros((self.num_classes, self.num_classes))

    confusion_matrix = property(lambda self: self._sum)

    def _count(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the counts of one batch of classes, or of scores."""
        if outputs.ndim == labels.ndim + 1:
            outputs = outputs.argmax(1)
        return _confusion(outputs >= self.threshold if outputs.dtype.kind == "f" else outputs, labels, self.num_classes)

    def eval(self) -> np.ndarray:
        """Return the counts, or shares."""
        if self.normalize == "no_norm":
            return self._sum.copy()
        over = {"target": 1, "prediction": 0, "all": None}[self.normalize]
        return np.nan_to_num(self._sum / self._sum.sum(over, keepdims=True))


class _OfClasses(_Counted):
    """A share for each class, of scores (n, classes) and class numbers or one-hot rows."""

    _share: Any

    def __init__(self, eval_type: str = "classification") -> None:
        if eval_type != "classification":
            raise UsageError(f"{type(self).__name__}(eval_type={eval_type!r}): classification")
        super().__init__()

    def _count(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        labels = labels.argmax(1) if labels.ndim == outputs.ndim else labels
        return _confusion(outputs.argmax(1), labels, outputs.shape[1])

    def eval(self, average: bool = False) -> Any:
        """Return the share of each class, or their mean."""
        counts = self._counted
        share = self._share(*(np.diag(counts) / (counts.sum(axis) + 1e-7) for axis in (0, 1)))
        return share.mean() if average else share


class Precision(_OfClasses):
    """Of what was taken for a class, the share that is of it."""

    _share = staticmethod(lambda precision, _: precision)


class Recall(_OfClasses):
    """Of a class, the share that was taken for it."""

    _share = staticmethod(lambda _, recall: recall)


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
__getattr__ = missing_names("train.metrics", __all__)


def get_metric_fn(name: str, *args: Any, **settings: Any) -> Any:
    """Return a new metric by its name in MindSpore.

    Raises:
        UsageError: an unknown name.
    """
    known: dict[str, Any] = {**NAMES, "acc": Accuracy, "confusion_matrix": ConfusionMatrix}
    known |= {kind.lower(): one for kind, one in METRICS.items() if one is not Metric}
    if name not in known:
        raise UsageError(f"get_metric_fn({name!r}): unknown{near_miss(name, known)}; one of {', '.join(known)}")
    return known[name](*args, **settings)
