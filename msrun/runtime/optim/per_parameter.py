"""What optimizers have in common that step one parameter after the other, of a sparse gradient its rows alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msrun.runtime.execute.row_gradients import coalesced
from msrun.runtime.optim.base import Optimizer
from msrun.runtime.tensors.plain_tensors import plain_tensors

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
