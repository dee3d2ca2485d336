"""Decisions that only a whole walk over the graph can prepare: the partition walks until nothing is left to improve."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import fx

from msrun.runtime.graph.collectives import Collective
from msrun.runtime.graph.operators.rule import apply_collective
from msrun.runtime.graph.parameter_uses import Use
from msrun.runtime.layout import Axes


@dataclass(frozen=True)
class Decisions:
    """What a walk over the graph starts with."""

    scatters: dict[str, tuple[int, Axes]] = field(default_factory=dict)
    """captured operator -> dimension and axes that all readers of its sum cut"""
    draws: dict[str, tuple[int, Axes]] = field(default_factory=dict)
    """captured random numbers, made of nothing -> dimension and axes that all their readers cut"""
    storage: dict[str, Use] = field(default_factory=dict)
    """parameter that is read in several ways -> how it is stored"""


def find_cut_draws(draws: Mapping[str, fx.Node]) -> dict[str, tuple[int, Axes]]:
    """Return the random numbers of which all readers take one part, which a rank can draw alone.

    Args:
        draws: captured operator -> its local result.
    """
    found = {}
    for name, local in draws.items():
        readers = list(local.users)
        if len(readers) == 1 and readers[0].target is apply_collective:
            collective = cast(Collective, readers[0].kwargs["collective"])
            if collective.kind == "slice":
                found[name] = collective.dim, collective.axes
    return found


def find_scatters(sums: Mapping[str, tuple[fx.Node, Axes]]) -> dict[str, tuple[int, Axes]]:
    """Return the sums that all their readers cut alike: a reduce-scatter moves half of what an all-reduce does.

    Args:
        sums: captured operator -> its local result, and the axes over which an all-reduce made that whole.
    """
    found = {}
    for name, (local, summed) in sums.items():
        readers = list(local.users)
        if len(readers) != 1 or readers[0].target is not apply_collective:
            continue
        collective = cast(Collective, readers[0].kwargs["collective"])
        axes = tuple(itertools.takewhile(frozenset(summed).__contains__, collective.axes))
        if collective.kind == "slice" and axes:
            found[name] = collective.dim, axes
    return found
