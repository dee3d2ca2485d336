"""First values that servers make in blocks have the bits of the whole table, drawn at once on a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msrun.runtime.server import remote
from msrun.runtime.server.remote import Fill, blocks, cut_table, make_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "args"), [("normal_", [0.5, 2.0]), ("uniform_", [-0.1, 0.3])])
@pytest.mark.parametrize(("rows", "width"), [(101, 7), (5, 3), (2, 5), (64, 8), (33, 1)])
def test_blocks_have_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, kind: str, args: list[Any], rows: int, width: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(remote, "BLOCK", 32)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    whole = getattr(torch.empty(rows, width, dtype=dtype), kind)(*args)
    after = torch.get_rng_state()
    for servers in (1, 3):
        found = torch.empty_like(whole)
        for piece in cut_table(rows, servers):
            part = torch.empty(len(piece.rows), width, dtype=dtype)
            end = make_all(part, piece, Fill(kind, args, 0, rows, state), rows)
            piece.of(found).copy_(part)
            assert torch.equal(end, after)
        assert torch.equal(found, whole)


def make_all(part: Tensor, piece: Any, fill: Fill, rows: int) -> Tensor:
    for first, last in blocks(fill, part.shape[1]):
        fill = replace(fill, generator_state=make_rows(part, piece, replace(fill, first=first, last=last), rows))
    return fill.generator_state
