"""Ranks and their numbers as text."""

from __future__ import annotations

from collections.abc import Iterable

from ranktable.hosts.ranges import fold_numbers


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text with runs folded: [0, 1, 2, 5] -> "0-2, 5"."""
    return fold_numbers(ranks)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as the subject of a sentence: "rank 2", "ranks 0-2, 5"."""
    folded = fold_ranks(ranks)
    return f"rank {folded}" if folded.isdigit() else f"ranks {folded}"


def count_workers(number: int) -> str:
    """Return a number of workers: "1 worker", "2 workers", "0 workers"."""
    return "1 worker" if number == 1 else f"{number} workers"
