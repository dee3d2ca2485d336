"""VerificationReport: how far the values of a step are from those of one process, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msrun.errors import VerificationError

SHOWN = 12
"""Rows of the table, when fewer values than that differ."""


@dataclass(frozen=True)
class Difference:
    """How far one value is from that of one process."""

    name: str
    absolute: float
    """Largest difference of an element; inf where one of both is not finite, or has no gradient."""
    relative: float
    """The same, divided by the largest element in one process."""
    allowed: float
    """Largest relative difference."""
    rank: int
    """Where it was found."""
    remark: str = ""
    ratio: float = math.nan
    """By what the value in one process has to be multiplied, if that gives this one."""

    @property
    def is_within(self) -> bool:
        """True when it is allowed."""
        return self.relative <= self.allowed

    @property
    def excess(self) -> float:
        """How many times as large as allowed it is; where nothing is allowed, inf for any difference."""
        return self.relative / self.allowed if self.allowed else math.inf if self.relative else 0.0


@dataclass(frozen=True)
class VerificationReport:
    """What `AutoParallel.verify` found; as text it is a table, the worst differences first."""

    world_size: int
    differences: tuple[Difference, ...]
    """Of every value, the worst one first."""
    note: str = ""
    """Why nothing was compared."""
    is_captured: bool = True
    """The step ran as a captured graph."""
    first_operator: str = ""
    """Of a captured graph, the first operator whose result differs, if one was found."""
    reason: str = ""
    """Of a step that is not captured, why it most likely differs."""

    @property
    def failures(self) -> tuple[Difference, ...]:
        """Those above their tolerance."""
        return tuple(d for d in self.differences if not d.is_within)

    @property
    def is_equal(self) -> bool:
        """True when no difference is above its tolerance."""
        return not self.failures

    def __str__(self) -> str:
        if self.note:
            return f"verify: {self.note}"
        count = len(self.differences)
        lines = [f"verify: {count - len(self.failures)} of {count} values of {self.world_size} ranks equal one process"]
        shown = self.differences[: max(SHOWN, min(len(self.failures), 4 * SHOWN))]
        width = max((len(d.name) for d in shown), default=0)
        lines.append(f"  {'value':<{width}}  {'largest difference':>18}  {'relative':>8}  {'allowed':>8}")
        for d in shown:
            verdict = "" if d.is_within else f"  DIFFERS on rank {d.rank}"
            remark = f" ({d.remark})" if d.remark else ""
            line = f"  {d.name:<{width}}  {d.absolute:>18.2e}  {d.relative:>8.1e}  {d.allowed:>8.0e}{verdict}{remark}"
            lines.append(line)
        if count > len(shown):
            lines.append(f"  {count - len(shown)} more, with smaller differences")
        return "\n".join(lines)

    def raise_if_different(self) -> None:
        """Raise when a difference is above its tolerance.

        Raises:
            VerificationError: it is; the report is its `report`.
        """
        if self.is_equal:
            return
        raise VerificationError(f"{self.describe_difference()}; {self.remedy}", report=self)

    def describe_difference(self) -> str:
        """Return in one line what differs, the loss before other values."""
        failures = self.failures
        first = next((d for d in failures if d.name == "loss"), failures[0])
        how = first.remark or f"by {first.relative:.1e} of its largest element (allowed {first.allowed:.0e})"
        where = f"; the first operator that differs is {self.first_operator}" if self.first_operator else ""
        ratio = first.ratio
        if first.name.startswith("gradient ") and all(math.isclose(d.ratio, ratio, rel_tol=1e-2) for d in failures):
            where += f"; the results are right, and the gradients {ratio:.3g} times as large as they should be"
        count = f"{len(failures)} of {len(self.differences)} values"
        return f"{count} differ from one process, first {first.name}: {how}{where}"

    @property
    def remedy(self) -> str:
        """What to do about a difference."""
        if self.is_captured:
            return (
                "do not trust this training: give that operator or its layer another strategy, or, if the loss is a "
                'mean over rows, use parallel_mode="data_parallel", which captures nothing'
            )
        return f'{self.reason}; parallel_mode="semi_auto" computes loss and buffers over the rows of all ranks'


def worst_of(found: Sequence[Sequence[Difference]]) -> tuple[Difference, ...]:
    """Return for every value the worst difference of all ranks, the worst values first."""
    worst: dict[str, Difference] = {}
    for difference in (d for of_rank in found for d in of_rank):
        known = worst.get(difference.name)
        if known is None or difference.excess > known.excess:
            worst[difference.name] = difference
    return tuple(sorted(worst.values(), key=lambda d: -d.excess))
