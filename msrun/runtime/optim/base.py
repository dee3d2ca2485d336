"""Optimizer: the base of optimizers that can also be called with gradients, as MindSpore's are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msrun.errors import StrategyError
from msrun.runtime.execute.gradients import coalesced
from msrun.runtime.optim.host_steps import find_offload, offload
from msrun.runtime.optim.host_weights import MASTER, Copies, held_gradient, local_gradient, tensor_bytes
from msrun.runtime.tensors.plain_tensors import local_part, plain_tensors

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryOf:
    """Bytes on one side."""

    weights: int = 0
    """On the host: the wide copies."""
    gradients: int = 0
    """That are held at this moment."""
    state: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.state


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of this rank; `str()` is a table."""

    elements: int
    """Of this rank's parts of the parameters."""
    device: MemoryOf
    host: MemoryOf
    copied: Copies
    """For the last step."""

    def __str__(self) -> str:
        rows = [("", "device", "host")]
        for name in ("weights", "gradients", "state", "total"):
            device, host = (_words(getattr(side, name), self.elements) for side in (self.device, self.host))
            rows.append((name, device, host))
        rows.append(("copied in a step", _mib(self.copied.to_device), _mib(self.copied.to_host)))
        return "\n".join(f"{name:<18}{device:<28}{host}".rstrip() for name, device, host in rows)


def memory_of(optimizer: torch.optim.Optimizer) -> OptimizerMemory:
    """Return what the training of an optimizer's parameters holds on this rank, and what its last step has copied.

    Gradients are those held now: call it between the backward pass and `zero_grad()`. Where the device is the CPU,
    device and host are counted apart all the same.
    """
    host = find_offload(optimizer)
    chosen = host.chosen(optimizer) if host is not None else set()
    sides = [[0, 0, 0], [0, 0, 0]]
    elements = 0
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        on_host = id(parameter) in chosen
        sides[0][0] += tensor_bytes(parameter)
        elements += tensor_bytes(parameter) // parameter.element_size()
        if host is not None:
            sides[on_host][0] += host.weights.copy_bytes(parameter)
        gradient = local_gradient(parameter)
        if gradient is not None:
            sides[held_gradient(parameter) is not None][1] += tensor_bytes(gradient)
        state = optimizer.state.get(parameter, {})
        sides[on_host][2] += sum(tensor_bytes(value) for key, value in state.items() if key != MASTER)
    return OptimizerMemory(
        elements, MemoryOf(*sides[0]), MemoryOf(*sides[1]), host.last_step if host is not None else Copies()
    )


def _words(count: int, elements: int) -> str:
    return f"{_mib(count)} ({count / elements:.2f} B/element)" if elements else _mib(count)


def _mib(count: int) -> str:
    return f"{count / MIB:.2f} MiB"


def check_number(optimizer: str, name: str, value: Any, *, least: float, most: float | None = None) -> None:
    """Refuse what is no number of at least `least` and, if given, below `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < least or (most is not None and value >= most):
        limit = f"{least:g} or more" + (f" and below {most:g}" if most is not None else "")
        raise StrategyError(f"{optimizer}({name}={value!r}): must be a number, {limit}")


def adam_settings(optimizer: str, lr: Any, betas: Any, eps: Any, weight_decay: Any) -> dict[str, Any]:
    """Return the settings that all relatives of Adam have, as the defaults of its groups."""
    settings = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    for name, value in settings.items():
        check_number(optimizer, name, value, least=0.0)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise StrategyError(f"{optimizer}(betas={betas!r}): must be two numbers")
    for value in betas:
        check_number(optimizer, "betas", value, least=0.0, most=1.0)
    return {**settings, "betas": betas}


TARGETS = ("cpu", "device")


class Optimizer(torch.optim.Optimizer):
    """Base of optimizers that can be called: `optimizer(gradients)` gives every parameter its gradient and steps.

    Write your own as with torch's base: `super().__init__(params, defaults)` and `step()`, which reads `.grad`.

    Args:
        target: where the optimizer works: "device", that of the weights, or "cpu", the host (`offload`). Upper case
            will do.

    Raises:
        StrategyError: another target.
    """

    def __init__(self, *args: Any, target: str = "device", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.target = target

    @property
    def target(self) -> str:
        """Where the optimizer works, "device" or "cpu"; may be set between steps, its state moves along."""
        return TARGETS[find_offload(self) is None]

    @target.setter
    def target(self, target: str) -> None:
        word = target.lower() if isinstance(target, str) else target
        if word not in TARGETS:
            raise StrategyError(f"{type(self).__name__}(target={target!r}): must be {' or '.join(TARGETS)}")
        known = find_offload(self)
        if word == "cpu" and known is None:
            offload(self)
        elif word == "device" and known is not None:
            known.bring_back(self)

    def memory(self) -> OptimizerMemory:
        """Return what the training of the parameters holds on this rank, and what its steps copy; `print` it."""
        return memory_of(self)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Step once with these gradients, one per parameter in the order given to the constructor.

        Raises:
            StrategyError: another number of gradients, or one of another shape than its parameter.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, gradient in zip(parameters, check_gradients(parameters, gradients), strict=True):
            parameter.grad = gradient
        self.step()
        for parameter in parameters:
            parameter.grad = None

    def run_closure(self, closure: Callable[[], Any] | None) -> Any:
        """Return what the closure of a step computes, with gradients switched on; None without one."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


def check_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of an optimizer that is called."""
    gradients = list(gradients)
    if len(gradients) != len(parameters):
        raise StrategyError(
            f"optimizer: {len(gradients)} gradients for {len(parameters)} parameters; give one for each, in order"
        )
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if local_part(gradient).shape != local_part(parameter).shape:
            raise StrategyError(
                f"optimizer: gradient {index} has shape {tuple(gradient.shape)} but its parameter "
                f"{tuple(parameter.shape)}; give the gradients that value_and_grad returned"
            )
    return gradients


ROWS_BYTES = 1 << 16
"""Of a sparse gradient, so much is used at once: its rows are still in the processor's cache when they are put back."""


class PerParameter(Optimizer):
    """Base: a subclass makes the state of a parameter and changes tensors of one shape.

    Of a sparse gradient, as `nn.Embedding(sparse=True)` has, `change` gets its rows alone; others stay bit for bit.
    """

    changes_named_rows = True
    """Of a sparse gradient; what works on the host then copies these rows alone."""

    @abstractmethod
    def make_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter before its first step: tensors of its shape, and numbers."""

    @abstractmethod
    def change(self, weight: Tensor, gradient: Tensor, tables: dict[str, Tensor], state: Any, group: Any) -> None:
        """Change weights and `tables`, the tensors of the state, in place; all are of the gradient's shape."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once with the gradients in `.grad`."""
        loss = self.run_closure(closure)
        for group in self.param_groups:
            with plain_tensors():  # what it does is right on the parts of cut parameters
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.make_state(parameter, group))
        if "step" in state:
            state["step"] += 1
        tables = {key: value for key, value in state.items() if key != "step"}
        if not gradient.is_sparse:
            self.change(parameter, self._decayed(gradient, parameter, group), tables, state, group)
            return
        gradient = coalesced(gradient)
        count = max(1, ROWS_BYTES * len(gradient.values()) // max(1, gradient.values().nbytes))
        for rows, values in zip(gradient.indices()[0].split(count), gradient.values().split(count), strict=True):
            weight, some = parameter.index_select(0, rows), {key: t.index_select(0, rows) for key, t in tables.items()}
            self.change(weight, self._decayed(values, weight, group), some, state, group)
            parameter.index_copy_(0, rows, weight)
            for key, table in tables.items():
                table.index_copy_(0, rows, some[key])

    @staticmethod
    def _decayed(gradient: Tensor, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient.add(weight, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
