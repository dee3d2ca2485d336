"""A share of the slow tests, others every day: MSRUN_SLOW_SHARE=12 keeps one of twelve, MSRUN_SLOW_SEED says which.

Slow tests vary what fast ones have shown already, in all combinations. A share of them at a time finds the same faults
some days later, at a part of the cost. Tests marked `random` draw others every day by themselves, and all stay.
"""

from __future__ import annotations

import os
import zlib

import pytest

SHARE = "MSRUN_SLOW_SHARE"
SEED = "MSRUN_SLOW_SEED"


def keep_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take away from `items` the tests that are not of this day's share."""
    share = int(os.environ.get(SHARE) or 1)
    if share > 1:
        kept = choose(items, share, int(os.environ.get(SEED) or 0))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def choose(items: list[pytest.Item], share: int, seed: int) -> set[pytest.Item]:
    """Return the tests that stay: those that are not slow, those that draw their cases, and one of `share` others.

    `share` seeds in a row keep all tests together.
    """
    return {
        item
        for item in items
        if item.get_closest_marker("random")
        or not item.get_closest_marker("slow")
        or zlib.crc32(item.nodeid.encode()) % share == seed % share
    }
