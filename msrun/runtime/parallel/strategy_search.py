"""Strategies of a captured call that are searched for, or read from a file: what `decide` is to take as given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.parallel.operator_strategies import read_operator_strategies, splits_from
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, choose_shard_axes
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.decide import Constraints
from msrun.runtime.partition.decisions import Decisions
from msrun.runtime.partition.price import PriceSummary
from msrun.runtime.partition.step_spec import StepSpec
from msrun.runtime.search.search import Splits, StepOf, search
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import LabelSplit

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

    Raises:
        CaptureError: a rank has no plan to choose among.
        StrategyError: a file of another network or mesh, an illegal strategy, or nothing fits into the device.
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
    found = search(captured, mesh, constraints, spec, step_of, fewest=fewest)
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
    """Refuse strategies of another graph.

    Raises:
        StrategyError: it has other operators.
    """
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
