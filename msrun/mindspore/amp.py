"""Loss scales and mixed precision in MindSpore's words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.mindspore.missing import missing_names
from msrun.mindspore.nn import training
from msrun.mindspore.nn.cells import Cell
from msrun.mindspore.nn.losses import WithLossCell
from msrun.mindspore.ops.table import taking
from msrun.runtime.parallel.precision import next_scale

__all__ = [
    "DynamicLossScaleManager", "DynamicLossScaler", "FixedLossScaleManager", "LossScaleManager", "LossScaler",
    "StaticLossScaler", "all_finite", "auto_mixed_precision", "build_train_network",
]  # fmt: skip
__getattr__ = missing_names("amp", __all__)


class LossScaleManager:
    """Base of the loss scales of `Model`."""

    def get_loss_scale(self) -> float:
        """Return the scale."""
        raise NotImplementedError

    def update_loss_scale(self, overflow: bool) -> None:
        """Change the scale after a step."""
        raise NotImplementedError

    def get_update_cell(self) -> Any:
        """Return the cell that updates the scale, for TrainOneStepWithLossScaleCell; None for none."""
        raise NotImplementedError


class FixedLossScaleManager(LossScaleManager):
    """A scale that stays.

    Args:
        drop_overflow_update: leave steps out whose gradients overflow.
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        if loss_scale < 1:
            raise UsageError(f"FixedLossScaleManager(loss_scale={loss_scale!r}): 1 or more")
        self._loss_scale, self._drops = loss_scale, drop_overflow_update

    def get_loss_scale(self) -> float:
        return self._loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return whether steps that overflow are left out."""
        return self._drops

    def update_loss_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def get_update_cell(self) -> Any:
        return training.FixedLossScaleUpdateCell(self._loss_scale) if self._drops else None


class DynamicLossScaleManager(LossScaleManager):
    """A scale that follows the overflows."""

    def __init__(self, init_loss_scale: float = 2**24, scale_factor: int = 2, scale_window: int = 2000) -> None:
        self.loss_scale, self.scale_factor, self.increase_ratio = init_loss_scale, scale_factor, scale_factor
        self.scale_window, self.cur_iter, self.last_overflow_iter, self.bad_step = scale_window, 1, 0, 0

    def get_loss_scale(self) -> float:
        return self.loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return True: steps that overflow are left out."""
        return True

    def update_loss_scale(self, overflow: bool) -> None:
        """Divide the scale at an overflow, multiply it after `scale_window` steps without one."""
        self.last_overflow_iter = self.cur_iter if overflow else self.last_overflow_iter
        good_steps = self.cur_iter - self.last_overflow_iter
        self.loss_scale = next_scale(self.loss_scale, good_steps, self.scale_factor, self.scale_window, 1.0)
        self.cur_iter += 1

    def get_update_cell(self) -> Any:
        return training.DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)


class LossScaler:
    """Base of the loss scales of functional training."""

    scale_value: Tensor

    def scale(self, inputs: Any) -> Any:
        """Return a loss, or several, times the scale."""
        return _each(inputs, lambda one: one * self.scale_value)

    def unscale(self, inputs: Any) -> Any:
        """Return a gradient, or several, divided by the scale."""
        return _each(inputs, lambda one: (one / self.scale_value).to(one.dtype))

    def adjust(self, grads_finite: Any) -> Any:
        """Change the scale after a step."""
        raise NotImplementedError


def _each(inputs: Any, change: Any) -> Any:
    return tuple(map(change, inputs)) if isinstance(inputs, list | tuple) else change(inputs)


class StaticLossScaler(LossScaler):
    """A scale that stays."""

    def __init__(self, scale_value: float) -> None:
        self.scale_value = torch.tensor(float(scale_value))

    def adjust(self, grads_finite: Any) -> Any:
        return self.scale_value


class DynamicLossScaler(StaticLossScaler):
    """A scale that is divided at an overflow, and multiplied after `scale_window` steps without one."""

    def __init__(self, scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__(scale_value)
        self.scale_factor, self.scale_window, self.counter = scale_factor, scale_window, torch.tensor(0)

    def adjust(self, grads_finite: Any) -> Any:
        """Change the scale after a step; returns whether the gradients were finite."""
        self.counter = self.counter + 1 if bool(grads_finite) else torch.tensor(0)
        found = next_scale(self.scale_value, int(self.counter), self.scale_factor, self.scale_window, 1.0)
        self.scale_value = torch.as_tensor(found)
        return grads_finite


def all_finite(inputs: Sequence[Tensor], status: Any = None) -> Tensor:
    """Tell whether all numbers are finite."""
    return torch.stack([torch.isfinite(one).all() for one in inputs]).all()


def auto_mixed_precision(network: Cell, amp_level: str = "O0", dtype: torch.dtype = torch.float16) -> Cell:
    """Let a network compute in 16 bits.

    Args:
        amp_level: "O0": as it is; "O1", "O2", "auto": what loses nothing by it (torch's autocast); "O3": everything.

    Raises:
        UsageError: another level.
    """
    if amp_level not in ("O0", "O1", "O2", "O3", "auto"):
        raise UsageError(f"auto_mixed_precision(amp_level={amp_level!r}): one of O0, O1, O2, O3, auto")
    if amp_level == "O3":
        network.to_float(dtype)
    elif amp_level != "O0":
        own = network.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            kind = next((one.device.type for one in network.parameters()), "cpu")
            with torch.autocast(kind, dtype):
                return own(*args, **kwargs)

        vars(network)["forward"] = forward
    return network


_OF_TRAINING = """
network optimizer loss_fn=None level='O0' boost_level>='O0' loss_scale_manager=None keep_batchnorm_fp32>=None
cast_model_type=float16
"""


@partial(taking, _OF_TRAINING)
def build_train_network(
    network: Any, optimizer: Any, loss_fn: Any, level: str, loss_scale_manager: Any, cast_model_type: torch.dtype
) -> nn.Module:
    """Return the cell that trains one step: network, loss and optimizer."""
    network = auto_mixed_precision(network, level, cast_model_type)
    joined = network if loss_fn is None else WithLossCell(network, loss_fn)
    if loss_scale_manager is None:
        return training.TrainOneStepCell(joined, optimizer).set_train()
    update = loss_scale_manager.get_update_cell()
    if update is None:
        return training.TrainOneStepCell(joined, optimizer, loss_scale_manager.get_loss_scale()).set_train()
    return training.TrainOneStepWithLossScaleCell(joined, optimizer, update).set_train()
