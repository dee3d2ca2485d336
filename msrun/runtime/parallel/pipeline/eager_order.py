"""The eager 1F1B order: ranks begin with more forward passes, so that every message has a micro batch's time to travel.

In 1F1B a rank sends what the next one needs at that very moment: every delay, of the network or of a busy processor,
becomes idle time. Here pipeline rank r of P starts with min(m, 2 (P - r) - 1) forward passes instead of P - r, and
keeps one and the same distance afterwards. The bubble stays (P - 1) / (m + P - 1); rank 0 holds up to 2 P - 1 micro
batches' activations instead of P. Source: warm-up policy B of DAPPLE (Fan et al., PPoPP 2021).
"""

from __future__ import annotations

from collections.abc import Iterator


def eager_order(ranks: int, micro_size: int) -> list[list[tuple[str, int, int]]]:
    """Return per pipeline rank, which holds the stage of its own number, (F or B, stage, micro batch) in order."""
    return [list(_of_rank(rank, ranks, micro_size)) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, micro_size: int) -> Iterator[tuple[str, int, int]]:
    ahead = min(micro_size, 2 * (ranks - rank) - 1)
    for micro_batch in range(ahead):
        yield "F", rank, micro_batch
    for micro_batch in range(micro_size):
        yield "B", rank, micro_batch
        if micro_batch + ahead < micro_size:
            yield "F", rank, micro_batch + ahead
