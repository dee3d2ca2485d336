"""Whether all ranks hold the same: what is compared between them is a digest of every bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from msrun.runtime.parallel.parameters.storage import _CHUNK_BYTES, digest

INF, NAN = float("inf"), float("nan")
LONG = torch.zeros(_CHUNK_BYTES + 3, dtype=torch.uint8)


def changed(tensor: Tensor, index: int, value: float) -> Tensor:
    other = tensor.clone()
    other[index] = value
    return other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([-INF, 1.0]), torch.tensor([-INF, 2.0])),
        (torch.tensor([-INF, 1.0]), torch.tensor([1.0, -INF])),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
        (torch.tensor([1.0, 2.0]).double(), -torch.tensor([1.0, 2.0]).double()),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True])),
        (LONG, changed(LONG, -1, 1)),
        (changed(LONG, 0, 1), changed(LONG, _CHUNK_BYTES - 1, 1)),
        (changed(LONG, 0, 1), changed(LONG, _CHUNK_BYTES, 1)),
    ],
)
def test_tensors_of_other_bits_have_otherdigests(one: Tensor, other: Tensor) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(one.clone())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([NAN, -INF, INF]),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, 3j]),
        torch.ones(5, dtype=torch.bfloat16),
    ],
)
def testdigest_takes_any_type_and_equal_values_are_equal_wherever_they_lie(tensor: Tensor) -> None:
    odd = torch.zeros(len(tensor.reshape(-1)) + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
    assert digest(tensor) == digest(odd) == digest(tensor.unsqueeze(-1).expand(*tensor.shape, 2)[..., 0])
