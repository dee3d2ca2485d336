"""PipelinedCall: one network for one shape of input, cut into stages, with this rank's stages ready to run.

The whole step, backward passes included, runs inside the forward call, because a schedule mixes both. The gradients are
kept, and `backward()` hands them out times the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx

from msrun.errors import CaptureError, StrategyError
from msrun.runtime.execute.executor import Executor
from msrun.runtime.execute.gradients import ParameterGroup
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.execute.segment_runner import Step, ValueOnItsWay, arrived, full_like
from msrun.runtime.execute.transfers import TensorFuture, start_all_reduce, start_receive, start_send, traffic
from msrun.runtime.groups import carries_by_gloo, ranks_group
from msrun.runtime.nn.random_stream import current_draw, slices_of_batch
from msrun.runtime.parallel.batch.divided_batch import hand_out
from msrun.runtime.parallel.batch.parts import BatchParts, join_values
from msrun.runtime.parallel.border import StepFunction, WholeResults, enter_step
from msrun.runtime.parallel.compilation.compiled import CompiledCall, ProgramCall, render_program
from msrun.runtime.parallel.gradients_in_backward import ArrivingGradients
from msrun.runtime.parallel.pipeline.schedule import Action, Schedule, receive_early
from msrun.runtime.parallel.precision import Scales, current_loss_scale, input_factor, leaf_factor
from msrun.runtime.partition.collective_messages import Message
from msrun.runtime.partition.events import LocalValues, StepEvents, gradient_reaches
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.partition.stages import BorderValue, StageProgram
from msrun.runtime.progress import waiting_in
from msrun.runtime.schedule.deferred_weights import DeferredWeightGradient, add_deferred_weights
from msrun.runtime.schedule.replay import ActivationEstimate
from msrun.runtime.sharding.operators.rule import DRAW

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


@dataclass
class PipelinedCall(ProgramCall):
    """Runs one captured call through the stages of a pipeline. Made by AutoParallel; lives as long as it."""

    program: LocalProgram
    """Of all stages."""
    schedule: Schedule
    line: Line
    stages: list[StageProgram]
    """All of them."""
    own: dict[int, CompiledCall]
    """stage -> its program on this rank, for the stages that it holds"""
    tied: dict[str, PlacedParameter]
    """Trainable parameters that this rank shares with other ranks of its line, and that this call uses somewhere."""
    elsewhere: dict[str, PlacedParameter]
    """Trainable parameters of this call that other stages alone hold."""
    holders: dict[str, tuple[int, ...]]
    """parameter name -> stages that hold it"""
    buffers: dict[str, Tensor]
    """placeholder -> buffer that the forward pass changes in one stage"""
    events: StepEvents
    """Of all stages on one rank."""
    loss: fx.Node | None
    """The result that gradients start from."""
    trains: bool
    """Whether anything requires a gradient."""
    parts: BatchParts
    scales: Scales
    """Factors of the loss of every copy of every micro batch, and of its gradient."""
    output_broadcast: bool
    arriving: ArrivingGradients = field(default_factory=ArrivingGradients)
    whole_results: WholeResults = field(default_factory=WholeResults)

    @property
    def values(self) -> LocalValues:
        """What every tensor of all stages is on one rank."""
        return self.events.values

    def programs_with_ends(self) -> list[tuple[LocalProgram, list[fx.Node] | None]]:
        """Return the stages of this rank with the values at which gradients come in."""
        loss = self.loss.name if self.loss is not None else ""
        found: list[tuple[LocalProgram, list[fx.Node] | None]] = []
        for stage in (self.stages[index] for index in self.own):
            names = {value.name for value in stage.sent if value.has_gradient} | {loss}
            ends = [node for name, node in zip(stage.made, stage.program.outputs, strict=True) if name in names]
            found.append((stage.program, ends))
        return found

    def messages_of_part(self) -> list[Message]:
        """Return what this rank sends and receives for one part of the batch; its own stages hand values over."""
        messages = []
        for stage in self.own:
            for other, values, is_out in (
                (stage + 1, self.stages[stage].sent, True),
                (stage - 1, self.stages[stage].received, False),
            ):
                if not 0 <= other < len(self.stages) or other in self.own:
                    continue
                for value in values:
                    messages.append(Message("send" if is_out else "receive", value.value.nbytes, 2))
                    if value.has_gradient:
                        messages.append(Message("receive" if is_out else "send", value.value.nbytes, 2))
        return messages

    def messages_of_step(self) -> list[Message]:
        """Return what the ranks of equal place in all stages exchange once in a step."""
        ranks = len(self.line.ranks)
        messages = [
            Message("all_reduce", stored.part.numel() * stored.part.element_size(), len(self.ranks_of(name)))
            for name, stored in self.tied.items()
        ]
        if ranks == 1:
            return messages
        inputs = [self.values[node] for node in self.program.inputs]
        results = [self.values[node] for node in self.program.outputs if isinstance(node, fx.Node)]
        moved = [("all_reduce", value) for value in inputs if value.requires_grad]
        moved += [("broadcast", value) for value in results if not value.shape or self.output_broadcast]
        for operation, value in moved:
            messages.append(Message(operation, value.nbytes * (self.parts.total if value.shape else 1), ranks))
        return messages

    def activations(self) -> ActivationEstimate:
        """Refuse."""
        raise CaptureError("there is no estimate for a pipeline, whose stages hold several micro batches at once")

    def render(self) -> str:
        """Return the programs of this rank's stages as text."""
        waits = self.schedule.splits_backward
        texts = (
            f"stage {stage}\n{render_program(call.executor, self.parts.copies, weights_by_schedule=waits)}"
            for stage, call in self.own.items()
        )
        return "\n".join(texts)

    @property
    def groups(self) -> list[ParameterGroup]:  # type: ignore[override]
        """Messages of this rank's parameters."""
        return [group for call in self.own.values() for group in call.groups]

    @property
    def stored(self) -> list[PlacedParameter]:  # type: ignore[override]
        """Trainable parameters of all stages, in the same order on every rank: their gradients come back so.

        Those of other stages have one without elements here, so that a script does the same on every rank.
        """
        own = {item.name: item for call in self.own.values() for item in call.stored}
        found = own | self.tied | self.elsewhere
        return [found[name] for name in self.program.parameters if name in found]

    @cached_property
    def actions(self) -> Sequence[Action]:
        """What this rank does in a step, in order."""
        return self.line.actions_of(self.schedule)

    @cached_property
    def draws(self) -> bool:
        """Whether any stage draws random numbers."""
        return any(node.op == "placeholder" and node.target == DRAW for node in self.program.graph.nodes)

    @cached_property
    def results_with_gradient(self) -> frozenset[int]:
        """The indexes of the results that gradients would flow back from in one process."""
        results = enumerate(self.program.outputs)
        return frozenset(
            i
            for i, node in results
            if isinstance(node, fx.Node) and (node is self.loss or self.values[node].requires_grad)
        )

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Let this rank's stages use another tensor as a buffer or constant, by the name of its placeholder."""
        super().set_buffer(name, value)
        if name in self.buffers:
            self.buffers[name] = value

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Run one step, or without gradients the forward passes alone; returns what the captured graph gives back."""
        needs_grad = torch.is_grad_enabled() and self.trains
        if needs_grad and self.loss is None:
            raise StrategyError(
                "Pipeline(net): in training net must return one scalar loss, such as Pipeline(WithLoss(net, loss_fn), "
                "micro_size); call it under torch.no_grad() for other results"
            )
        enter_step(tensors, self.input_parts, leaf_factor)
        draw = current_draw.get()
        if self.draws and draw is not None:
            draw.key()  # on every rank: the stream goes on where a stage draws nothing, too
        parameters = [stored.parameter for stored in self.stored]
        anchor = torch.zeros((), requires_grad=needs_grad)  # every rank's loss has a graph, also without parameters
        return list(_RunPipeline.apply(self, needs_grad, len(tensors), anchor, *tensors, *parameters))

    def step(self, tensors: Sequence[Tensor], *, needs_grad: bool) -> StepRun:
        """Run all actions of one step on this rank."""
        run = StepRun(
            self.schedule,
            self.line,
            self.actions,
            {stage: (self.stages[stage], call.executor) for stage, call in self.own.items()},
            self.parts.split(tensors),
            self.parts,
            needs_grad=needs_grad,
            loss=self.loss.name if self.loss is not None else None,
            seed=self.scales.gradient * current_loss_scale.get(),
        )
        run.run()
        self._share_buffers()
        return run

    def _share_buffers(self) -> None:
        """Let all ranks of the line have the buffers that a stage has changed: one message of each rank that did."""
        for holder, rank in enumerate(self.line.ranks) if len(self.line.ranks) > 1 else ():
            changed = [self.buffers[name] for name, of in self._buffer_holders.items() if of == holder]
            if not changed:
                continue
            as_bytes = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in changed]
            message = self._broadcast(torch.cat([part.to(self.line.device) for part in as_bytes]), holder)
            if rank == self.line.ranks[self.line.own]:
                continue
            for buffer, part in zip(changed, message.split([len(part) for part in as_bytes]), strict=True):
                buffer.detach().copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    @cached_property
    def _buffer_holders(self) -> dict[str, int]:
        """Placeholder of a changed buffer -> the rank of the line whose stage changes it."""
        names = ((node.name, stage.index) for stage in self.stages for node in stage.program.buffer_updates)
        return {name: self.schedule.holder[index] for name, index in names}

    # -- results ------------------------------------------------------------------------------------------------

    def results(self, run: StepRun) -> list[Any]:
        """Return the network's results: scalars on every rank, others where they are made unless broadcast."""
        return [
            self._result(run, index, node) if isinstance(node, fx.Node) else node
            for index, node in enumerate(self.program.outputs)
        ]

    def _result(self, run: StepRun, index: int, node: fx.Node) -> Tensor | None:
        stage = next(stage.index for stage in self.stages if index in stage.results)
        holder = self.schedule.holder[stage]
        value = self.values[node]
        is_scalar = not value.shape
        if self.line.own == holder:
            in_order = self.parts.in_order(run.results[index])
            joined: Tensor = join_values([arrived(value) for value in in_order], self.scales.loss)
        elif not is_scalar and not self.output_broadcast:
            return None
        else:
            meta = [torch.empty(value.shape, dtype=value.dtype, device="meta")] * self.parts.total
            empty = join_values(meta, self.scales.loss)
            joined = torch.empty(empty.shape, dtype=empty.dtype, device=self.line.device)
        return self._broadcast(joined, holder) if is_scalar or self.output_broadcast else joined

    def _broadcast(self, value: Tensor, holder: int) -> Tensor:
        if len(self.line.ranks) > 1:
            value = value.contiguous()
            traffic.add("broadcast", value)
            work = dist.broadcast(value, self.line.ranks[holder], group=self.line.group, async_op=True)
            with waiting_in(lambda: f"broadcast of a result from rank {self.line.ranks[holder]}"):
                work.wait()
        return value

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradients(self, run: StepRun) -> dict[str, Tensor]:
        """Return parameter name -> gradient of its stored part: reduced in each stage, then over the stages of tied
        parameters."""
        total: dict[str, Tensor] = {}
        for stage, call in self.own.items():
            for name, gradient in call.executor.reduce(run.gathered[stage]).items():
                total[name] = total[name] + gradient if name in total else gradient
        for name, stored in sorted(self.tied.items()):
            if self.program.parameters[name].node not in self._reached:
                continue
            part = total.get(name)
            part = torch.zeros_like(stored.part) if part is None else part
            total[name] = start_all_reduce(part.detach(), ranks_group(self.ranks_of(name))).wait()
        for name, stored in self.elsewhere.items():
            use = self.program.parameters[name]
            if use.node in self._reached:
                nothing = torch.empty_like(stored.part)
                total[name] = nothing.to_sparse(1) if use.has_row_gradient else nothing
        return total

    @cached_property
    def _reached(self) -> set[fx.Node]:
        """Values of all stages that the loss's gradient flows back to."""
        return gradient_reaches([self.loss] if self.loss is not None else [], self.values)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the ranks of this line that hold a parameter."""
        return self.line.ranks_of(self.schedule, self.holders[name])

    def input_gradients(self, run: StepRun) -> list[Tensor | None]:
        """Return the gradient of every tensor of the user, summed over the stages that read it."""
        return [
            self._input_gradient(run, index) if index in self._differentiable else None
            for index in range(len(self.program.inputs))
        ]

    @property
    def _differentiable(self) -> set[int]:
        return {i for i, node in enumerate(self.program.inputs) if node in self._reached}

    def _input_gradient(self, run: StepRun, index: int) -> Tensor:
        value = self.values[self.program.inputs[index]]
        found = run.input_gradients.get(index, {})
        zeros = torch.zeros(value.shape, dtype=value.dtype, device=self.line.device)
        per_micro_batch = [found.get(number, [None] * self.copies) for number in range(self.schedule.micro_size)]
        parts = [part if part is not None else zeros for part in self.parts.in_order(per_micro_batch)]
        total = torch.cat(parts) if value.shape else torch.stack(parts).sum()
        whole = start_all_reduce(total, self.line.group).wait() if len(self.line.ranks) > 1 else total
        return whole * input_factor(self.input_parts[index])


class _RunPipeline(StepFunction):
    """One whole step as one step of the user's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, call: PipelinedCall, needs_grad: bool, count: int, _anchor: Tensor, *tensors: Tensor
    ) -> tuple[Any, ...]:
        run = call.step(tensors[:count], needs_grad=needs_grad)
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.whole = None, call.whole_results.of_step()
        if needs_grad:
            by_name = call.gradients(run)
            inputs = call.input_gradients(run)
            ctx.loss = call.program.outputs.index(call.loss)
            ctx.gradients = [*inputs, *(by_name.get(stored.name) for stored in call.stored)]
            ctx.loss_scale = current_loss_scale.get()
        results = call.results(run)
        reached = call.results_with_gradient if needs_grad else frozenset()
        fixed = [v for i, v in enumerate(results) if isinstance(v, Tensor) and i not in reached]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        _RunPipeline.refuse_second_derivatives()
        _RunPipeline.begin_backward()
        (of_loss,) = ctx.whole.settle([incoming[ctx.loss]])
        settled = [of_loss if index == ctx.loss else gradient for index, gradient in enumerate(incoming)]
        return (None, None, None, None, *hand_out(ctx, settled, ctx.loss))
