"""A compiled call as one step of the user's autograd graph; with micro batches its backward passes run in the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msrun.errors import CaptureError
from msrun.runtime.nn.dropout_stream import slices_of_batch
from msrun.runtime.parallel.batch.accumulation import hand_out
from msrun.runtime.parallel.late_loss import LateLoss
from msrun.runtime.parallel.scaling import current_loss_scale

if TYPE_CHECKING:
    from msrun.runtime.parallel.compilation.compiled import CompiledCall


class RunProgram(torch.autograd.Function):
    """The whole local program as one step of the user's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, compiled: CompiledCall, is_grad_enabled: bool, count: int, *tensors: Tensor
    ) -> tuple[Any, ...]:
        inputs = tensors[:count]
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        (batches,) = compiled.parts.split(inputs)
        (places,) = compiled.parts.places
        with slices_of_batch(places, compiled.parts.total):
            step = compiled.executor.forward(batches, needs_grad=needs_grad)
        ctx.compiled, ctx.step, ctx.count = compiled, step, count
        results = compiled.merge([compiled.executor.results(step, leaves_late=needs_grad)])
        known = [value for value in results if isinstance(value, Tensor) and not isinstance(value, LateLoss)]
        fixed = [value for value in known if not value.is_floating_point()]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        compiled: CompiledCall = ctx.compiled
        if ctx.step is None:
            raise CaptureError("backward() was called twice on one loss: call the network again for another backward")
        step, ctx.step = ctx.step, None
        with torch.enable_grad():
            by_name = compiled.executor.backward(step, compiled.gradients_of_copies(gradients))
        inputs = compiled.join_input_gradients([compiled.executor.input_gradients(step)])
        return (None, None, None, *inputs, *(by_name.get(stored.name) for stored in compiled.stored))


class RunMicroBatches(torch.autograd.Function):
    """The local program for one micro batch after the other, each forward and backward, as one autograd step."""

    @staticmethod
    def forward(
        ctx: Any, compiled: CompiledCall, is_grad_enabled: bool, count: int, *tensors: Tensor
    ) -> tuple[Any, ...]:
        executor = compiled.executor
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        parameters = executor.begin()
        micro_batches = compiled.parts.split(tensors[:count])
        results: list[list[list[Any]]] = []
        of_inputs: list[list[list[Tensor | None]]] = []
        by_name: dict[str, Tensor] = {}
        for number, (batches, slices) in enumerate(zip(micro_batches, compiled.parts.places, strict=True)):
            with slices_of_batch(slices, compiled.parts.total):
                step = executor.forward(batches, needs_grad=needs_grad, gathered=parameters)
            results.append(executor.results(step, leaves_late=needs_grad))
            if needs_grad:
                is_last = number == len(micro_batches) - 1
                by_name = executor.backward(step, compiled.gradients_of_loss(results[-1]), reduces=is_last)
                of_inputs.append(executor.input_gradients(step))
        if needs_grad:
            joined = compiled.join_input_gradients(of_inputs)
            ctx.gradients = [*joined, *(by_name.get(stored.name) for stored in compiled.stored)]
            ctx.loss_scale = current_loss_scale.get()
        merged = compiled.merge(results)
        ctx.mark_non_differentiable(*(value for value in merged[1:] if isinstance(value, Tensor)))
        return tuple(merged)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *hand_out(ctx, gradients[0])
