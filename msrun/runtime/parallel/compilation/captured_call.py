"""CapturedCall: a call that was captured, for later calls that do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.errors import CaptureError, StrategyError
from msrun.runtime.capture.captured_graph import CapturedGraph, Target
from msrun.runtime.capture.dynamo import order_in_memory
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.sharding.sizes import SizesOfCall
from msrun.runtime.tensors.plain_tensors import plain_tensors

_MOST_SIZES = 4096
"""Kinds of batches that are known to fit; others are looked at again."""
Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device, bool]


class ParameterChanged(Exception):
    """A parameter is another object, or is trained or frozen unlike before."""


class CapturedCall:
    """Runs calls that do what a captured one did. Owned by one AutoParallel."""

    def __init__(
        self,
        target: Target,
        tensors: Sequence[Tensor],
        captured: CapturedGraph,
        compiled: CompiledCall | PipelinedCall,
        shapes_of: Callable[[Sequence[Tensor]], Sequence[Sequence[int]]],
    ) -> None:
        """Args:
        tensors: those of the captured call.
        shapes_of: returns the global shapes of what one part of a batch has of each tensor.
        """
        self.root = target.root
        self.compiled = compiled
        self._captured = captured
        self._kinds = kinds_of(tensors)
        self._shapes_of = shapes_of
        self._free = {(index, dim) for index, dims in captured.traced.free.values() for dim in dims}
        self._of_any_size = self._without_free_sizes(self._kinds)
        self._sizes: dict[str, SizesOfCall] = {}
        """shapes of a call -> its sizes, of those that have run"""
        self._tensors: Sequence[Tensor] = ()
        self._run = captured.traced.bind(self._run_graph)
        own = dict(target.root.named_parameters())
        parameters = [
            (index, own[captured.parameters[name]])
            for index, name in enumerate(captured.placeholders)
            if name in captured.parameters
        ]
        with plain_tensors():
            self._parameters = [(index, parameter, parameter.requires_grad) for index, parameter in parameters]
        others = {*captured.buffers, *captured.constants}
        self._others = [(index, name) for index, name in enumerate(captured.placeholders) if name in others]
        self._present: dict[str, Tensor] = {}
        buffers = dict(target.root.named_buffers())
        place_of = {captured.buffers[name]: index for index, name in self._others if name in captured.buffers}
        self._assigned = [(index, place_of.get(name), buffers[name]) for index, name in captured.assigned.items()]
        """output, where its buffer stands among what the graph is given, if it does, and the buffer"""

    def holds(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> bool:
        """Return whether a call does what the captured one did."""
        return self._fits(tensors) and self._captured.traced.holds(function, args, kwargs)

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        kinds = kinds_of(tensors)
        if kinds == self._kinds or str(kinds) in self._sizes:
            return True
        if not self._captured.sizes or self._without_free_sizes(kinds) != self._of_any_size:
            return False
        try:
            shapes = self._shapes_of(tensors)
        except StrategyError:  # cannot be divided; who captures it says so
            return False
        return not any(sizes.why_not(shapes) for sizes in self._captured.sizes)

    def _without_free_sizes(self, kinds: Sequence[Kind]) -> list[Any]:
        return [
            ([None if (i, d) in self._free else size for d, size in enumerate(shape)], *rest)
            for i, (shape, *rest) in enumerate(kinds)
        ]

    def is_of_new_sizes(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether no call of these sizes, for which `holds` is true, has run yet."""
        kinds = kinds_of(tensors)
        return kinds != self._kinds and str(kinds) not in self._sizes

    def why_not(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> str:
        """Return why a call is another one."""
        if not self._fits(tensors):
            return "tensors of other shapes or types"
        return self._captured.traced.why_not(function, args, kwargs)

    def check_parts(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call that left other numbers than it found, where parts of the batch share one run of the code.

        To be called once, after the captured call has run: whatever the call reads is guarded, so a guard that no
        longer holds is something that it changed.

        Raises:
            CaptureError: names what changed.
        """
        total = self.compiled.parts.total
        if total > 1 and (changed := self._captured.traced.why_not(function, args, kwargs)):
            raise CaptureError(
                f"the call reads and changes a Python value, so that `{changed}` holds no longer, and every part of "
                f"the batch would find another: the code runs once for {total} parts. Make it a buffer, or do not "
                "divide the batch"
            )

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        """Run a call; gradients reach the stored parameters by `backward()`.

        Raises:
            ParameterChanged: before anything is computed.
        """
        self._tensors = tensors
        if self._captured.sizes:
            key = str(kinds_of(tensors))
            if key not in self._sizes:
                self._sizes = dict(list(self._sizes.items())[-_MOST_SIZES:])
                self._sizes[key] = self._captured.sizes[-1].find(self._shapes_of(tensors))
            assert isinstance(self.compiled, CompiledCall), "no stage of a pipeline has symbols"
            self.compiled.executor.use(self._sizes[key])
        try:
            return self._run(function, args, kwargs)
        finally:
            self._tensors = ()

    def _run_graph(self, *given: Tensor) -> tuple[Any, ...]:
        """Run the program; called by the user's own Python code in place of the captured graph."""
        with plain_tensors():
            for index, parameter, is_trained in self._parameters:
                if given[index] is not parameter or parameter.requires_grad is not is_trained:
                    raise ParameterChanged
        for index, name in self._others:
            if given[index] is not self._present.get(name):
                if given[index].requires_grad and torch.is_grad_enabled():
                    raise CaptureError(
                        f"the network reads a tensor of shape {tuple(given[index].shape)} that needs a gradient and is "
                        "neither a parameter of its modules nor an argument: register it as nn.Parameter; of what an "
                        "earlier call has stored, store detach(), or return it and pass it to the next call"
                    )
                self._present[name] = given[index]
                self.compiled.set_buffer(name, given[index])
        results = self.compiled.run(self._tensors)
        for index, place, buffer in self._assigned:  # the program has written into the buffer that it was given
            results[index] = buffer if place is None else given[place]
        return tuple(results)


def kinds_of(tensors: Sequence[Tensor]) -> list[Kind]:
    """Return what of given tensors belongs to the kind of a call."""
    return [
        (tuple(tensor.shape), order_in_memory(tensor), tensor.dtype, tensor.device, tensor.requires_grad)
        for tensor in tensors
    ]
