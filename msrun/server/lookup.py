"""Embeddings whose table is on the servers: a forward pass pulls the rows that the batch names, each once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.embedding.lookup import EmbeddingLookup
from msrun.runtime.embedding.row_lookup import look_up
from msrun.server.remote import RemoteParameter, named_rows, number_rows

Table = nn.Embedding | EmbeddingLookup


def check_embedding(module: Table) -> None:
    """Refuse settings that need the whole table in the forward pass."""
    if isinstance(module, EmbeddingLookup):  # scales the rows that it has looked up
        return
    wrong = "max_norm" if module.max_norm is not None else "scale_grad_by_freq" if module.scale_grad_by_freq else ""
    if wrong:
        raise StrategyError(f"{type(module).__name__}({wrong}=...) cannot be on parameter servers: leave {wrong} out")


def pull_rows(module: Table, remote: RemoteParameter) -> None:
    """Let an embedding look its rows up on the servers. At its first call the table goes there.

    Afterwards its weight keeps shape and type but no memory: every element reads as NaN. `cache` of the module is the
    worker's RowCache, or None.
    """
    remote.readers.add(module)
    if isinstance(module, EmbeddingLookup):
        source = functools.partial(_servers_of, module, "embedding_table", remote, None)
        module.look_up_elsewhere(source, remote.cache)
        return
    embedding = module

    def forward(indices: Tensor) -> Tensor:
        return look_up(embedding.weight, indices, _servers_of(embedding, "weight", remote, embedding.padding_idx))

    vars(module)["forward"] = forward
    vars(module)["cache"] = remote.cache


def _servers_of(module: nn.Module, name: str, remote: RemoteParameter, padding: int | None) -> _Servers:
    weight = module.get_parameter(name)
    if not remote.is_placed:
        remote.place(weight.detach())
        weight.data = empty_like_nan(weight)
    return _Servers(weight, remote, padding)


def empty_like_nan(weight: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the same shape and type in which every element is one and the same NaN."""
    one = torch.full((1,) * weight.dim(), float("nan"), dtype=weight.dtype, device=device or weight.device)
    return one.expand(weight.shape)


class _Servers:
    """The servers as the source of the rows of one lookup."""

    def __init__(self, weight: Tensor, remote: RemoteParameter, padding_idx: int | None) -> None:
        self._weight, self._remote, self._padding = weight, remote, padding_idx

    def number(self, rows: Tensor) -> Tensor:
        if rows.numel():
            low, high = (int(row) for row in torch.aminmax(rows))
            if not 0 <= low <= high < self._remote.shape[0]:
                raise IndexError(f"row {low} to {high} of an embedding with {self._remote.shape[0]} rows")
        return number_rows(self._remote.pieces, rows)

    def fetch(self, numbers: Tensor, place: Tensor) -> Tensor:
        return self._remote.pull(numbers).index_select(0, place)

    def give_back(self, numbers: Tensor, gradients: Tensor) -> Tensor:
        rows = named_rows(self._remote.pieces, numbers)
        if self._padding is not None:  # as of torch's embedding, the padding row has no gradient, not one of zeros
            keep = rows != self._padding
            rows, gradients = rows[keep], gradients[keep]
        device = self._weight.device
        shape = self._weight.shape  # not in the order of the rows, but in that in which they are sent
        return torch.sparse_coo_tensor(rows[None].to(device), gradients.to(device), shape, check_invariants=False)
