"""Strategies of a captured call that are searched for, or read from a file: what `decide` is to take as given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, choose_shard_axes
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.decide import Constraints
from msrun.runtime.partition.price import PriceSummary, StepSpec
from msrun.runtime.partition.program import Decisions, OperatorPlan
from msrun.runtime.search.search import Search, Splits, StepOf
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


def read_operator_strategies(path: Path) -> Strategies:
    """Return what a file says."""
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
    """Return captured operator -> its split."""
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


_EVERYTHING = HsdpSpec(threshold=0)


@dataclass(frozen=True)
class ChosenStrategies:
    """What was chosen before anything is decided."""

    settings: ParallelSettings
    """With optimizer parallel or recomputation where a step would not fit without."""
    splits: Mapping[str, LabelSplit] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    price: PriceSummary | None = None
    """Of searched strategies."""


def choose_strategies(
    captured: CapturedGraph,
    mesh: Mesh,
    constraints: Constraints,
    settings: ParallelSettings,
    root: nn.Module,
    fewest: Callable[[int], int],
) -> ChosenStrategies:
    """Return the strategies of a file, of a search, or none.

    Args:
        fewest: returns the least number that any rank gives it.
    """
    if settings.strategies_from is not None:
        given = read_operator_strategies(settings.strategies_from)
        return ChosenStrategies(settings, splits_from(given, captured, mesh, str(settings.strategies_from)))
    if settings.splits is not None:
        _check_operators(settings.splits, captured)
        return ChosenStrategies(settings, settings.splits)
    if settings.search is None:
        return ChosenStrategies(settings)
    spec = settings.search.spec()
    step_of = steps_of(captured, settings, spec.optimizer_states, root)
    found = Search(captured, mesh, constraints, spec, step_of, fewest=fewest).run()
    if found.shards_optimizer and settings.hsdp is None:
        settings = replace(settings, hsdp=_EVERYTHING)
    if found.activation_limit_bytes is not None:
        given_limit = settings.activation_limit_bytes
        limit = found.activation_limit_bytes if given_limit is None else min(given_limit, found.activation_limit_bytes)
        settings = replace(settings, activation_limit_bytes=limit)
    return ChosenStrategies(settings, found.plan.splits, tuple(found.notes), found.plan.price.summary)


def steps_of(captured: CapturedGraph, settings: ParallelSettings, optimizer_states: int, root: nn.Module) -> StepOf:
    """Return what tells of a step what decisions do not say."""
    parameters, fusion = dict(root.named_parameters()), settings.comm_fusion
    rule = fusion.allreduce if settings.hsdp is None else fusion.reducescatter
    alone_bytes = rule.alone_bytes if world.device().type == "cpu" else None

    def step_of(decisions: Decisions, *, shards_all: bool) -> StepSpec:
        hsdp = settings.hsdp or (_EVERYTHING if shards_all else None)
        return StepSpec(
            shard_axes=_shard_axes(captured, decisions, hsdp, parameters),
            regathers=hsdp is not None and hsdp.optimizer_level == "level3",
            optimizer_states=optimizer_states,
            sums_wide=settings.gradient_fp32_sync,
            bucket_bytes=rule.most_bytes,
            alone_bytes=alone_bytes if fusion.is_open else 0,
        )

    return step_of


def _check_operators(splits: Splits, captured: CapturedGraph) -> None:
    """Refuse strategies of another graph."""
    known = {node.name for node in captured.graph.nodes if node.op == "call_function"}
    unknown = [name for name in splits if name not in known]
    if unknown:
        raise StrategyError(
            f"strategies of search_degrees: the network has no operator {unknown[0]!r}; give it the network and the "
            "batch that it was searched for"
        )


def _shard_axes(
    captured: CapturedGraph, decisions: Decisions, hsdp: HsdpSpec | None, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Axes]:
    if hsdp is None:
        return {}
    found = {}
    for node in captured.graph.nodes:
        name = captured.parameters.get(node.name)
        if name is None or name in found:
            continue
        value, use = node.meta["val"], decisions.parameters[name]
        found[name], _ = choose_shard_axes(
            hsdp,
            decisions.mesh,
            use.layout,
            tuple(value.shape),
            value.element_size(),
            opted_out=getattr(parameters.get(name), "parallel_optimizer", True) is False,
            partial_axes=use.partial_axes,
        )
    return found
