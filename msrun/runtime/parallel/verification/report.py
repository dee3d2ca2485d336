"""VerificationReport: how far the values of a step are from those of one process, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.errors import VerificationError
from msrun.runtime import world
from msrun.runtime.parts.part import Part

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
        reason = self.reason
        if all(math.isclose(d.ratio, 1 / self.world_size, rel_tol=1e-2) for d in self.failures):
            reason = (
                "a loss that is a sum over its rows, or has one value a row, has gradients that are means over ranks "
                "of such sums; take the mean over the rows, or have gradients summed (gradients_mean=False)"
            )
        return f'{reason}; parallel_mode="semi_auto" computes loss and buffers over the rows of all ranks'


def worst_of(found: Sequence[Sequence[Difference]]) -> tuple[Difference, ...]:
    """Return for every value the worst difference of all ranks, the worst values first."""
    worst: dict[str, Difference] = {}
    for difference in (d for of_rank in found for d in of_rank):
        known = worst.get(difference.name)
        if known is None or difference.excess > known.excess:
            worst[difference.name] = difference
    return tuple(sorted(worst.values(), key=lambda d: -d.excess))


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""Largest difference allowed, by the lowest precision in which a value is computed, relative to the largest element of
the value in one process: of both half precisions, ten roundings and more. Other types (integers, bool) must be
equal."""
SMALL = 1e-2
"""A gradient whose largest element is below this share of the network's largest one is measured against that share, or
against one within which a rounding of the largest one is allowed: a bias before a normalisation has a gradient of
rounding errors alone."""
NOISE = 3.0
"""A gradient may differ by so many times what it changes in one process when every parameter is rounded otherwise: one
that is zero but for rounding, such as that of a bias before a normalisation, is known no better there either."""


@dataclass(frozen=True)
class Tolerance:
    """How large a relative difference may be."""

    chosen: float | None = None
    """By the user, for every type of numbers."""
    precision: torch.dtype | None = None
    """Of mixed precision."""

    def allowed(self, dtype: torch.dtype) -> float:
        """Return the largest difference allowed of values of a type."""
        if dtype not in TOLERANCES:
            return 0.0
        if self.chosen is not None:
            return self.chosen
        return max(TOLERANCES[dtype], TOLERANCES[self.precision] if self.precision else 0.0)

    @property
    def small(self) -> float:
        """The share of the network's largest gradient that a gradient is at least measured against."""
        if self.precision is None or self.chosen is not None:
            return SMALL
        return max(SMALL, torch.finfo(self.precision).eps / TOLERANCES[self.precision])


def find_difference(
    name: str, found: Tensor | None, right: Tensor | None, tolerance: Tolerance, *, floor: float = 0.0
) -> Difference:
    """Compare a value of this rank with that of one process.

    Args:
        floor: what the difference is at least measured against; else against the largest element in one process.
    """
    rank = world.get_rank()
    if found is None or right is None:
        if found is right:
            return Difference(name, 0.0, 0.0, 0.0, rank)
        remark = "None, but not in one process" if found is None else "None in one process, but not here"
        return Difference(name, math.inf, math.inf, 0.0, rank, remark)
    local = found.to_local() if isinstance(found, DTensor | Part) else found
    if local.shape != right.shape:
        remark = f"of shape {tuple(local.shape)}, in one process {tuple(right.shape)}"
        return Difference(name, math.inf, math.inf, 0.0, rank, remark)
    absolute = _distance(local, right)
    scale = max(largest(right), floor)
    relative = 0.0 if absolute == 0 else absolute / scale if scale else math.inf
    allowed = tolerance.allowed(right.dtype)
    ratio = math.nan if relative <= allowed else _ratio(local, right, allowed * scale)
    return Difference(name, absolute, relative, allowed, rank, ratio=ratio)


def _ratio(found: Tensor, right: Tensor, allowed: float) -> float:
    """Return by what the right value has to be multiplied to become the found one; nan if nothing does that."""
    first, second = found.detach().double(), right.detach().double()
    ratio = float((first * second).sum() / second.square().sum())
    return ratio if _distance(first, second * ratio) <= allowed * max(1.0, abs(ratio)) else math.nan


@contextmanager
def rounded_otherwise(parameters: Iterable[Tensor], precision: torch.dtype | None) -> Iterator[None]:
    """Move every element of these parameters by about one rounding of the lowest precision in which they are used."""
    before = [(p, p.detach().clone()) for p in parameters if p.is_floating_point()]
    for number, (parameter, value) in enumerate(before):
        eps = max(torch.finfo(dtype).eps for dtype in (value.dtype, precision) if dtype is not None)
        generator = torch.Generator(value.device).manual_seed(number)
        signs = torch.randint(0, 2, value.shape, generator=generator, device=value.device) * 2 - 1
        parameter.detach().copy_(value * (1 + eps * signs.to(value.dtype)))
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.detach().copy_(value)


def gradient_noise(first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the largest difference of each gradient of two runs that differ by rounding; none where it is infinite."""
    pairs = ((name, gradient, second.get(name)) for name, gradient in first.items())
    found = {name: _distance(one, other) for name, one, other in pairs if one is not None and other is not None}
    return {name: distance for name, distance in found.items() if math.isfinite(distance)}


def largest(tensor: Tensor) -> float:
    """Return the largest finite absolute value; 0 of an empty tensor."""
    values = tensor.detach().abs()
    values = values[values.isfinite()] if values.is_floating_point() else values
    return float(values.max()) if values.numel() else 0.0


def _distance(found: Tensor, right: Tensor) -> float:
    """Return the largest difference of two elements; inf where only one is finite, or both are infinite or not
    numbers but not alike."""
    if not found.numel() or torch.equal(found, right):
        return 0.0
    first, second = found.detach().double(), right.detach().double()
    alike = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(alike, 0.0, (first - second).abs()).nan_to_num(math.inf, math.inf).max())
