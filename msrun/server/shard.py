"""One piece of a parameter on a server: its values, its optimizer, and the gradients that wait for others.

A step is made when every worker has sent its gradient of it: their mean, as data parallel has it, summed in the order
of the ranks. A worker without a gradient counts as zero; where nobody has one there is no step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msrun.errors import ParallelError
from msrun.runtime import optim
from msrun.runtime.execute.gradients import row_gradient
from msrun.runtime.parts.on_servers import VALUE

BUILDERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "LazyAdam": optim.LazyAdam,
    "FTRL": optim.FTRL,
}
"""Name -> the class that steps on a server. Momentum is torch's SGD, too."""


def name_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the name under which servers know an optimizer."""
    step = inspect.unwrap(type(optimizer).step)
    for name, known in reversed(BUILDERS.items()):  # AdamW is an Adam
        if isinstance(optimizer, known) and step is inspect.unwrap(known.step):
            return name
    raise ParallelError(
        f"{type(optimizer).__name__} cannot step parameters on servers: use Momentum, {', '.join(BUILDERS)} of "
        "msrun.runtime.optim or torch.optim, or keep its parameters on the workers"
    )


def describe_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of an optimizer as JSON has them."""
    described = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not _is_plain(value):
            raise ParallelError(
                f"the optimizer's setting {key} is a {type(value).__name__}, which cannot be sent to servers: give a "
                "number"
            )
        described[key] = value
    return described


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def build_optimizer(name: str, piece: Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of one piece with the worker's settings."""
    if name not in BUILDERS:
        raise ParallelError(f"optimizer {name!r}: servers know {', '.join(BUILDERS)}")
    build: Any = optim.Adam if name == "Adam" else BUILDERS[name]  # ours knows torch's formula and MindSpore's
    optimizer: torch.optim.Optimizer = build([{**group, "params": [piece]}])
    return optimizer


def steps_rows_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether rows without gradient stay as they are also after a step with a dense gradient."""
    group = optimizer.param_groups[0]
    return isinstance(optimizer, torch.optim.SGD) and not group["momentum"] and not group["weight_decay"]


@torch.no_grad()
def step_rows(optimizer: torch.optim.Optimizer, rows: Tensor, values: Tensor, *, share: float) -> None:
    """Step rows of the piece of an optimizer that `steps_rows_alone`: w = w - lr share g, as torch's SGD.

    torch's sum of a sparse tensor takes five times as long. Afterwards `values` are others.
    """
    group = optimizer.param_groups[0]
    rate = group["lr"] * share * (1 if group["maximize"] else -1)
    group["params"][0].index_add_(0, rows, values.mul_(rate))


@dataclass(frozen=True)
class Gradient:
    """What one worker sends for one step."""

    values: Tensor
    """Of the piece's shape, or with `rows` of these rows."""
    rows: Tensor | None = None
    """Own row numbers, each once; None = all."""
    is_sparse: bool = False
    """The worker's own gradient was sparse: the optimizer gets it so."""
    is_lent: bool = False
    """Its memory is the worker's, who writes there again after its next request."""

    def kept(self) -> Gradient:
        """Return it in memory of its own."""
        rows = None if self.rows is None else self.rows.clone()
        return Gradient(self.values.clone(), rows, is_sparse=self.is_sparse)


class Shard:
    """One piece. Owned by the server's event loop."""

    def __init__(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, workers: int, staleness: int) -> None:
        """
        Args:
            label: names the parameter in errors.
            shape: of one dimension or more.
            workers: how many send gradients.
            staleness: how many steps of others a worker's pull may lack.
        """
        self.label = label
        self.values = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.is_filled = False
        self.version = 0
        """Steps made."""
        self.staleness = staleness
        self.pushed = [0] * workers
        """Gradients that have come, by rank."""
        self._waiting: dict[int, dict[int, Gradient | None]] = {}
        """Step -> rank -> gradient."""
        self._fault = ""
        self._group: dict[str, Any] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._name = ""

    # -- steps ----------------------------------------------------------------------------------------------------

    def configure(self, name: str, group: dict[str, Any]) -> None:
        """Take an optimizer; every worker names it."""
        if self._optimizer is None:
            self._optimizer, self._name = build_optimizer(name, self.values, group), name
        elif name != self._name:
            raise ParallelError(f"{self.label}: one worker trains it with {self._name}, another with {name}")

    def push(self, rank: int, gradient: Gradient | None, group: dict[str, Any]) -> None:
        """Take a worker's gradient of its next step; `advance` follows, before any other worker's.

        Args:
            group: the optimizer's settings for this step; those of the last worker count, and all send the same.
        """
        self.check_steps()
        if self._optimizer is None and gradient is not None:
            raise ParallelError(f"{self.label}: a gradient before the optimizer")
        if gradient is not None:
            self._check(gradient)
        self._waiting.setdefault(self.pushed[rank], {})[rank] = gradient
        self._group = group
        self.pushed[rank] += 1

    def check_steps(self) -> None:
        """Raise what a step has raised."""
        if self._fault:
            raise ParallelError(self._fault)

    def advance(self, rank: int) -> None:
        """Step if the gradient of this worker was the last that was missing. Whoever reads next hears of an error."""
        while len(self._waiting.get(self.version, {})) == len(self.pushed):
            try:
                self._step(self._waiting.pop(self.version), self._group)
            except Exception as error:  # noqa: BLE001 - whatever the optimizer raises
                self._fault = f"{self.label}: its step failed: {type(error).__name__}: {error}"
            self.version += 1
        of_step = self._waiting.get(self.pushed[rank] - 1, {})
        gradient = of_step.get(rank)
        if gradient is not None and gradient.is_lent:
            of_step[rank] = gradient.kept()

    def _check(self, gradient: Gradient) -> None:
        values, rows = gradient.values, gradient.rows
        shape = self.values.shape if rows is None else (rows.numel(), *self.values.shape[1:])
        if values.shape != torch.Size(shape) or values.dtype != self.values.dtype:
            raise ParallelError(
                f"{self.label}: a gradient of shape {tuple(values.shape)} and {values.dtype} for values of shape "
                f"{tuple(shape)} and {self.values.dtype}"
            )
        if rows is not None:
            self._check_rows(rows)

    def _check_rows(self, rows: Tensor) -> None:
        count = len(self.values)
        is_wrong = rows.dtype != torch.int64 or rows.dim() != 1
        if is_wrong or (rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < count):
            raise ParallelError(f"{self.label}: rows that a piece of {count} rows does not have")

    def _step(self, by_rank: dict[int, Gradient | None], group: dict[str, Any]) -> None:
        optimizer = self._optimizer
        gradients = [gradient for _, gradient in sorted(by_rank.items()) if gradient is not None]
        if not gradients:
            return
        assert optimizer is not None  # `push` has looked
        optimizer.param_groups[0].update(group)
        of_rows = [(gradient.rows, gradient.values) for gradient in gradients if gradient.rows is not None]
        if len(of_rows) == len(gradients) and steps_rows_alone(optimizer):
            for rows, values in of_rows:
                step_rows(optimizer, rows, values, share=1 / len(by_rank))
            return
        if len(of_rows) == len(gradients) and all(gradient.is_sparse for gradient in gradients):
            rows, values = (torch.cat(parts) for parts in zip(*of_rows, strict=True))
            self.values.grad = row_gradient(rows, values.div_(len(by_rank)), self.values.shape)
        else:
            self.values.grad = self._dense_mean(gradients, len(by_rank))
        optimizer.step()
        self.values.grad = None

    def _dense_mean(self, gradients: list[Gradient], workers: int) -> Tensor:
        total = torch.zeros_like(self.values, requires_grad=False)
        for gradient in gradients:
            if gradient.rows is None:
                total += gradient.values
            else:
                total.index_add_(0, gradient.rows, gradient.values)
        return total.div_(workers)

    def is_ready(self, rank: int, *, staleness: int | None = None) -> bool:
        """Return whether a worker may read: the values are there, with all steps that it may not lack."""
        allowed = self.staleness if staleness is None else staleness
        return self.is_filled and self.version >= self.pushed[rank] - allowed

    def waits_for(self, rank: int) -> set[int]:
        """Return the workers whose gradients a reading worker waits for."""
        if not self.is_filled:
            return {0}
        wanted = self.pushed[rank] - self.staleness
        return {other for other, count in enumerate(self.pushed) if count < wanted}

    # -- values and state -----------------------------------------------------------------------------------------

    def read_rows(self, rows: Tensor, find_room: Callable[[int], Tensor | None]) -> Tensor:
        """Return values by own row numbers.

        Args:
            find_room: gives memory for a result of so many bytes, or None.
        """
        self._check_rows(rows)
        values = self.values.detach()
        room = find_room(rows.numel() * values[0].nbytes)
        if room is None:
            return values.index_select(0, rows)
        return torch.index_select(values, 0, rows, out=room.view(values.dtype).view(-1, *values.shape[1:]))

    def read_all(self) -> Tensor:
        """Return all values; a copy where a step of others may change them while they are on their way."""
        values = self.values.detach()
        return values.clone() if self.staleness else values

    def read(self, field: str, begin: int, end: int) -> Tensor:
        """Return own rows of the values or of a tensor of the state that has their shape."""
        return self._find(field)[begin:end].clone()

    def write(self, field: str, begin: int, values: Tensor) -> None:
        """Replace own rows of the values or of a tensor of the state, which is made if it is not there."""
        if field != VALUE and field not in self._state:
            self._state[field] = torch.zeros_like(self.values, dtype=values.dtype, requires_grad=False)
        part = self._find(field)[begin : begin + len(values)]
        if part.shape != values.shape:
            raise ParallelError(f"{self.label}: {tuple(values.shape)} written to {tuple(part.shape)} of {field}")
        part.copy_(values)

    def describe_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state of its optimizer: numbers as they are, tensors of its own shape by name."""
        tensors = {
            key: value
            for key, value in self._state.items()
            if isinstance(value, Tensor) and value.shape == self.values.shape
        }
        return {key: value for key, value in self._state.items() if key not in tensors}, tensors

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        """Replace what of its optimizer's state has no shape, such as the count of steps."""
        self._state.update(numbers)

    @property
    def _state(self) -> dict[str, Any]:
        if self._optimizer is None:
            raise ParallelError(f"{self.label}: it has no optimizer yet")
        state: dict[str, Any] = self._optimizer.state[self.values]
        return state

    def _find(self, field: str) -> Tensor:
        found = self.values.detach() if field == VALUE else self._state.get(field)
        if not isinstance(found, Tensor):
            raise ParallelError(f"{self.label}: there is no {field} in the state of its optimizer")
        return found
