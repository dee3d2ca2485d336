"""Rows that operators exchange with other ranks themselves, while they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from msrun.runtime.sharding.layout import Axes, Mesh


class Arriving(Protocol):
    """Rows on their way."""

    def wait(self) -> Tensor:
        """Return them."""


class Carrier(Protocol):
    """Who sends rows; `execute` has one."""

    def start(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh, axes: Axes, what: str
    ) -> Arriving:
        """Send each rank along some axes its rows: (sum of sent, ..) -> (sum of received, ..).

        Args:
            rows: contiguous, in rank order; nobody may write to them before the wait.
            what: name of the message.
        """

    def count(self, what: str, nbytes: int) -> None:
        """Count what an operator sends, all its messages as one."""


carrier: Carrier
"""Set when `execute` is loaded."""
