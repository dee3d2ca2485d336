"""Learning rates that change: as lists of a rate per step, and as cells of the step. Both have the same formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.mindspore.nn.cells import Cell


def _cosine(at: float, min_lr: float, max_lr: float, decay: float) -> float:
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * min(at, decay) / decay))


def _exponential(at: float, rate: float, decay_rate: float, decay: float, is_stair: bool) -> float:
    return rate * decay_rate ** (at // decay if is_stair else at / decay)


def _natural(at: float, rate: float, decay_rate: float, decay: float, is_stair: bool) -> float:
    return rate * math.exp(-decay_rate * (at // decay * decay if is_stair else at))


def _inverse(at: float, rate: float, decay_rate: float, decay: float, is_stair: bool) -> float:
    return rate / (1 + decay_rate * (at // decay if is_stair else at / decay))


def _polynomial(at: float, rate: float, end: float, decay: float, power: float, grows: bool) -> float:
    whole = decay * max(math.ceil(at / decay), 1) if grows else decay
    return (rate - end) * (1 - min(at, whole) / whole) ** power + end


def _warm(at: float, rate: float, steps: float) -> float:
    return rate * min(at, steps) / steps


def _rates(total_step: int, step_per_epoch: int, formula: Callable[..., float], *settings: Any) -> list[float]:
    return [float(formula(step // step_per_epoch, *settings)) for step in range(total_step)]


def cosine_decay_lr(
    min_lr: float, max_lr: float, total_step: int, step_per_epoch: int, decay_epoch: int
) -> list[float]:
    """Return rates on half a cosine, one value an epoch."""
    return _rates(total_step, step_per_epoch, _cosine, min_lr, max_lr, decay_epoch)


def _decaying(formula: Callable[..., float], name: str, words: str) -> Callable[..., list[float]]:
    def rates(
        learning_rate: float,
        decay_rate: float,
        total_step: int,
        step_per_epoch: int,
        decay_epoch: int,
        is_stair: bool = False,
    ) -> list[float]:
        return _rates(total_step, step_per_epoch, formula, learning_rate, decay_rate, decay_epoch, is_stair)

    rates.__name__, rates.__doc__ = name, f"Return {words}."
    return rates


exponential_decay_lr = _decaying(_exponential, "exponential_decay_lr", "rate * decay_rate ** (epoch / decay_epoch)")
natural_exp_decay_lr = _decaying(_natural, "natural_exp_decay_lr", "rate * e ** (-decay_rate * epoch)")
inverse_decay_lr = _decaying(_inverse, "inverse_decay_lr", "rate / (1 + decay_rate * epoch / decay_epoch)")


def polynomial_decay_lr(
    learning_rate: float,
    end_learning_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    power: float,
    update_decay_epoch: bool = False,
) -> list[float]:
    """Return rates that fall to end_learning_rate as (1 - epoch / decay_epoch) ** power."""
    settings = (learning_rate, end_learning_rate, decay_epoch, power, update_decay_epoch)
    return _rates(total_step, step_per_epoch, _polynomial, *settings)


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """Return each rate up to its milestone."""
    pieces = zip([0, *milestone[:-1]], milestone, learning_rates, strict=True)
    return [float(rate) for begin, end, rate in pieces for _ in range(begin, end)]


def warmup_lr(learning_rate: float, total_step: int, step_per_epoch: int, warmup_epoch: int) -> list[float]:
    """Return rates that grow to learning_rate in equal steps."""
    return _rates(total_step, step_per_epoch, _warm, learning_rate, warmup_epoch)


class LearningRateSchedule(Cell):
    """Base: `construct(global_step)` returns the rate of a step."""

    _formula: Callable[..., float]
    _settings: tuple[Any, ...]

    def construct(self, global_step: Any) -> Tensor:
        """Return the rate, or of several steps theirs."""
        steps = torch.as_tensor(global_step)
        rates = [type(self)._formula(float(step), *self._settings) for step in steps.reshape(-1)]
        return torch.tensor(rates).reshape(steps.shape)

    def rate(self, step: int) -> float:
        """Return the rate of a step as a number."""
        return float(self(torch.tensor(step, dtype=torch.float32)))


class CosineDecayLR(LearningRateSchedule):
    """Half a cosine from max_lr to min_lr over decay_steps."""

    _formula = staticmethod(_cosine)

    def __init__(self, min_lr: float, max_lr: float, decay_steps: int) -> None:
        super().__init__()
        self.min_lr, self.max_lr, self.decay_steps = self._settings = (min_lr, max_lr, decay_steps)


class ExponentialDecayLR(LearningRateSchedule):
    """learning_rate * decay_rate ** (step / decay_steps)."""

    _formula = staticmethod(_exponential)

    def __init__(self, learning_rate: float, decay_rate: float, decay_steps: int, is_stair: bool = False) -> None:
        super().__init__()
        self._settings = (learning_rate, decay_rate, decay_steps, is_stair)
        self.learning_rate, self.decay_rate, self.decay_steps, self.is_stair = self._settings


class NaturalExpDecayLR(ExponentialDecayLR):
    """learning_rate * e ** (-decay_rate * step)."""

    _formula = staticmethod(_natural)


class InverseDecayLR(ExponentialDecayLR):
    """learning_rate / (1 + decay_rate * step / decay_steps)."""

    _formula = staticmethod(_inverse)


class PolynomialDecayLR(LearningRateSchedule):
    """Falls to end_learning_rate as (1 - step / decay_steps) ** power."""

    _formula = staticmethod(_polynomial)

    def __init__(
        self,
        learning_rate: float,
        end_learning_rate: float,
        decay_steps: int,
        power: float,
        update_decay_steps: bool = False,
    ) -> None:
        super().__init__()
        self._settings = (learning_rate, end_learning_rate, decay_steps, power, update_decay_steps)
        self.learning_rate, self.end_learning_rate, self.decay_steps, self.power, _ = self._settings


class WarmUpLR(LearningRateSchedule):
    """Grows to learning_rate in equal steps."""

    _formula = staticmethod(_warm)

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        super().__init__()
        self.learning_rate, self.warmup_steps = self._settings = (learning_rate, warmup_steps)
