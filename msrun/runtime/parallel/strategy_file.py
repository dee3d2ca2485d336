"""Strategy files: how every parameter of a network is cut, as JSON, with MindSpore's names of the entries.

    {"current_stage": 0, "pipeline_stages": 1, "parallel_layout_item": {"layer1.weight": {"dev_matrix": [4], ...}}}

With several pipeline stages the names of the items begin with their stage, `1-layer2.weight`, as in the file that
MindSpore's merge_pipeline_strategys writes. A checkpoint says for itself how it was cut and needs none; they tell
`transform_checkpoints` what to cut for, and describe the slices of plain torch.save files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from msrun.errors import CheckpointError, StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.parallel.context import LayoutFiles
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, choose_shard_axes
from msrun.runtime.parallel.parameters.layouts import ParameterLayout, find_layouts
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.decide import Constraints
from msrun.runtime.partition.price import PriceSummary, StepSpec
from msrun.runtime.partition.program import Decisions, OperatorPlan
from msrun.runtime.search.search import Search, Splits, StepOf
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.registry import find_rule
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, operator_call
from msrun.runtime.world import get_rank
from ranktable.bounded_text import load_json
from ranktable.files import MAX_BYTES, read_text, write_whole

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


_STAGE = re.compile(r"(\d+)-(.+)", re.DOTALL)
Strategy = dict[str, ParameterLayout]


def write_strategy(path: str | os.PathLike[str], layouts: Mapping[str, ParameterLayout]) -> None:
    """Write a strategy file, in one rename."""
    items: dict[str, Any] = {}
    count = max((layout.pipeline_stages for layout in layouts.values()), default=1)
    for name, layout in layouts.items():
        for stage in layout.stages or range(count):
            items[f"{stage}-{name}" if count > 1 else name] = layout.to_json()
    content = {"current_stage": 0, "pipeline_stages": count, "parallel_layout_item": items}
    _replace(Path(path), json.dumps(content, indent=1))


def _replace(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise CheckpointError(f"strategy file {path} was not written: {error.strerror}; give another path") from None


def write_operator_strategies(path: str | os.PathLike[str], strategies: Mapping[str, Any]) -> None:
    """Write how operators are cut, in one rename."""
    _replace(Path(path), json.dumps(strategies, indent=1))


def read_strategy(path: str | os.PathLike[str]) -> Strategy:
    """Return what a strategy file says.

    Raises:
        CheckpointError: it is missing, or no strategy file.
    """
    try:
        content = _read(path)
        items = content["parallel_layout_item"]
        matches = {name: _STAGE.fullmatch(name) for name in items}
        count = content.get("pipeline_stages")
        if count is None:  # MindSpore's: of several stages when all names begin with one
            is_staged = bool(items) and all(matches.values())
            count = 1 + max(int(found[1]) for found in matches.values() if found) if is_staged else 1
        return _gather_stages(items, matches if count > 1 else {}, count)
    except OSError as error:
        raise CheckpointError(f"strategy file {path} cannot be read: {error.strerror}; give another one") from None
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is no strategy file in JSON ({type(error).__name__}: {error}): write one with "
            "set_auto_parallel_context(strategy_ckpt_save_file=...)"
        ) from None


def _read(path: str | os.PathLike[str]) -> Any:
    return load_json(read_text(path, MAX_BYTES))


def _gather_stages(items: Mapping[str, Any], matches: Mapping[str, Any], count: int) -> Strategy:
    found: Strategy = {}
    for name, item in items.items():
        match = matches.get(name)
        own, stages = (match[2], (int(match[1]),)) if match else (name, ())
        layout = ParameterLayout.from_json(item, count, stages)
        before = found.get(own)
        found[own] = layout if before is None else replace(layout, stages=(*before.stages, *stages))
    everywhere = tuple(range(count))
    return {name: replace(x, stages=() if x.stages == everywhere else x.stages) for name, x in found.items()}


def merge_pipeline_strategys(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> None:
    """Merge the strategy files of the stages of a pipeline, one of each stage, into one.

    A file that msrun wrote holds all stages already: of several that say the same one is enough.

    Args:
        src_strategy_dirs: the folder with the files, all its `*.json` and `*.ckpt`.
        dst_strategy_file: the file to be written.

    Raises:
        CheckpointError: the folder has none, or they contradict each other.
    """
    folder = Path(src_strategy_dirs)
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".ckpt") and path.is_file())
    if not paths:
        raise CheckpointError(f"{folder} has no strategy files (*.json, *.ckpt): give the folder that they are in")
    read = [(path, read_strategy(path), _read(path).get("current_stage", 0)) for path in paths]
    count = max([1 + stage for _, _, stage in read] + [x.pipeline_stages for _, s, _ in read for x in s.values()])
    merged: Strategy = {}
    for path, strategy, stage in read:
        for name, layout in strategy.items():
            is_whole = layout.pipeline_stages == count
            stages = (layout.stages if is_whole else (stage,)) or tuple(range(count))
            before = merged.get(name)
            layout = replace(layout, pipeline_stages=count, stages=stages)
            if before is not None and replace(before, stages=()) != replace(layout, stages=()):
                raise CheckpointError(
                    f"{path}: {name} is cut otherwise than in another file: give the files of one job"
                )
            merged[name] = replace(layout, stages=tuple(sorted({*stages, *(before.stages if before else ())})))
    write_strategy(dst_strategy_file, merged)


def write_layout_files(files: LayoutFiles, network: Any) -> None:
    """Write what `set_auto_parallel_context(strategy_ckpt_save_file=, group_ckpt_save_file=)` asks for.

    Every rank writes: to the same path the same content, in one rename.
    """
    layouts = find_layouts(network)
    if files.strategy:
        write_strategy(files.strategy, layouts)
    if files.group:
        _replace(Path(files.group), json.dumps({"rank_list": find_equal_ranks(layouts, get_rank())}))


def find_equal_ranks(layouts: Mapping[str, ParameterLayout], global_rank: int) -> list[int]:
    """Return the ranks that hold the same parts of all parameters as a rank, itself among them."""
    world_size = max((layout.world_size for layout in layouts.values()), default=1)

    def boxes(rank: int) -> list[Any]:
        return [layout.box(rank) for layout in layouts.values()]

    own = boxes(global_rank)
    return [rank for rank in range(world_size) if boxes(rank) == own]


def restore_group_info_list(group_info_file_name: str | os.PathLike[str]) -> list[int]:
    """Return the ranks whose checkpoints hold the same parts as those of the rank that wrote the file.

    The file is one of `set_auto_parallel_context(group_ckpt_save_file=...)`: give every rank a name of its own there.

    Raises:
        CheckpointError: it is missing, or no such file.
    """
    try:
        return [int(rank) for rank in load_json(read_text(group_info_file_name))["rank_list"]]
    except OSError as error:
        raise CheckpointError(f"{group_info_file_name} cannot be read: {error.strerror}; give another file") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{group_info_file_name} holds no rank_list: write one with "
            "set_auto_parallel_context(group_ckpt_save_file=...)"
        ) from None


def rank_list_for_transform(
    rank_id: int,
    src_strategy_file: str | os.PathLike[str] | None = None,
    dst_strategy_file: str | os.PathLike[str] | None = None,
) -> list[int]:
    """Return the source ranks whose checkpoints one target rank needs; of ranks with equal parts the lowest.

    Args:
        rank_id: the target rank.
        src_strategy_file: how the source was cut; None is one rank with whole tensors.
        dst_strategy_file: how the target is cut; None is one rank with whole tensors.

    Raises:
        CheckpointError: a file is no strategy file, or of fewer ranks.
    """
    if src_strategy_file is None:
        return [0]
    source = read_strategy(src_strategy_file)
    target = read_strategy(dst_strategy_file) if dst_strategy_file is not None else None
    if target is None and rank_id != 0:
        raise CheckpointError(f"rank_id={rank_id}: without dst_strategy_file there is rank 0 alone")
    needed: set[int] = set()
    for name, layout in source.items():
        if target is not None and name not in target:
            continue
        wanted = target[name].box(rank_id) if target is not None else None
        if target is not None and wanted is None:  # in another stage
            continue
        seen: set[Any] = set()
        for rank in range(layout.world_size):
            box = layout.box(rank)
            if box is not None and box not in seen and (wanted is None or box.intersect(wanted)):
                seen.add(box)
                needed.add(rank)
    return sorted(needed)


def shared_ranks(strategies: Sequence[Strategy]) -> int:
    """Return the number of ranks that strategies speak of."""
    return max((layout.world_size for strategy in strategies for layout in strategy.values()), default=1)
