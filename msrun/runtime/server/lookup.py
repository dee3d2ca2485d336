"""An embedding whose table is on the servers: its forward pass pulls the rows that the batch names, each once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from msrun.errors import StrategyError
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
        names, inverse = torch.unique(indices.to("cpu", torch.int64), return_inverse=True)
        if names.numel() and not 0 <= int(names[0]) <= int(names[-1]) < remote.shape[0]:
            raise IndexError(f"row {int(names[0])} to {int(names[-1])} of an embedding with {remote.shape[0]} rows")
        rows = remote.pull(names).to(weight.device)
        padding = _place_of(module.padding_idx, names)
        linked = _Rows.apply(weight, rows, names, padding)
        found: Tensor = functional.embedding(inverse.to(weight.device), linked, padding)
        return found

    vars(module)["forward"] = forward


def empty_like_nan(weight: Tensor) -> Tensor:
    """Return a tensor of the same shape and type in which every element is one and the same NaN."""
    return torch.full((1,) * weight.dim(), float("nan"), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _place_of(padding_idx: int | None, names: Tensor) -> int | None:
    if padding_idx is None:
        return None
    place = int(torch.searchsorted(names, padding_idx))
    return place if place < names.numel() and int(names[place]) == padding_idx else None


class _Rows(torch.autograd.Function):
    """Forward: the rows pulled. Backward: their gradient as the sparse gradient of the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, names: Tensor, padding: int | None) -> Tensor:
        ctx.names, ctx.padding, ctx.shape = names, padding, weight.shape
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), names = gradients, ctx.names.to(gradients[0].device)
        if ctx.padding is not None:  # as of torch's embedding, the padding row has no gradient, not one of zeros
            keep = torch.arange(names.numel(), device=names.device) != ctx.padding
            gradient, names = gradient[keep], names[keep]
        sparse = torch.sparse_coo_tensor(names[None], gradient, ctx.shape, check_invariants=False, is_coalesced=True)
        return sparse, None, None, None
