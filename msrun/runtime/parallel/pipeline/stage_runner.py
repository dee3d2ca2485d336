"""StepRun: one step of a pipeline on this rank: the actions of its schedule, one after the other.

Stages of one rank hand values over; others send them to the rank of equal place in the neighbouring stage. Sends and
receives are started where the schedule says and waited for where the value is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.execute.executor import Executor
from msrun.runtime.execute.segment_runner import Step, ValueOnItsWay, arrived, full_like
from msrun.runtime.execute.transfers import TensorFuture, start_receive, start_send
from msrun.runtime.groups import carries_by_gloo, ranks_group
from msrun.runtime.nn.random_stream import slices_of_batch
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.pipeline.schedule import Action, Schedule, receive_early
from msrun.runtime.partition.stages import BorderValue, StageProgram
from msrun.runtime.schedule.deferred_weights import DeferredWeightGradient, add_deferred_weights

Direction = Literal["F", "B"]
Place = tuple[int, int]
"""(stage, micro batch)"""
Batch = Sequence[Tensor]
on_action: list[Callable[[Action | None], None]] = []
"""Called before every action of a step, and with None after the last one."""


@dataclass(frozen=True)
class Line:
    """The ranks of equal place in all stages: they alone exchange messages."""

    ranks: tuple[int, ...]
    """World ranks, by pipeline rank."""
    own: int
    """This rank's pipeline rank."""
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group, made at its first use."""
        return ranks_group(self.ranks)

    def actions_of(self, schedule: Schedule) -> Sequence[Action]:
        """Return what this rank does, in order; with early receives where the backend carries both ways at once."""
        actions = schedule.actions[self.own]
        if not carries_by_gloo(self.group, self.device):
            return actions
        return receive_early(actions)

    def ranks_of(self, schedule: Schedule, stages: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that hold some of these stages, ascending."""
        return tuple(self.ranks[rank] for rank in sorted({schedule.holder[stage] for stage in stages}))


@dataclass
class _Forwarded:
    """What a stage keeps of a micro batch until its backward pass."""

    step: Step
    passed: frozenset[str]
    """Values that it only handed on."""
    sends: list[TensorFuture] = field(default_factory=list)


class StepRun:
    """Runs the actions of one step.

    Args:
        actions: what this rank does, in order: `line.actions_of(schedule)`.
        stages: the stages that this rank holds.
        micro_batches: per micro batch and copy the user's tensors.
        parts: how they are cut out of the batch.
        needs_grad: False leaves backward passes out.
        loss: name of the network's loss; the gradients of a step start from it.
        seed: gradient of every loss.
    """

    def __init__(
        self,
        schedule: Schedule,
        line: Line,
        actions: Sequence[Action],
        stages: Mapping[int, tuple[StageProgram, Executor]],
        micro_batches: Sequence[Sequence[Batch]],
        parts: BatchParts,
        *,
        needs_grad: bool,
        loss: str | None,
        seed: float,
    ) -> None:
        self._schedule = schedule
        self._line = line
        self._actions = actions
        self._stages = stages
        self._micro_batches = micro_batches
        self._parts = parts
        self._needs_grad = needs_grad
        self._loss = loss
        self._seed = seed
        self.gathered = {stage: executor.begin() for stage, (_, executor) in stages.items()}
        self.results: dict[int, list[list[Tensor | ValueOnItsWay]]] = {}
        """index of a result -> per micro batch and copy, for those that this rank's stages make"""
        self.input_gradients: dict[int, dict[int, list[Tensor | None]]] = {}
        """index of a tensor of the user -> micro batch -> per copy, summed over this rank's stages"""
        self._here: dict[tuple[Direction, int, int], list[list[TensorFuture]]] = {}
        """what a stage is going to read, per copy and border value"""
        self._leaving: dict[tuple[Direction, int, int], list[list[Tensor]]] = {}
        self._forwarded: dict[Place, _Forwarded] = {}
        self._deferred: dict[Place, list[DeferredWeightGradient]] = {}
        self._sends: list[TensorFuture] = []

    def run(self) -> None:
        """Do everything; gradients of parameters are added up in the gathered groups."""
        for action in self._actions:
            for look in on_action:
                look(action)
            self._do(action)
        for look in on_action:
            look(None)
        for future in self._sends:
            future.wait()

    def _do(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        if not self._needs_grad and action.kind in ("B", "I", "W", "SEND_B", "RECV_B"):
            return
        match action.kind:
            case "F":
                self._forward(stage, micro_batch)
            case "B" | "I":
                self._backward(stage, micro_batch, defers=action.kind == "I")
            case "W":
                add_deferred_weights(self._deferred.pop((stage, micro_batch)))
            case "SEND_F":
                self._send("F", stage, stage + 1, micro_batch)
            case "SEND_B":
                self._send("B", stage, stage - 1, micro_batch)
            case "RECV_F":
                self._receive("F", stage - 1, stage, micro_batch)
            case "RECV_B":
                self._receive("B", stage + 1, stage, micro_batch)

    # -- computing ----------------------------------------------------------------------------------------------

    def _forward(self, stage: int, micro_batch: int) -> None:
        program, executor = self._stages[stage]
        batches, passing = [], []
        for copy, user in enumerate(self._micro_batches[micro_batch]):
            received = self._take("F", stage, micro_batch, copy, program.received)
            read = [
                received[value.name].requires_grad_(self._needs_grad and value.has_gradient) for value in program.reads
            ]
            batches.append([*(user[index] for index in program.user_inputs), *read])
            passing.append(received)
        self._here.pop(("F", stage, micro_batch), None)
        with slices_of_batch(self._parts.places[micro_batch], self._parts.total):
            step = executor.forward(batches, needs_grad=self._needs_grad, gathered=self.gathered[stage])
        results = executor.results(step, leaves_late=self._needs_grad)
        made = [dict(zip(program.made, values, strict=True)) for values in results]
        for index, name in program.results.items():
            self.results.setdefault(index, []).append([values[name] for values in made])
        leaving = [
            [arrived(values[v.name]) if v.name in values else passed_on[v.name].detach() for v in program.sent]
            for values, passed_on in zip(made, passing, strict=True)
        ]
        self._hand_on("F", stage, stage + 1, micro_batch, leaving)
        if self._needs_grad:
            passed = frozenset(value.name for value in program.sent if value.name not in program.made)
            self._forwarded[stage, micro_batch] = _Forwarded(step, passed)

    def _backward(self, stage: int, micro_batch: int, *, defers: bool) -> None:
        program, executor = self._stages[stage]
        kept = self._forwarded.pop((stage, micro_batch))
        sent = [value for value in program.sent if value.has_gradient]
        gradients: list[dict[str, Tensor]] = []
        for copy in range(len(kept.step.copies)):
            gradients.append(self._take("B", stage, micro_batch, copy, sent))
        self._here.pop(("B", stage, micro_batch), None)
        passed = [{name: given.pop(name) for name in kept.passed if name in given} for given in gradients]
        self._add_seed(program, gradients)
        own_names = dict(zip(program.made, (node.name for node in program.program.outputs), strict=True))
        gradients = [{own_names[name]: gradient for name, gradient in given.items()} for given in gradients]
        with torch.enable_grad():
            deferred = self._deferred.setdefault((stage, micro_batch), []) if defers else None
            executor.backward(kept.step, gradients, reduces=False, deferred=deferred)
        per_copy = executor.input_gradients(kept.step)
        self._note_input_gradients(program, micro_batch, per_copy)
        reads = [value.name for value in program.reads]
        own = [dict(zip(reads, found[len(program.user_inputs) :], strict=True)) for found in per_copy]
        back = [value for value in program.received if value.has_gradient]
        leaving = [
            [self._sum(value, mine.get(value.name), others.get(value.name)) for value in back]
            for mine, others in zip(own, passed, strict=True)
        ]
        self._hand_on("B", stage, stage - 1, micro_batch, leaving)
        for future in kept.sends:  # what came back shows that they have arrived
            future.wait()

    def _add_seed(self, program: StageProgram, gradients: Sequence[dict[str, Tensor]]) -> None:
        """Let gradients start where the loss is made."""
        for index, name in program.results.items():
            if name == self._loss:
                for given, loss in zip(gradients, self.results[index][-1], strict=True):
                    seed = full_like(loss, self._seed)
                    given[name] = given[name] + seed if name in given else seed

    def _sum(self, value: BorderValue, own: Tensor | None, passed: Tensor | None) -> Tensor:
        """Return the gradient of a received value: of its use here, of its use further on, or of both."""
        if own is not None and passed is not None:
            return own + passed
        given = own if own is not None else passed
        if given is not None:
            return given
        return torch.zeros(value.value.shape, dtype=value.value.dtype, device=self._line.device)

    def _note_input_gradients(
        self, program: StageProgram, micro_batch: int, per_copy: Sequence[Sequence[Tensor | None]]
    ) -> None:
        for place, index in enumerate(program.user_inputs):
            found = self.input_gradients.setdefault(index, {})
            before = found.get(micro_batch, [None] * len(per_copy))
            now = [gradients[place] for gradients in per_copy]
            found[micro_batch] = [
                b if a is None else a if b is None else a + b for a, b in zip(before, now, strict=True)
            ]

    # -- messages -----------------------------------------------------------------------------------------------

    def _hand_on(
        self, direction: Direction, stage: int, to_stage: int, micro_batch: int, values: list[list[Tensor]]
    ) -> None:
        """Give values to a stage of this rank, or keep them for the send that the schedule has next."""
        if not 0 <= to_stage < self._schedule.stages:
            return
        if self._schedule.holder[to_stage] == self._line.own:
            self._here[direction, to_stage, micro_batch] = [[TensorFuture(v.detach()) for v in copy] for copy in values]
        else:
            self._leaving[direction, stage, micro_batch] = values

    def _send(self, direction: Direction, stage: int, to_stage: int, micro_batch: int) -> None:
        to_rank = self._line.ranks[self._schedule.holder[to_stage]]
        text = lambda: _describe(direction, micro_batch, stage, to_stage)  # noqa: E731
        values = self._leaving.pop((direction, stage, micro_batch))
        sends = [start_send(value, to_rank, self._line.group, text) for copy in values for value in copy]
        kept = self._forwarded.get((stage, micro_batch)) if direction == "F" else None
        (kept.sends if kept is not None and self._gets_gradient(stage) else self._sends).extend(sends)

    def _gets_gradient(self, stage: int) -> bool:
        return any(value.has_gradient for value in self._stages[stage][0].sent)

    def _receive(self, direction: Direction, from_stage: int, stage: int, micro_batch: int) -> None:
        program, _ = self._stages[stage]
        from_rank = self._line.ranks[self._schedule.holder[from_stage]]
        text = lambda: _describe(direction, micro_batch, from_stage, stage)  # noqa: E731
        expected = program.received if direction == "F" else [v for v in program.sent if v.has_gradient]
        self._here[direction, stage, micro_batch] = [
            [
                start_receive(v.value.shape, v.value.dtype, self._line.device, from_rank, self._line.group, text)
                for v in expected
            ]
            for _ in self._micro_batches[micro_batch]
        ]

    def _take(
        self, direction: Direction, stage: int, micro_batch: int, copy: int, expected: Sequence[BorderValue]
    ) -> dict[str, Tensor]:
        """Wait for what a stage is about to read."""
        arriving = self._here.get((direction, stage, micro_batch), [[]] * (copy + 1))[copy]
        return {value.name: future.wait() for value, future in zip(expected, arriving, strict=True)}


def _describe(direction: Direction, micro_batch: int, from_stage: int, to_stage: int) -> str:
    what = "micro batch" if direction == "F" else "gradients of micro batch"
    return f"{what} {micro_batch}, stage {from_stage} to {to_stage},"
