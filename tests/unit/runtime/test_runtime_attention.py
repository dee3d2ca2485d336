"""Attention with dropout in blocks of query rows: the numbers of one block, without a tensor of all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from msrun.runtime.nn import dropout
from msrun.runtime.nn.random_bits import Box, DrawKey, keep_mask

L, S, HEADS, E = 12, 10, 4, 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.arange(L)[:, None] > torch.arange(S)},
    "mask of keys": {"attn_mask": torch.arange(S) > 3},
    "bias of a head": {"attn_mask": torch.linspace(-1, 1, HEADS * L * S, dtype=torch.float64).view(HEADS, L, S)},
    "grouped heads": {"enable_gqa": True},
}


def attend(call: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    box = Box.whole((2, HEADS, L, S))

    def keep(rows: slice) -> Tensor:
        return keep_mask(DrawKey(7, 3), 1, 0.4, box.narrow(-2, rows), 0, query.device)

    words = {"attn_mask": None, "is_causal": False, "enable_gqa": False} | call
    return dropout.attend(query, key, value, dropout_p=0.4, scale=None, keep=keep, **words)


def tensors(call: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    heads = 2 if "enable_gqa" in call else HEADS
    shapes = [(2, HEADS, L, E), (2, heads, S, E), (2, heads, S, E)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients_of_gradients(call: dict[str, Any], given: list[Tensor]) -> list[Tensor]:
    result = attend(call, *given)
    first = torch.autograd.grad(result.square().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(value.square().sum() for value in first), given)
    return [result.detach(), *(value.detach() for value in first), *second]


@pytest.mark.parametrize("call", CASES.values(), ids=CASES.keys())
def test_blocks_give_what_one_block_gives(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(call)
    whole = gradients_of_gradients(call, given)
    monkeypatch.setattr(dropout, "BLOCK_ELEMENTS", 5 * 2 * HEADS * S)
    for part, expected in zip(gradients_of_gradients(call, given), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def test_no_tensor_of_all_weights_is_made_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "BLOCK_ELEMENTS", 3 * 2 * HEADS * S)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor))
            return result

    with Watch():
        attend({"is_causal": True}, *tensors({})).sum().backward()
    assert max(sizes) < 2 * HEADS * L * S
