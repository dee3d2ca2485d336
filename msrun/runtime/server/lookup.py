"""An embedding whose table is on the servers: its forward pass pulls the rows that the batch names, each once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.embedding.row_source import look_up
from msrun.runtime.execute.row_gradients import row_gradient
from msrun.runtime.server.remote import RemoteParameter


def check_embedding(module: nn.Embedding) -> None:
    """Refuse settings that need the whole table in the forward pass.

    Raises:
        StrategyError: max_norm or scale_grad_by_freq.
    """
    wrong = "max_norm" if module.max_norm is not None else "scale_grad_by_freq" if module.scale_grad_by_freq else ""
    if wrong:
        raise StrategyError(f"{type(module).__name__}({wrong}=...) cannot be on parameter servers: leave {wrong} out")


def replace_forward(module: nn.Embedding, remote: RemoteParameter) -> None:
    """Let an embedding look its rows up on the servers. At its first call the table goes there.

    Afterwards its weight keeps shape and type but no memory: every element reads as NaN.
    """

    def forward(indices: Tensor) -> Tensor:
        weight = module.weight
        if not remote.is_placed:
            remote.place(weight.detach())
            weight.data = empty_like_nan(weight)
        return look_up(weight, indices, _Servers(weight, remote, module.padding_idx))

    vars(module)["forward"] = forward


def empty_like_nan(weight: Tensor) -> Tensor:
    """Return a tensor of the same shape and type in which every element is one and the same NaN."""
    return torch.full((1,) * weight.dim(), float("nan"), dtype=weight.dtype, device=weight.device).expand(weight.shape)


class _Servers:
    """The servers as the source of the rows of one lookup."""

    def __init__(self, weight: Tensor, remote: RemoteParameter, padding_idx: int | None) -> None:
        self._weight, self._remote, self._padding = weight, remote, padding_idx

    def fetch(self, rows: Tensor) -> Tensor:
        rows = rows.to("cpu")
        if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < self._remote.shape[0]:
            raise IndexError(f"row {int(rows[0])} to {int(rows[-1])} of an embedding with {self._remote.shape[0]} rows")
        return self._remote.pull(rows)

    def give_back(self, rows: Tensor, gradients: Tensor) -> Tensor:
        if self._padding is not None:  # as of torch's embedding, the padding row has no gradient, not one of zeros
            keep = rows != self._padding
            rows, gradients = rows[keep], gradients[keep]
        device = self._weight.device
        return row_gradient(rows.to(device), gradients.to(device), self._weight.shape)
