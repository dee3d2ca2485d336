"""Ranks in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.ranks import fold_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 5], "0-2, 5"),
        ([5, 1, 0], "0-1, 5"),
        ([1, 3, 5], "1, 3, 5"),
    ],
)
def test_ranks_are_folded(ranks: list[int], text: str) -> None:
    assert fold_ranks(ranks) == text


@given(st.sets(st.integers(0, 2000)))
def test_folded_ranks_unfold_to_the_same(ranks: set[int]) -> None:
    unfolded: list[int] = []
    for run in filter(None, fold_ranks(list(ranks)).split(", ")):
        first, _, last = run.partition("-")
        unfolded += range(int(first), int(last or first) + 1)
    assert unfolded == sorted(ranks)
