"""Which cases the strategy laws run in a world, and their graphs.

A graph depends on no rank. Imported with LAW_GRAPHS="MODULE RANKS" set, as the fork server does before there are ranks,
this module captures all graphs of that world at once, and every rank has them; otherwise each rank captures its own.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from operator_cases import OperatorNetwork

from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.capture.target import find_target


def runs_of(module: str, world_size: int) -> Iterator[tuple[Any, bool, list[torch.dtype]]]:
    """Yield case, whether it follows its input's layout instead of a strategy, and the types in which it runs.

    Worlds of more ranks than the module's EVERY_CASE_UP_TO (4 unless it says so) run the cases with `on_eight` only.
    Two ranks compute in other types too: those, and all of operator_cases, in float32, or each in what the module says
    in MORE_TYPES.
    """
    cases = importlib.import_module(module)
    everywhere = world_size <= getattr(cases, "EVERY_CASE_UP_TO", 4)
    for case, follows in [*((case, False) for case in cases.BINARY), *((case, True) for case in cases.UNARY)]:
        if everywhere or case.on_eight:
            is_in_both = case.on_eight or module == "operator_cases"
            others = getattr(cases, "MORE_TYPES", {case.name: ("float32",) if is_in_both else ()}).get(case.name, ())
            yield case, follows, [torch.float64, *(getattr(torch, text) for text in others if world_size == 2)]


@functools.cache
def graph_of(case: Any, dtype: torch.dtype) -> CapturedGraph:
    """Return the graph of one case."""
    values = case.values(dtype)
    given = [value for index, value in enumerate(values) if index not in case.parameters]
    shapes = [tuple(value.shape) for value in given]
    return capture(find_target(OperatorNetwork(case, values)), given, {}, input_shapes=shapes, parameter_shapes={})


if asked := os.environ.get("LAW_GRAPHS"):
    for each, _, dtypes in runs_of(asked.split()[0], int(asked.split()[1])):
        for each_dtype in dtypes:
            graph_of(each, each_dtype)
