"""What a training step with given degrees takes, from the price of one part of its batch.

    a pass of a micro batch      max(C c, C m) + min(c, m), for C copies that compute c and send m seconds each: the
                                 messages of one travel while another computes
    without stages               M (F + B) for M micro batches
    pipeline                     what 1f1b takes from its first action to its last, action by action: with equal stages
                                 (M + S - 1) (F + B), a bubble of (S - 1) / (M + S - 1) (Narayanan et al., SC 2021)
    recomputed blocks            their forward pass is computed again in B; kept are what they read, and one block
    every step                   gathers of parameters, sums of gradients and the update, of the slowest stage

Stage s holds the activations of at most S - s micro batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.measured import measured_collective_seconds
from msrun.runtime.cost.operators import TensorSpec
from msrun.runtime.parallel.degrees.degrees import Degrees
from msrun.runtime.parallel.pipeline.schedule import build_schedule, time_actions
from msrun.runtime.partition.price import OperatorPrice
from msrun.runtime.partition.stage_assignment import assign_stages
from msrun.runtime.search.search import Plan, Splits
from msrun.runtime.sharding.layout import TensorLayout
from msrun.runtime.sharding.operators.rule import operator_call


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

    Raises:
        StrategyError: too few operators for so many stages.
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
