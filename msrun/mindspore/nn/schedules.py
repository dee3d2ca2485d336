"""Learning rates that change: as lists of a rate per step, and as cells of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.mindspore.nn.cells import Cell


def _rates(rate: Any, total_step: int, step_per_epoch: int) -> list[float]:
    return [float(rate(step // step_per_epoch)) for step in range(total_step)]


def cosine_decay_lr(
    min_lr: float, max_lr: float, total_step: int, step_per_epoch: int, decay_epoch: int
) -> list[float]:
    """Return rates on half a cosine, one value an epoch."""
    return _rates(
        lambda epoch: (
            min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * min(epoch, decay_epoch) / decay_epoch))
        ),
        total_step,
        step_per_epoch,
    )


def exponential_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """Return learning_rate * decay_rate ** (epoch / decay_epoch)."""
    return _rates(
        lambda epoch: learning_rate * decay_rate ** (epoch // decay_epoch if is_stair else epoch / decay_epoch),
        total_step,
        step_per_epoch,
    )


def natural_exp_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """Return learning_rate * e ** (-decay_rate * epoch)."""
    return _rates(
        lambda epoch: (
            learning_rate * math.exp(-decay_rate * (epoch // decay_epoch * decay_epoch if is_stair else epoch))
        ),
        total_step,
        step_per_epoch,
    )


def inverse_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """Return learning_rate / (1 + decay_rate * epoch / decay_epoch)."""
    return _rates(
        lambda epoch: learning_rate / (1 + decay_rate * (epoch // decay_epoch if is_stair else epoch / decay_epoch)),
        total_step,
        step_per_epoch,
    )


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

    def rate(epoch: int) -> float:
        whole = decay_epoch * max(math.ceil(epoch / decay_epoch), 1) if update_decay_epoch else decay_epoch
        left = 1 - min(epoch, whole) / whole
        return (learning_rate - end_learning_rate) * left**power + end_learning_rate

    return _rates(rate, total_step, step_per_epoch)


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """Return each rate up to its milestone."""
    before = [0, *milestone]
    return [
        float(rate)
        for begin, end, rate in zip(before[:-1], milestone, learning_rates, strict=True)
        for _ in range(begin, end)
    ]


def warmup_lr(learning_rate: float, total_step: int, step_per_epoch: int, warmup_epoch: int) -> list[float]:
    """Return rates that grow to learning_rate in equal steps."""
    return _rates(lambda epoch: learning_rate * min(epoch, warmup_epoch) / warmup_epoch, total_step, step_per_epoch)


class LearningRateSchedule(Cell):
    """Base: `construct(global_step)` returns the rate of a step."""

    def rate(self, step: int) -> float:
        """Return the rate of a step as a number."""
        return float(self(torch.tensor(step, dtype=torch.float32)))


class CosineDecayLR(LearningRateSchedule):
    """Half a cosine from max_lr to min_lr over decay_steps."""

    def __init__(self, min_lr: float, max_lr: float, decay_steps: int) -> None:
        super().__init__()
        self.min_lr, self.max_lr, self.decay_steps = min_lr, max_lr, decay_steps

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate."""
        share = torch.as_tensor(global_step, dtype=torch.float32).clamp(max=self.decay_steps) / self.decay_steps
        return self.min_lr + 0.5 * (self.max_lr - self.min_lr) * (1 + torch.cos(math.pi * share))


class _Decay(LearningRateSchedule):
    def __init__(self, learning_rate: float, decay_rate: float, decay_steps: int, is_stair: bool = False) -> None:
        super().__init__()
        self.learning_rate, self.decay_rate = learning_rate, decay_rate
        self.decay_steps, self.is_stair = decay_steps, is_stair

    def _share(self, global_step: Any) -> Tensor:
        share = torch.as_tensor(global_step, dtype=torch.float32) / self.decay_steps
        return share.floor() if self.is_stair else share


class ExponentialDecayLR(_Decay):
    """learning_rate * decay_rate ** (step / decay_steps)."""

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate."""
        return self.learning_rate * self.decay_rate ** self._share(global_step)


class NaturalExpDecayLR(_Decay):
    """learning_rate * e ** (-decay_rate * step)."""

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate."""
        step = self._share(global_step) * self.decay_steps if self.is_stair else torch.as_tensor(global_step)
        return self.learning_rate * torch.exp(-self.decay_rate * step)


class InverseDecayLR(_Decay):
    """learning_rate / (1 + decay_rate * step / decay_steps)."""

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate."""
        return self.learning_rate / (1 + self.decay_rate * self._share(global_step))


class PolynomialDecayLR(LearningRateSchedule):
    """Falls to end_learning_rate as (1 - step / decay_steps) ** power."""

    def __init__(
        self,
        learning_rate: float,
        end_learning_rate: float,
        decay_steps: int,
        power: float,
        update_decay_steps: bool = False,
    ) -> None:
        super().__init__()
        self.learning_rate, self.end_learning_rate = learning_rate, end_learning_rate
        self.decay_steps, self.power, self.update_decay_steps = decay_steps, power, update_decay_steps

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate."""
        step = torch.as_tensor(global_step, dtype=torch.float32)
        whole = torch.tensor(float(self.decay_steps))
        if self.update_decay_steps:
            whole = whole * torch.clamp(torch.ceil(step / whole), min=1)
        left = 1 - torch.minimum(step, whole) / whole
        return (self.learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate


class WarmUpLR(LearningRateSchedule):
    """Grows to learning_rate in equal steps."""

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        super().__init__()
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate."""
        step = torch.as_tensor(global_step, dtype=torch.float32).clamp(max=self.warmup_steps)
        return self.learning_rate * step / self.warmup_steps
