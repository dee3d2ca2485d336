"""Ranks in words."""

from __future__ import annotations

from collections.abc import Iterable


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text with runs folded: [0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
