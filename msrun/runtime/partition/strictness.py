"""Strict mode: traffic between layouts that the user did not ask for is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msrun.errors import StrategyError


@dataclass(frozen=True)
class Redistribution:
    """One value moved from the layout of its producer to that of a reader."""

    producer: str
    consumer: str
    source: tuple[int, ...]
    """Parts per dimension."""
    target: tuple[int, ...]
    bytes: int
    """That one rank receives, forward and backward."""
    asked: bool
    """True when the user asked for it: an out_strategy, an in_strategy of a region, or the layout of the results."""


def refuse_redistributions(redistributions: Sequence[Redistribution]) -> None:
    """Refuse the first redistribution that nobody asked for.

    Raises:
        StrategyError: there is one; names both ends, their layouts, the bytes and what to write.
    """
    hidden = [one for one in redistributions if one.bytes and not one.asked]
    if not hidden:
        return
    first = hidden[0]
    fix = f"give {first.producer} out_strategy={(first.target,)}"
    if first.producer.startswith("input "):
        fix = f"pass it so with dataset_strategy, as {first.target}"
    elif first.producer.startswith("parameter "):
        fix = "give the operators that share it strategies that agree"
    others = f" ({len(hidden) - 1} more like it)" if len(hidden) > 1 else ""
    raise StrategyError(
        f"strict: {first.producer} gives {first.source} and {first.consumer} reads {first.target}, which moves "
        f"{first.bytes} bytes to each rank and step{others}; {fix}, or give both ends strategies that agree"
    )
