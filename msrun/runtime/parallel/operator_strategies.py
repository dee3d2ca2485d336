"""Files of operator strategies: how every operator of a captured network is cut, as JSON.

    {"mesh": [2, 2], "operators": {"linear": {"module": "layer1", "operator": "aten.linear",
     "strategy": [[4, 1], [1, 1]], "axes": [[[0, 1], []], [[], []]]}}}

`strategy` is MindSpore's tuples, parts per dimension of every input; `axes` says which axes of the mesh cut each
dimension, the most significant first. Operators that are not named keep their input's layout or run data-parallel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrun.errors import StrategyError, near_miss
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.partition.program import OperatorPlan
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.registry import find_rule
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, operator_call
from ranktable.bounded_text import load_json
from ranktable.files import MAX_BYTES, read_text

Strategies = dict[str, Any]
FOLLOWS = "follows"


def operator_strategies(mesh: Sequence[int], operators: Sequence[OperatorPlan]) -> Strategies:
    """Return the strategies of a plan as plain values; operators that follow their input are left out."""
    return {
        "mesh": list(mesh),
        "operators": {
            each.name: {
                "module": each.module_path,
                "operator": each.operator,
                "strategy": [list(numbers) for numbers in each.strategy],
                "axes": [[list(axes) for axes in split] for split in each.axes],
            }
            for each in operators
            if each.axes and each.origin != FOLLOWS
        },
    }


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a strategy file.

    Raises:
        StrategyError: it does not end in .json.
    """
    if Path(path).suffix != ".json":
        raise StrategyError(f"operator strategy file {str(path)!r}: its name must end in .json")
    return Path(path)


def read_operator_strategies(path: Path) -> Strategies:
    """Return what a file says.

    Raises:
        StrategyError: it cannot be read, or is no such file.
    """
    try:
        content = load_json(read_text(path, MAX_BYTES))
        operators = {
            str(name): [[tuple(a) for a in row] for row in entry["axes"]]
            for name, entry in content["operators"].items()
        }
        return {"mesh": tuple(content["mesh"]), "operators": operators}
    except OSError as error:
        raise StrategyError(f"operator strategy file {path} cannot be read: {error.strerror}; give another") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StrategyError(
            f"{path} is no file of operator strategies ({type(error).__name__}: {error}): write one with "
            "AutoParallel.save_operator_strategy_file"
        ) from None


def splits_from(strategies: Mapping[str, Any], captured: CapturedGraph, mesh: Mesh, path: str) -> dict[str, LabelSplit]:
    """Return captured operator -> its split.

    Raises:
        StrategyError: the file is of another number of ranks or of another network, or a strategy is illegal.
    """
    if strategies["mesh"] != mesh.shape:
        raise StrategyError(
            f"{path}: its strategies are for a mesh of {strategies['mesh']}, and this one is {mesh.shape}"
        )
    nodes = {node.name: node for node in captured.graph.nodes if node.op == "call_function"}
    splits: dict[str, LabelSplit] = {}
    for name, rows in strategies["operators"].items():
        rule = find_rule(nodes[name].target) if name in nodes else None
        if name not in nodes:
            raise StrategyError(
                f"{path}: the network has no operator {name!r}{near_miss(name, nodes)}; it is of another"
            )
        if rule is None:
            continue
        splits[name] = _split(f"{path}: {name}", rule.form(operator_call(nodes[name])), rows, mesh)
    return splits


def _split(what: str, form: Form, rows: Sequence[Sequence[Axes]], mesh: Mesh) -> LabelSplit:
    if [len(row) for row in rows] != [len(labels) for labels in form.inputs]:
        raise StrategyError(
            f"{what}: {rows} does not fit inputs of {[len(labels) for labels in form.inputs]} dimensions"
        )
    split: dict[str, Axes] = {}
    for index, (labels, row) in enumerate(zip(form.inputs, rows, strict=True)):
        for dim, (label, axes) in enumerate(zip(labels, row, strict=True)):
            if label is None or index in form.shared_out:
                continue
            if any(axis not in mesh.axes for axis in axes) or not form.can_split(label, mesh.extent(axes)):
                raise StrategyError(f"{what}: dimension {dim} of input {index} cannot be cut by axes {axes}")
            if split.setdefault(label, axes) != axes:
                raise StrategyError(f"{what}: dimension {dim} of input {index} is cut otherwise in another input")
    used = [axis for axes in split.values() for axis in axes]
    if len(used) != len(set(used)):
        raise StrategyError(f"{what}: one axis cuts two dimensions")
    return {label: axes for label, axes in split.items() if axes}
