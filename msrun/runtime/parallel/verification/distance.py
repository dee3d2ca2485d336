"""How far one value of a step is from that of one process, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.runtime import world
from msrun.runtime.parallel.verification.report import Difference
from msrun.runtime.parts.part import Part

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed, by the lowest precision in which a value is computed, relative to the largest element of
the value in one process. Other types (integers, bool) must be equal."""
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
