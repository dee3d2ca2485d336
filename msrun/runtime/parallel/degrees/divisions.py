"""Divisions of a training step, priced: every number of stages, micro batches and copies that there may be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import world
from msrun.runtime.capture.autocast import apply_autocast
from msrun.runtime.capture.batch_rows import refuse_lost_rows
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.capture.target import Target
from msrun.runtime.parallel.batch.accumulation import GradAccumulation
from msrun.runtime.parallel.batch.divided_batch import find_wrappers
from msrun.runtime.parallel.degrees.degrees import Degrees, degrees_of_parts, divisors
from msrun.runtime.parallel.degrees.step_price import DividedGraph, PartPrices, StepPrice
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec
from msrun.runtime.parallel.recomputation import blocks_of
from msrun.runtime.parallel.search_settings import MB, SearchSettings
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parallel.strategy_search import steps_of
from msrun.runtime.partition.decide import Constraints
from msrun.runtime.search.search import search_plans
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

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
    """Price the divisions of a step of a network, with its loss, on whole batches like this one.

    Raises:
        StrategyError: nothing fits.
        CaptureError: the network cannot be captured.
    """
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
        for shards, plans in search_plans(captured, mesh, given, self._spec, step_of):
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
