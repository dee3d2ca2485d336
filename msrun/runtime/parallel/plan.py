"""ParallelPlan: what AutoParallel decided, for people and as JSON."""

from __future__ import annotations

import json
import logging
import operator
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.execute.gradients import GradientGroup, ParameterGroup
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.compilation.compiled import CompiledCall, ProgramCall
from msrun.runtime.parallel.parameters.hsdp import ZERO_WORDS
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.pipeline.schedule import PipelinePlan, Schedule, render_svg, render_text
from msrun.runtime.parallel.precision import describe
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parallel.strategy_file import operator_strategies
from msrun.runtime.partition.collective_messages import (
    CollectiveTraffic,
    LocalCollective,
    Message,
    Totals,
    gathers_of_parameter,
    sums_of_gradient,
)
from msrun.runtime.partition.events import LocalValue, LocalValues, StepEvents, gradient_reaches
from msrun.runtime.partition.price import PriceSummary
from msrun.runtime.partition.program import MODULE_PATH, LocalProgram, OperatorPlan
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.named_layout import Layout
from msrun.runtime.sharding.operators.rule import collective_of


@dataclass(frozen=True)
class StepTraffic:
    """Every message of a step on this rank."""

    operators: list[tuple[CollectiveTraffic, ...]]
    """For each operator, for one part of the batch."""
    results: tuple[CollectiveTraffic, ...]
    gathers: list[list[Message]]
    """For each fusion group of parameters."""
    sums: list[list[Message]]
    """For each group of gradients."""
    borders: list[tuple[list[fx.Node], tuple[CollectiveTraffic, ...]]]
    """Copies between host and device in each program of this rank, and what they move, for one part of the batch."""
    totals: Totals | None
    notes: tuple[str, ...] = ()


def predict_traffic(call: ProgramCall, rank: int) -> StepTraffic:
    """Return the messages of a training step of a program, told from its shapes: of a pipeline those of this rank.

    A program that cannot be walked without values has a note instead of totals: it trains all the same.
    """
    program, parts = call.program, call.parts
    own, groups = list(call.own.values()), call.gradient_groups
    gathers = [gather_messages(group, parts.micro_batches) for group in call.groups]
    sums = [sum_messages(group, parts.micro_batches) for group in groups]
    try:
        events = call.events
    except RuntimeError as error:  # an operator that needs values, of which only the run has any
        nothing: list[tuple[CollectiveTraffic, ...]] = [()] * len(program.operators)
        note = f"the traffic of a step is not told: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return StepTraffic(nothing, (), gathers, sums, [], None, (note,))
    values = events.values
    trained = {node.name for node in events.reached}
    sums = [found if trained & {*group.placeholders} else [] for group, found in zip(groups, sums, strict=True)]
    moved = operator_traffic(events, rank)
    borders = [_borders(*each, events, rank) for each in call.programs_with_ends()]
    here = {node.name for compiled in own for node in compiled.program.graph.nodes}
    nodes = [node for of_one in program.collectives for node in of_one]
    all_moved = [traffic for of_one in moved for traffic in of_one]
    messages = [
        m for node, traffic in zip(nodes, all_moved, strict=True) if node.name in here for m in traffic.messages
    ]
    messages += [m for _, of_one in borders for traffic in of_one for m in traffic.messages]
    for compiled in own:
        messages += _again(compiled, values, rank)
    messages += call.messages_of_part()
    messages *= parts.total
    messages += [m for of_group in (*gathers, *sums) for m in of_group] + call.messages_of_step()
    return StepTraffic(moved[:-1], moved[-1], gathers, sums, borders, Totals.of(messages))


def _borders(
    program: LocalProgram, ends: list[fx.Node] | None, events: StepEvents, rank: int
) -> tuple[list[fx.Node], tuple[CollectiveTraffic, ...]]:
    """Return the copies between host and device in a program, and what they move."""
    if ends is None:
        return program.borders, collective_traffic(program.borders, program, events.values, events.reached, rank)
    by_name = {node.name: value for node, value in events.values.items()}
    values: dict[fx.Node, LocalValue] = {}
    for node in program.graph.nodes:
        value = values.get(node.all_input_nodes[0]) if node in program.borders else by_name.get(node.name)
        if value is not None:
            values[node] = value
    reached = gradient_reaches(ends, values)
    return program.borders, collective_traffic(program.borders, program, values, reached, rank)


def operator_traffic(events: StepEvents, rank: int) -> list[tuple[CollectiveTraffic, ...]]:
    """Return what the collectives of every operator, and last of the results, move for one part of the batch."""
    program = events.program
    return [collective_traffic(nodes, program, events.values, events.reached, rank) for nodes in program.collectives]


def _again(compiled: CompiledCall, values: LocalValues, rank: int) -> list[Message]:
    """Return what recomputed modules move a second time."""
    by_name = {node.name: value.spec for node, value in values.items()}
    found: list[LocalCollective] = []
    for replay in compiled.executor.replays:
        for crossings in replay.crossings.values():
            found += [LocalCollective(crossing.collective, by_name[crossing.source]) for crossing in crossings]
        again = [compiled.executor.segments[index].module.graph for index in replay.segments]
        for node in [node for graph in again for node in graph.nodes]:
            if (collective := collective_of(node)) is not None:  # which the operator runs itself
                found.append(LocalCollective(collective, by_name[node.args[0].name]))
    sent = [each.messages(compiled.program.mesh, rank)[0] for each in found]
    return [message for message in sent if message is not None]


def collective_traffic(
    nodes: Iterable[fx.Node], program: LocalProgram, values: LocalValues, with_gradient: set[fx.Node], rank: int
) -> tuple[CollectiveTraffic, ...]:
    """Return what the collectives at these nodes move for one copy of the batch."""
    found = []
    for node in nodes:
        collective, value = cast(Collective, collective_of(node)), values[cast(fx.Node, node.args[0])]
        crossing = LocalCollective(collective, value.spec, node in with_gradient)
        found.append(CollectiveTraffic(str(collective), *crossing.messages(program.mesh, rank)))
    return tuple(found)


def gather_messages(group: ParameterGroup, micro_batches: int) -> list[Message]:
    """Return what gathering the parameters of one fusion group moves in a step."""
    if not group.shard_axes:
        return []
    item = (group.dtype or group.members[0].parameter.dtype).itemsize
    size = item * sum(member.sent_numel for member in group.members)
    times = 2 * micro_batches if group.regathers else 1
    return [gathers_of_parameter(size, group.shard_axes, group.mesh)] * times


def sum_messages(group: GradientGroup, micro_batches: int) -> list[Message]:
    """Return what summing the gradients of one group moves in a step."""
    if not group.members[0].parameter.requires_grad or group.may_be_rows:
        return []
    item = (group.sum_dtype or group.members[0].parameter.dtype).itemsize
    size = item * sum(member.sent_numel for member in group.members)
    times = micro_batches if group.shard_axes and group.scatters_each else 1
    return [message for message, _ in sums_of_gradient(size, group.shard_axes, group.partial_axes, group.mesh)] * times


@dataclass(frozen=True)
class BorderPlan:
    """One value that is read in the other memory, of one part of the batch."""

    value: str
    """What makes it: an operator with its module, an input or a parameter."""
    forward: Message
    """to_host or to_device, with its bytes."""
    backward: Message | None
    """Of its gradient, which goes the other way; None where there is none."""

    def __str__(self) -> str:
        back = "" if self.backward is None else f", gradient {_bytes_of(self.backward)}"
        return f"{self.value:<44} {_bytes_of(self.forward)}{back}"


def build_border_plans(
    program: LocalProgram, borders: Sequence[fx.Node], moved: Sequence[CollectiveTraffic]
) -> list[BorderPlan]:
    """Return what crosses borders.

    Args:
        program: of all stages, if there are some.
        borders: copies in it, or in the program of one stage.
        moved: what each of them moves.
    """
    whole = {node.name: node for node in program.graph.nodes}
    names = {use.node: user_name(name) for name, use in program.parameters.items()}
    names |= {node: user_name(name) for name, node in program.buffers.items()}
    names |= {node: f"input {index}" for index, node in enumerate(program.inputs)}
    found = []
    for node, traffic in zip(borders, moved, strict=True):
        if traffic.forward is not None:
            value = whole[node.all_input_nodes[0].name]
            found.append(BorderPlan(_name_of(value, names), traffic.forward, traffic.backward))
    return found


def _name_of(value: fx.Node, names: dict[fx.Node, str]) -> str:
    if value in names:
        return names[value]
    if value.op == "placeholder":
        return value.name
    collective = value.kwargs.get("collective")
    if collective is not None:
        return f"{collective} of {_name_of(value.all_input_nodes[0], names)}"
    if value.target is operator.getitem:  # one of the results of an operator
        return _name_of(value.all_input_nodes[0], names)
    path = value.meta.get(MODULE_PATH)
    return f"{str(value.target).removesuffix('.default')} of {user_name(path) if path else 'no module'}"


def _bytes_of(message: Message) -> str:
    return f"{message.operation} {message.bytes} B"


def build_from_json(kind: Any, value: Any, where: str = "plan") -> Any:
    """Return the value of type `kind` that `dataclasses.asdict` and JSON made into `value`.

    Dataclasses, tuples, dicts with text keys, optional values and plain ones are understood.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return (
            None if value is None else build_from_json(next(a for a in arguments if a is not type(None)), value, where)
        )
    if is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(build_from_json(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        return {name: build_from_json(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    return value


def _build_dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    if not isinstance(value, dict) or set(value) != set(names):
        found = sorted(value) if isinstance(value, dict) else value
        raise StrategyError(f"{where}: the fields of {kind.__name__} are {', '.join(names)}; found {found}")
    return kind(**{name: build_from_json(hints[name], value[name], f"{where}.{name}") for name in names})


HSDP_OFF = "hsdp is off"
OWN_PART = "this rank's own part"
"""Reason of a parameter that is marked layerwise_parallel."""


READ = "read from "
"""How the text begins that says where a capture was kept."""
log = logging.getLogger("msrun.runtime")


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is stored and how its gradient travels."""

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    local_bytes: int
    global_bytes: int
    layout: tuple[int, ...]
    """Parts per dimension at rest."""
    shard_ranks: int
    """Ranks that optimizer parallel cut it over; 1 = left whole."""
    reason: str
    group: int
    """Parameters of one group travel in one message; -1 when this rank's graph does not use it."""
    axes: tuple[str, ...] | None = None
    """The layout at rest in the names of the user's Layout, "None" for whole dimensions; None without a Layout."""
    stages: tuple[int, ...] = ()
    """Stages of a pipeline that hold it; () when every rank does."""
    on_host: bool = False
    """Whether it lies in the host's memory."""

    @property
    def is_own_part(self) -> bool:
        """True when it was cut by hand, so that nobody knows the shape of the whole."""
        return self.reason == OWN_PART


@dataclass(frozen=True)
class GroupPlan:
    """What the parameters of one fusion group move in a training step."""

    parameters: tuple[str, ...]
    gathers: tuple[Message, ...]
    sums: tuple[Message, ...]
    """Of their gradients."""


@dataclass(frozen=True)
class ParallelPlan:
    """Every decision about one network and one shape of its input."""

    mode: str
    world_size: int
    mesh: tuple[int, ...]
    copies: int
    losses: str
    optimizer_parallel: str
    dataset_strategy: str
    parameters: tuple[ParameterPlan, ...]
    operators: tuple[OperatorPlan, ...]
    notes: tuple[str, ...]
    program: str
    """The local program as text: every operator, collective and message in order, see `render_program`."""
    results: tuple[CollectiveTraffic, ...] = ()
    """Collectives that bring the results to the layout of the dataset strategy."""
    groups: tuple[GroupPlan, ...] = ()
    """Messages of the parameters."""
    traffic: Totals | None = None
    """All messages of one training step on this rank, all copies together; None when they could not be told."""
    pipeline: PipelinePlan | None = None
    price: PriceSummary | None = None
    """What the search of strategies reckons a step to take; None when nothing was searched."""
    borders: tuple[BorderPlan, ...] = ()
    """Values that are copied between host and device, of one part of the batch."""
    captured_s: float | None = field(default=None, compare=False)
    """Seconds that the newest capture took, until all ranks had its program; None: nothing was captured, or run."""

    kept: str = field(default="", compare=False)
    """Where the newest capture was read from, or kept for the next start, or why not; empty: captures are not kept."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any] | str) -> ParallelPlan:
        """Return the plan that `to_json` made into a dict, or into text by `json.dumps`.

        Raises:
            StrategyError: a field is missing or unknown.
        """
        plan: ParallelPlan = build_from_json(cls, json.loads(value) if isinstance(value, str) else value)
        return plan

    def __str__(self) -> str:
        return self.explain()

    @property
    def local_bytes(self) -> int:
        """Bytes of all parameters on this rank."""
        return sum(parameter.local_bytes for parameter in self.parameters)

    @property
    def host_bytes(self) -> int:
        """Bytes of those that lie in the host's memory beside a device."""
        return sum(parameter.local_bytes for parameter in self.parameters if parameter.on_host)

    @property
    def device_bytes(self) -> int:
        """Bytes of those in the device's memory."""
        return self.local_bytes - self.host_bytes

    @property
    def global_bytes(self) -> int:
        """Bytes of all parameters of the network."""
        return sum(parameter.global_bytes for parameter in self.parameters)

    def strategies(self) -> dict[str, Any]:
        """Return how every operator with a choice is cut, as plain values; see `save_operator_strategy_file`."""
        return operator_strategies(self.mesh, self.operators)

    def summary(self) -> str:
        """Return the first log line."""
        mesh = " x ".join(map(str, self.mesh)) or "1"
        copies = f", {self.copies} copies" if self.copies > 1 else ""
        stages = f" as {mesh}" if self.mesh else ""
        if self.pipeline is not None:
            stages = f" in {self.pipeline.summary()}" + (f" as {mesh}" if self.mesh else "")
        sharding = self.optimizer_parallel
        if sharding != HSDP_OFF and not any(parameter.shard_ranks > 1 for parameter in self.parameters):
            sharding = f"{sharding.partition(':')[0]} cuts no parameter of this network"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}{stages}, {self.mode}, {sharding}{copies}"
        host = f", {_words(self.host_bytes)} of them on the host" if self.host_bytes else ""
        return f"{ranks}; {self.losses}; {self._stored()}{host}"

    def _stored(self) -> str:
        """Return in words what of the parameters lies on this rank."""
        local, whole = _words(self.local_bytes), _words(self.global_bytes)
        own = sum(parameter.is_own_part for parameter in self.parameters)
        if own:
            return f"parameters {local} on this rank, {own} of {len(self.parameters)} of them this rank's own parts"
        if self.local_bytes == self.global_bytes:
            return f"parameters whole on every rank, {whole}"
        return f"parameters {local} of {whole} on this rank"

    def explain(self) -> str:
        """Return every decision as a table: parameters with sizes and reasons, operators with their collectives."""
        lines = [self.summary(), "", "parameters"]
        width = max((len(p.name) for p in self.parameters), default=4)
        for p in self.parameters:
            shape = f"{'?' if p.is_own_part else _shape(p.global_shape)} -> {_shape(p.local_shape)}"
            where = f"message {p.group}" if p.group >= 0 else "unused" if not p.stages else "elsewhere"
            where = f"stage {','.join(map(str, p.stages))}, {where}" if p.stages else where
            where = f"{where}, host" if p.on_host else where
            cut = _row(p.axes if p.axes is not None else p.layout)
            lines.append(f"  {p.name:<{width}}  {shape:<28} {cut:<14} {p.local_bytes:>10} B  {where:<10}  {p.reason}")
        lines += ["", "operators"]
        for o in self.operators:
            strategy = ", ".join(str(numbers) for numbers in o.strategy)
            repeated = f", the same on {o.repeats} ranks" if o.repeats > 1 and any(o.strategy) else ""
            host = ", on the host" if o.on_host else ""
            lines.append(f"  {o.operator:<28} {o.module_path or '-':<16} {strategy:<32} {o.origin}{repeated}{host}")
            lines += [f"      {collective}" for collective in o.traffic or o.collectives]
        lines += ["results", *(f"      {collective}" for collective in self.results)] if self.results else []
        if self.borders:
            count = sum(o.on_host for o in self.operators)
            what = "1 operator" if count == 1 else f"{count} operators"
            lines += ["", f"borders between host ({what}) and device", *(f"  {border}" for border in self.borders)]
        if self.pipeline is None:
            lines += self._messages()
        else:
            lines += ["", *self.pipeline.lines(), "", *self.pipeline.traffic_lines()]
        if self.captured_s is not None:
            how = self.kept if self.kept.startswith(READ) else "captured and cut"
            more = f", {self.kept}" if self.kept and how != self.kept else ""
            lines.append(f"{how} in {self.captured_s:.2f} s{more}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _messages(self) -> list[str]:
        lines = ["", "messages of parameters"]
        for number, group in enumerate(self.groups):
            moved = [*(f"forward {m}" for m in group.gathers), *(f"backward {m}" for m in group.sums)]
            count = len(group.parameters)
            what = "1 parameter" if count == 1 else f"{count} parameters"
            lines.append(f"  message {number:<3} {what}: {', '.join(moved) or 'stay here'}")
        times = f"; what operators move, {self.copies} times" if self.copies > 1 else ""
        return [*lines, "", f"one training step, on each rank{times}: {self.traffic or 'not known'}"]

    def schedule_text(self) -> str:
        """Return the order of a pipeline's step as a table: a row for each stage of ranks, a column for each time.

        Raises:
            StrategyError: the network is no Pipeline.
        """
        return render_text(self._schedule())

    def schedule_svg(self) -> str:
        """Return the order of a pipeline's step as a picture in SVG.

        Raises:
            StrategyError: the network is no Pipeline.
        """
        return render_svg(self._schedule())

    def _schedule(self) -> Schedule:
        if self.pipeline is None:
            raise StrategyError("there is no schedule: the network is no Pipeline(net_with_loss, micro_size)")
        return self.pipeline.build_schedule()


def _row(entries: Sequence[object]) -> str:
    return f"({', '.join(map(str, entries))})"


def _words(nbytes: int) -> str:
    """Return a size in the unit in which it has few digits: 95 KB, 9000 KB, 89.8 MB, 16.0 GB."""
    size = nbytes / 1024
    for unit in ("KB", "MB"):
        if size < 10240:
            return f"{size:.0f} {unit}" if unit == "KB" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"


def build_parallel_plan(
    compiled: ProgramCall,
    storage: ParameterStorage,
    *,
    settings: ParallelSettings,
    mesh: Mesh,
    layouts: Sequence[Layout] = (),
    price: PriceSummary | None = None,
) -> ParallelPlan:
    """Put every decision about one captured call together, but for what a step moves: `with_traffic` tells that.

    Args:
        layouts: those that the user gave; parameters are described in their names where they can be.
        price: of searched strategies.
    """
    group_of = {m.name: i for i, group in enumerate(compiled.groups) for m in group.members}
    level = settings.hsdp.optimizer_level if settings.hsdp else None
    return ParallelPlan(
        mode=settings.mode_text,
        world_size=mesh.size,
        mesh=mesh.shape,
        copies=compiled.copies,
        losses=describe(settings.compat),
        optimizer_parallel=f"hsdp {level}: {ZERO_WORDS[level]}" if level else HSDP_OFF,
        dataset_strategy=str(settings.dataset_strategy),
        parameters=tuple(_parameter(s, mesh, group_of.get(s.name, -1), layouts) for s in storage.stored.values()),
        operators=tuple(replace(o, module_path=user_name(o.module_path)) for o in compiled.program.operators),
        notes=tuple(compiled.program.notes),
        program=compiled.render(),
        price=price,
    )


def with_traffic(plan: ParallelPlan, compiled: ProgramCall, rank: int) -> ParallelPlan:
    """Return the plan of a call with every message of a step on a rank, for which the step is walked once more."""
    step = predict_traffic(compiled, rank)
    return replace(
        plan,
        operators=tuple(replace(o, traffic=moved) for o, moved in zip(plan.operators, step.operators, strict=True)),
        notes=(*plan.notes, *step.notes),
        results=step.results,
        groups=_groups(compiled, step),
        traffic=step.totals,
        borders=tuple(border for of_one in step.borders for border in build_border_plans(compiled.program, *of_one)),
    )


def _groups(compiled: ProgramCall, step: StepTraffic) -> tuple[GroupPlan, ...]:
    if compiled.whole is None:
        return ()
    gathered = zip(compiled.groups, step.gathers, strict=True)
    summed = zip(compiled.gradient_groups, step.sums, strict=True)
    return (
        *(GroupPlan(_names(group.members), tuple(messages), ()) for group, messages in gathered if messages),
        *(GroupPlan(_names(group.members), (), tuple(messages)) for group, messages in summed),
    )


def _names(members: Sequence[PlacedParameter]) -> tuple[str, ...]:
    return tuple(user_name(member.name) for member in members)


def _parameter(stored: PlacedParameter, mesh: Mesh, group: int, layouts: Sequence[Layout]) -> ParameterPlan:
    placed, item = stored.placement, stored.parameter.element_size()
    return ParameterPlan(
        name=user_name(stored.name),
        global_shape=placed.shape,
        local_shape=tuple(stored.part.shape),
        local_bytes=stored.part.numel() * item,
        global_bytes=torch.Size(placed.shape).numel() * item,
        layout=placed.stored.numbers(mesh),
        shard_ranks=mesh.extent(placed.shard_axes),
        reason=placed.reason,
        group=group,
        stages=placed.stages,
        on_host=placed.on_host,
        axes=next((names for layout in layouts if (names := layout.names(placed.stored, mesh)) is not None), None),
    )


def announce(plan: ParallelPlan, said: set[str]) -> None:
    """Say on rank 0 what was decided; visible also when the user has not configured logging.

    Args:
        said: what was said of the same network before, which is not said again.
    """
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    for say, text in [(log.info, plan.summary()), *((log.warning, note) for note in plan.notes)]:
        if text not in said:
            said.add(text)
            say(text)
