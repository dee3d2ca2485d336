"""PipelinedCall: one network for one shape of input, cut into stages, with this rank's stages ready to run.

The whole step, backward passes included, runs inside the forward call, because a schedule mixes both. The gradients are
kept, and `backward()` hands them out times the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from msrun.errors import CaptureError, StrategyError
from msrun.runtime.execute.parameters import ParameterGroup
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.execute.segment_runner import arrived
from msrun.runtime.execute.transfers import start_all_reduce, traffic
from msrun.runtime.groups import ranks_group
from msrun.runtime.nn.random_stream import current_draw
from msrun.runtime.parallel.batch.divided_batch import hand_out
from msrun.runtime.parallel.batch.parts import BatchParts, join_values
from msrun.runtime.parallel.border import StepFunction, WholeResults, enter_step
from msrun.runtime.parallel.compilation.compiled import CompiledCall, ProgramCall
from msrun.runtime.parallel.gradients_in_backward import ArrivingGradients
from msrun.runtime.parallel.pipeline.schedule import Action, Schedule
from msrun.runtime.parallel.pipeline.stage_runner import Line, StepRun
from msrun.runtime.parallel.program_text import render_program
from msrun.runtime.parallel.scaling import Scales, current_loss_scale, input_factor, leaf_factor
from msrun.runtime.partition.collective_messages import Message
from msrun.runtime.partition.local_values import LocalValue, LocalValues, gradient_reaches
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.partition.stages import StageProgram
from msrun.runtime.progress import waiting_in
from msrun.runtime.schedule.activations import ActivationEstimate
from msrun.runtime.sharding.operators.rule import DRAW


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
    values: Mapping[fx.Node, LocalValue]
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

    def local_values(self) -> LocalValues:
        """Return what every tensor of all stages is on one rank."""
        return self.values

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
        """Refuse.

        Raises:
            CaptureError: always.
        """
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
        """Run one step, or without gradients the forward passes alone; returns what the captured graph gives back.

        Raises:
            StrategyError: gradients are wanted and the network returns no loss, or several.
        """
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
