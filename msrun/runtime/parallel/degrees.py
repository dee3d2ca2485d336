"""Divisions of a training step, priced: every number of stages, micro batches and copies that there may be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor, fx, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import world
from msrun.runtime.capture.aten import apply_autocast
from msrun.runtime.capture.batch_rows import refuse_lost_rows
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, Target
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import TensorSpec, measured_collective_seconds
from msrun.runtime.parallel.batch.divided_batch import GradAccumulation, MicroBatchInterleaved, find_wrappers
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec
from msrun.runtime.parallel.pipeline.pipeline import Pipeline, PipelineSpec
from msrun.runtime.parallel.pipeline.schedule import build_schedule, time_actions
from msrun.runtime.parallel.recomputation import blocks_of, recompute
from msrun.runtime.parallel.settings import MB, ParallelSettings, SearchSettings
from msrun.runtime.parallel.strategy_file import steps_of
from msrun.runtime.partition.decide import Constraints
from msrun.runtime.partition.price import OperatorPrice
from msrun.runtime.partition.stages import assign_stages
from msrun.runtime.search.search import Plan, Search, Splits
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import operator_call

COPIES = (1, 2)
"""Of a micro batch, that are interleaved: MindSpore's multi-copy has 2."""


@dataclass(frozen=True)
class Degrees:
    """One way to divide a training step."""

    stages: int = 1
    """Of a pipeline, with the schedule 1f1b."""
    micro_batches: int = 1
    copies: int = 1
    shards_optimizer: bool = False
    """Parameters and optimizer state are stored cut: hsdp level1."""
    recomputes: bool = False
    """Every block is computed again before its backward pass."""

    @property
    def parts(self) -> int:
        """Parts of the batch."""
        return self.micro_batches * self.copies

    def __str__(self) -> str:
        """Return what a user would write."""
        words = "net"
        if self.copies > 1:
            words = f"MicroBatchInterleaved({words}, {self.copies})"
        if self.stages > 1:
            words = f"Pipeline({words}, {self.micro_batches})"
        elif self.micro_batches > 1:
            words = f"GradAccumulation({words}, {self.micro_batches})"
        words = f"AutoParallel({words})"
        words += f".pipeline({self.stages})" if self.stages > 1 else ""
        words += ".hsdp(threshold=0)" if self.shards_optimizer else ""
        return f"{words}, recompute(block) of every block" if self.recomputes else words

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network that divides its batch so, its blocks recomputed if they are to be."""
        if self.recomputes:
            for block in blocks_of(network):
                recompute(block)
        if self.copies > 1:
            network = MicroBatchInterleaved(network, self.copies)
        if self.stages > 1:
            return Pipeline(network, self.micro_batches)
        return GradAccumulation(network, self.micro_batches) if self.micro_batches > 1 else network


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to a limit, ascending."""
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def degrees_of_parts(parts: int, stages: int) -> Iterator[tuple[int, int]]:
    """Yield micro batches and copies that make so many parts; 1f1b needs as many micro batches as stages."""
    for copies in COPIES:
        if parts % copies == 0 and (stages == 1 or parts // copies >= stages):
            yield parts // copies, copies


@dataclass
class _Stage:
    """What one stage does with one part of the batch."""

    forward_s: tuple[float, float] = (0.0, 0.0)
    """Computing, and messages."""
    backward_s: tuple[float, float] = (0.0, 0.0)
    repeated_s: tuple[float, float] = (0.0, 0.0)
    """Forward passes of blocks."""
    activation_bytes: int = 0
    repeated_bytes: int = 0
    """Of them those that blocks make."""
    block_bytes: int = 0
    """Of them those of the largest block."""
    entry_bytes: int = 0
    """What blocks read of others."""
    parameter_bytes: int = 0


@dataclass(frozen=True)
class StepPrice:
    """A training step with given degrees."""

    degrees: Degrees
    seconds: float
    memory_bytes: int
    """Of the fullest stage."""
    splits: Splits = field(default_factory=dict, repr=False)
    """How operators are cut on the ranks of a stage."""


class DividedGraph:
    """The operators of a captured graph by stage and block.

    Args:
        stages: of equal cost.
        blocks: paths of modules that may be recomputed.
    """

    def __init__(self, captured: CapturedGraph, stages: int, blocks: Sequence[str]) -> None:
        self.captured, self.stages = captured, stages
        operators = [node for node in captured.graph.nodes if node.op == "call_function"]
        one = dict.fromkeys(operators, 0)
        self.stage_of: Mapping[fx.Node, int] = one if stages == 1 else assign_stages(captured, stages, {}, "").stage_of
        paths = {node: f"{operator_call(node).module_path}." for node in operators}
        self.block_of = {
            node: next((block for block in blocks if path.startswith(f"{block}.")), None)
            for node, path in paths.items()
        }


class PartPrices:
    """The price of one part of the batch, stage by stage.

    Args:
        plan: decisions on the ranks of a stage, of all operators, with their price.
    """

    def __init__(self, graph: DividedGraph, plan: Plan) -> None:
        self._graph, self._decisions, self._cost, self._splits = graph, plan.decisions, plan.price, plan.splits
        self._mesh = plan.decisions.mesh
        self._stages = [_Stage() for _ in range(graph.stages)]
        self._fill()
        self._border_bytes = self._largest_border()

    def step(self, degrees: Degrees, device: DeviceProfile) -> StepPrice:
        """Return the price of a training step whose batch has `degrees.parts` such parts."""
        passes = [
            (_pass_s(stage.forward_s, degrees), _pass_s(self._backward(stage, degrees), degrees))
            for stage in self._stages
        ]
        if len(self._stages) == 1:
            seconds = degrees.micro_batches * sum(passes[0])
        else:
            link = device.in_host if self._mesh.size < device.devices_per_host else device.between_hosts
            sent = self._border_bytes * degrees.copies
            delay = device.wait_s + measured_collective_seconds("send", sent, 2, link, device)
            schedule = build_schedule("1f1b", len(self._stages), 1, degrees.micro_batches)
            rows = time_actions(schedule, lambda action: passes[action.stage][action.kind != "F"], delay)
            seconds = max(row[-1].end for row in rows)
        own = max(stage.parameter_bytes for stage in self._stages) / (self._parameter_bytes or 1)
        parameters_s = sum(each.seconds for each in (*self._cost.gathers, *self._cost.sums)) + self._cost.update_s
        memory = max(self._memory(index, degrees) for index in range(len(self._stages)))
        return StepPrice(degrees, seconds + own * parameters_s, memory, self._splits)

    @property
    def _parameter_bytes(self) -> int:
        return sum(stage.parameter_bytes for stage in self._stages)

    @staticmethod
    def _backward(stage: _Stage, degrees: Degrees) -> tuple[float, float]:
        again = stage.repeated_s if degrees.recomputes else (0.0, 0.0)
        return stage.backward_s[0] + again[0], stage.backward_s[1] + again[1]

    def _memory(self, index: int, degrees: Degrees) -> int:
        stage, cost = self._stages[index], self._cost
        held = min(len(self._stages) - index, degrees.micro_batches) * degrees.copies
        kept, passing = stage.activation_bytes, 0
        if degrees.recomputes:
            kept, passing = kept - stage.repeated_bytes + stage.entry_bytes, stage.block_bytes
        state = cost.memory_bytes - cost.activation_bytes
        return round(state * stage.parameter_bytes / (self._parameter_bytes or 1)) + held * kept + passing

    # -- what every stage has -------------------------------------------------------------------------------------

    def _fill(self) -> None:
        prices = {each.name: each for each in self._cost.operators}
        counted: set[str] = set()
        of_block: dict[str, int] = {}
        entries: dict[tuple[str, fx.Node], _Stage] = {}
        for node, number in self._graph.stage_of.items():
            stage, block = self._stages[number], self._graph.block_of[node]
            kept = self._cost.activations.get(node.name, 0)
            stage.activation_bytes += kept
            if block is not None:
                stage.repeated_bytes += kept
                of_block[block] = of_block.get(block, 0) + kept
                stage.block_bytes = max(stage.block_bytes, of_block[block])
            if node.name in prices:
                _add(stage, prices.pop(node.name), is_repeated=block is not None)
            for source in node.all_input_nodes:
                name = self._graph.captured.parameters.get(source.name)
                if name is not None and name not in counted:
                    counted.add(name)
                    stage.parameter_bytes += self._local_bytes(source, self._decisions.parameters[name].layout)
                elif block is not None and source in self._graph.stage_of and self._graph.block_of[source] != block:
                    entries[block, source] = stage
        for (_, source), stage in entries.items():
            stage.entry_bytes += self._bytes_of(source)
        for rest in prices.values():  # results, and buffers
            _add(self._stages[-1], rest, is_repeated=False)

    def _bytes_of(self, node: fx.Node) -> int:
        decision = self._decisions.operators[node.name]
        return self._local_bytes(node, decision.layouts[0]) if decision.layouts else 0

    def _largest_border(self) -> int:
        """Return the most bytes of one part that travel from a stage to the next one."""
        borders = [0] * len(self._stages)
        for node, number in self._graph.stage_of.items():
            last = max(
                (self._graph.stage_of[user] for user in node.users if user in self._graph.stage_of), default=number
            )
            for border in range(number, last):
                borders[border] += self._bytes_of(node)
        return max(borders)

    def _local_bytes(self, node: fx.Node, layout: TensorLayout) -> int:
        """Return the bytes of a rank's part of a value."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return 0
        return TensorSpec(layout.local_shape(self._mesh, value.shape), value.dtype).nbytes


def _add(stage: _Stage, cost: OperatorPrice, *, is_repeated: bool) -> None:
    forward = cost.forward_s, sum(each.seconds for each in cost.forward_messages)
    backward = cost.backward_s, sum(each.seconds for each in cost.backward_messages)
    stage.forward_s = _sum(stage.forward_s, forward)
    stage.backward_s = _sum(stage.backward_s, backward)
    if is_repeated:
        stage.repeated_s = _sum(stage.repeated_s, forward)


def _sum(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def _pass_s(seconds: tuple[float, float], degrees: Degrees) -> float:
    return degrees.copies * max(seconds) + min(seconds)


MOST_STAGES, MOST_PARTS = 64, 64


@dataclass(frozen=True)
class Divisions:
    """What was priced."""

    best: StepPrice
    """The fastest step that fits."""
    priced: tuple[StepPrice, ...]
    """All, the fastest first."""
    limit_bytes: int
    notes: tuple[str, ...]


def find_divisions(
    network: nn.Module, batch: Sequence[Tensor], ranks: int, settings: SearchSettings, time_limit_s: float
) -> Divisions:
    """Price the divisions of a step of a network, with its loss, on whole batches like this one."""
    return _Search(network, batch, ranks, settings, time_limit_s).run()


def settings_of(step: StepPrice, settings: ParallelSettings) -> ParallelSettings:
    """Return settings with which a network that `Degrees.wrap` has wrapped runs as it was priced."""
    return replace(
        settings,
        parallel_mode="semi_auto",
        dataset_strategy="full_batch",
        hsdp=HsdpSpec(threshold=0) if step.degrees.shards_optimizer else settings.hsdp,
        pipeline=PipelineSpec(step.degrees.stages),
        splits=step.splits,
    )


class _Search:
    def __init__(
        self, network: nn.Module, batch: Sequence[Tensor], ranks: int, settings: SearchSettings, time_limit_s: float
    ) -> None:
        self._network, self._batch, self._ranks = network, batch, ranks
        self._spec = settings.spec()
        self._deadline = time.monotonic() + time_limit_s
        names = {id(module): name for name, module in network.named_modules()}
        self._blocks = [names[id(block)] for block in blocks_of(network)]
        self._notes: list[str] = []
        self._found: list[StepPrice] = []

    @cached_property
    def _rows(self) -> int:
        sizes = {tensor.shape[0] for tensor in self._batch if tensor.dim()}
        return sizes.pop() if len(sizes) == 1 else 1

    def run(self) -> Divisions:
        begin = time.monotonic()
        for parts in divisors(self._rows, MOST_PARTS):
            if not self._price_parts(parts):
                break
        if time.monotonic() > self._deadline:
            self._notes.append(f"the time limit came after {time.monotonic() - begin:.0f} s, before all were priced")
        limit, priced = self._spec.limit_bytes, sorted(self._found, key=lambda step: step.seconds)
        best = next((step for step in priced if step.memory_bytes <= limit), None)
        if best is None:
            least = min(priced, key=lambda step: step.memory_bytes, default=None)
            need = "" if least is None else f": the smallest step found needs {least.memory_bytes / MB:.1f} MB"
            raise StrategyError(
                f"search_degrees: no division on {self._ranks} ranks fits into {limit / MB:.1f} MB{need}; give more "
                "ranks or memory, a smaller batch, or an optimizer with less state"
            )
        return Divisions(best, tuple(priced), limit, tuple(self._notes))

    def _price_parts(self, parts: int) -> bool:
        """Price all divisions with so many parts of the batch; return whether more parts are possible and in time."""
        if parts > 1 and time.monotonic() > self._deadline:
            return False
        try:
            captured = self._capture(parts)
        except (CaptureError, StrategyError) as error:
            if parts == 1:
                raise
            self._notes.append(f"not possible: {parts} parts of the batch: {str(error)[:120]}")
            return True
        divides = self._divides(captured)
        if parts > 1 and not divides:
            return False
        for stages in divisors(self._ranks, MOST_STAGES if divides else 1):
            if (parts, stages) != (1, 1) and time.monotonic() > self._deadline:
                return False
            if any(degrees_of_parts(parts, stages)):
                self._found += self._price_stages(captured, parts, stages)
        return True

    def _capture(self, parts: int) -> CapturedGraph:
        """Return the graph of one part of the batch."""
        root = self._network if parts == 1 else GradAccumulation(self._network, parts)
        shapes = [(each.shape[0] // parts, *each.shape[1:]) if each.dim() else () for each in self._batch]
        wrappers = find_wrappers(root)
        captured = capture(
            Target(root, root),
            list(self._batch),
            {},
            input_shapes=shapes,
            parameter_shapes={},
            strategies=strategies_of(root),
            wrappers=wrappers,
        )
        refuse_lost_rows(captured.graph, parts)
        apply_autocast(captured.graph, captured.parameters, world.device().type, None)
        return captured

    def _divides(self, captured: CapturedGraph) -> bool:
        """Return whether a step may have parts: batch statistics would be others, and only a scalar loss is joined."""
        first = captured.outputs[0] if captured.outputs else None
        is_scalar = first is not None and not first.meta["val"].dim()
        if captured.buffer_updates or captured.stored or not is_scalar:
            why = "changes buffers in its forward pass" if is_scalar else "gives no loss"
            self._notes.append(f"the network {why}, so that its batch is not divided")
            return False
        return True

    def _price_stages(self, captured: CapturedGraph, parts: int, stages: int) -> Iterator[StepPrice]:
        mesh, device = build_mesh(self._ranks // stages), self._spec.device
        given = Constraints([TensorLayout.replicated(each.dim()) for each in self._batch])
        step_of = steps_of(captured, ParallelSettings(), self._spec.optimizer_states, self._network)
        try:
            graph = DividedGraph(captured, stages, self._paths(parts))
        except StrategyError as error:
            self._notes.append(f"not possible: {error}")
            return
        divisions = [
            (*each, recomputes)
            for each in degrees_of_parts(parts, stages)
            for recomputes in ((False, True) if self._blocks else (False,))
        ]
        for shards, plans in Search(captured, mesh, given, self._spec, step_of).plans():
            useful = [plan for plan in plans if not shards or plan.price.gathered_bytes]
            prices = [PartPrices(graph, plan) for plan in useful]
            for micro_batches, copies, recomputes in divisions:
                degrees = Degrees(stages, micro_batches, copies, shards, recomputes)
                found = [each.step(degrees, device) for each in prices]
                if found:
                    yield min(found, key=self._rank)

    def _rank(self, step: StepPrice) -> tuple[bool, float]:
        """Return what is least of the best plan: the fastest that fits, else the smallest."""
        fits = step.memory_bytes <= self._spec.limit_bytes
        return not fits, step.seconds if fits else step.memory_bytes

    def _paths(self, parts: int) -> list[str]:
        """Return the paths of the blocks in a captured graph."""
        return [f"network.{name}" if parts > 1 else name for name in self._blocks]
