"""Cells that train: one step with an optimizer, with or without a loss scale, and the reduction of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.nn.cells import Cell
from msrun.mindspore.ops.higher_order import GradOperation, with_sum
from msrun.mindspore.ops.state import WORLD_GROUPS
from msrun.mindspore.ops.table import taking
from msrun.mindspore.parallel import BY_HAND, in_context
from msrun.mindspore.tensor import ParameterTuple
from msrun.runtime import AutoParallel, get_auto_parallel_context, get_group_size, get_process_group_ranks
from msrun.runtime.parallel.precision import next_scale


class DistributedGradReducer(Cell):
    """Sum the gradients of all ranks, or with `mean` divide the sum by `degree`.

    Args:
        parameters: whose gradients they are; those marked layerwise_parallel belong to this rank alone.
        mean: None: as `set_auto_parallel_context(gradients_mean=)` says.
        degree: None: the number of ranks.
    """

    @partial(taking, "self parameters mean=None degree=None fusion_type>=1 group=None", owner="DistributedGradReducer")
    def __init__(self, parameters: Iterable[nn.Parameter], mean: Any, degree: Any, group: str | None) -> None:
        super().__init__(auto_prefix=False)
        self.mean = bool(get_auto_parallel_context("gradients_mean")) if mean is None else mean
        self.group = None if group in WORLD_GROUPS else group
        members = get_group_size() if self.group is None else len(get_process_group_ranks(self.group))
        self.degree = members if degree is None else degree
        self._is_shared = [not getattr(parameter, "layerwise_parallel", False) for parameter in parameters]

    def construct(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the reduced gradients."""
        pairs = zip(grads, self._is_shared, strict=True)
        return tuple(self._reduced(gradient) if shared else gradient for gradient, shared in pairs)

    def _reduced(self, gradient: Tensor) -> Tensor:
        total = runtime.all_reduce(gradient.detach(), "sum", self.group)
        return total / self.degree if self.mean else total


class PipelineGradReducer(Cell):
    """The gradients as they are: AutoParallel reduces those of a pipeline itself."""

    def __init__(self, parameters: Any, scale_sense: float = 1.0, opt_shard: bool | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.scale_sense = scale_sense

    def construct(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients, divided by the scale."""
        return tuple(grads) if self.scale_sense == 1.0 else tuple(one / self.scale_sense for one in grads)


class TrainOneStepCell(Cell):
    """`TrainOneStepCell(network, optimizer)(*batch)` trains one step and returns the loss.

    In data_parallel and hybrid_parallel the gradients are reduced over the ranks before the step, unless the network is
    an AutoParallel, which does so itself. A subclass may have a `construct` of its own, with `self.grad`,
    `self.weights`, `self.sens`, `self.grad_reducer` and `self.optimizer`.

    Args:
        network: returns its loss; a cell, or an AutoParallel of one.
        sens: factor of the gradients, for optimizers that take it out again; None is 1.
        return_grad: return (loss, {name: gradient}).
    """

    def __init__(
        self, network: nn.Module, optimizer: Any, sens: float | None = None, return_grad: bool = False
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self.sens = 1.0 if sens is None else sens
        self.return_grad = return_grad
        self.weights = ParameterTuple(one for group in optimizer.param_groups for one in group["params"])
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        self.parallel_mode = get_auto_parallel_context("parallel_mode")
        self.reducer_flag = self.parallel_mode in BY_HAND and not isinstance(network, AutoParallel)
        self._loss = in_context(_WithSum(network), network)
        self.grad_reducer: Any = DistributedGradReducer(self.weights) if self.reducer_flag else _as_they_are

    def construct(self, *inputs: Any) -> Any:
        """Train one step on a batch."""
        loss, gradients = self._gradients(inputs, self.sens)
        self.optimizer(gradients)
        if self.return_grad:
            return loss, {one.name: gradient for one, gradient in zip(self.weights, gradients, strict=True)}
        return loss

    def _gradients(self, inputs: Sequence[Any], sens: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        total, loss = self._loss(*inputs)
        is_scaled = isinstance(sens, Tensor) or sens != 1.0
        (total * sens if is_scaled else total).backward()
        weights = [one for group in self.optimizer.param_groups for one in group["params"]]
        gradients = tuple(torch.zeros_like(one) if one.grad is None else one.grad for one in weights)
        for one in weights:
            one.grad = None
        return loss.detach(), tuple(self.grad_reducer(gradients))


class _WithSum(nn.Module):
    """What is differentiated of a loss, and the loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.training = network.training

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        return with_sum(self.network)(*inputs)


def _as_they_are(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    return gradients


class FixedLossScaleUpdateCell(Cell):
    """A loss scale that stays."""

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__()
        self.loss_scale_value = loss_scale_value

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self.loss_scale_value

    def construct(self, loss_scale: Any, overflow: Any) -> Any:
        """Return whether the step is left out."""
        return overflow


class DynamicLossScaleUpdateCell(FixedLossScaleUpdateCell):
    """A loss scale that is divided at an overflow, and multiplied after `scale_window` steps without one."""

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__(loss_scale_value)
        self.scale_factor, self.scale_window, self.good_steps = scale_factor, scale_window, 0

    def construct(self, loss_scale: Any, overflow: Any) -> Any:
        """Change a scale (a tensor, in place) after a step; returns whether the step is left out."""
        self.good_steps = 0 if bool(overflow) else self.good_steps + 1
        found = next_scale(loss_scale, self.good_steps, self.scale_factor, self.scale_window, 1.0)
        loss_scale.copy_(torch.as_tensor(found))
        return overflow


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """One step with a scaled loss; a step whose gradients overflow is left out. Returns (loss, overflow, scale).

    Args:
        scale_sense: a cell that updates the scale, a number or a tensor.

    Raises:
        UsageError: another scale_sense.
    """

    def __init__(self, network: nn.Module, optimizer: Any, scale_sense: Any) -> None:
        super().__init__(network, optimizer)
        self.loss_scaling_manager: Any = scale_sense if isinstance(scale_sense, nn.Module) else None
        if self.loss_scaling_manager is not None:
            scale_sense = scale_sense.get_loss_scale()
        self.scale_sense = _as_scale("TrainOneStepWithLossScaleCell(scale_sense=...): a cell, ", scale_sense).clone()

    def construct(self, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Train one step on a batch."""
        scale = self.scale_sense.clone()
        loss, gradients = self._gradients(inputs, scale)
        gradients = tuple((one / scale).to(one.dtype) for one in gradients)
        overflow = self.process_loss_scale(self.get_overflow_status(None, gradients))
        if not bool(overflow):
            self.optimizer(gradients)
        return loss, overflow, scale

    def set_sense_scale(self, sens: Any) -> None:
        """Set the scale.

        Raises:
            UsageError: no number or tensor.
        """
        self.scale_sense.copy_(_as_scale("set_sense_scale(...): ", sens))

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> tuple[Any, Any]:
        """Return (status, input): nothing has to be prepared."""
        return pre_cond, compute_input

    def get_overflow_status(self, status: Any, compute_output: Sequence[Tensor]) -> Tensor:
        """Return whether a gradient of any rank is infinite or no number."""
        found = torch.stack([~torch.isfinite(one).all() for one in compute_output]).any()
        return runtime.all_reduce(found.float(), "max") > 0 if get_group_size() > 1 else found

    def process_loss_scale(self, overflow: Tensor) -> Tensor:
        """Let the scale follow; returns whether the step is left out."""
        if self.loss_scaling_manager is not None:
            return self.loss_scaling_manager(self.scale_sense, overflow)
        return overflow


def _as_scale(what: str, value: Any) -> Tensor:
    if not isinstance(value, int | float | Tensor):
        raise UsageError(f"{what}a number or a tensor, not {value!r}")
    return torch.as_tensor(value, dtype=torch.float32)


_OF_GRAD = "get_all=False get_by_list=False sens_param=False"


class ForwardValueAndGrad(Cell):
    """`ForwardValueAndGrad(network, weights, get_all, get_by_list, sens_param)(*inputs)` is (loss, gradients)."""

    @partial(taking, f"self network weights=None {_OF_GRAD}", owner="ForwardValueAndGrad")
    def __init__(self, network: Any, weights: Iterable[nn.Parameter] | None, **switches: bool) -> None:
        super().__init__(auto_prefix=False)
        if not callable(network):
            raise UsageError(f"ForwardValueAndGrad({network!r}): a cell or a function")
        self.network, self.weights = network, weights
        vars(self).update(switches)

    def construct(self, *inputs: Any) -> tuple[Any, Any]:
        """Return (loss, gradients)."""
        operation = GradOperation(self.get_all, self.get_by_list, self.sens_param)
        return operation.with_value(self.network, self.weights)(*inputs)


class WithGradCell(Cell):
    """The gradients of a network's weights, of its loss."""

    def __init__(self, network: nn.Module, loss_fn: Any = None, sens: Any = None) -> None:
        super().__init__(auto_prefix=False)
        if sens is not None:
            raise UsageError("WithGradCell(sens=...): leave it out; GradOperation(sens_param=True) takes one")
        self.network, self.loss_fn = network, loss_fn

    def construct(self, *inputs: Any) -> Any:
        """Return the gradients."""
        weights = [one for one in self.network.parameters() if one.requires_grad]
        if self.loss_fn is None:
            return GradOperation(get_by_list=True)(self.network, weights)(*inputs)
        *data, label = inputs
        joined = lambda *given: self.loss_fn(self.network(*given[:-1]), given[-1])  # noqa: E731
        return GradOperation(get_by_list=True)(joined, weights)(*data, label)


class ParameterUpdate(Cell):
    """Give a parameter the value that it is called with."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__(auto_prefix=False)
        self._target = [param]

    def construct(self, x: Tensor) -> Tensor:
        """Return the parameter."""
        return self._target[0].set_data(x)  # type: ignore[attr-defined]
