"""Captured: the engine of networks that are captured and cut, and the calls that it has captured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import world
from msrun.runtime.agreement import meetings
from msrun.runtime.capture.capture import forget_shapes, without_collector
from msrun.runtime.capture.captured_graph import CapturedGraph, Target
from msrun.runtime.capture.dynamo import order_in_memory
from msrun.runtime.parallel.batch.parts import describe_batch, find_tensors
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compilation.compiled import CompiledCall, ProgramCall
from msrun.runtime.parallel.engine import Engine
from msrun.runtime.parallel.given_strategies import check_named_cuts
from msrun.runtime.parallel.modes.own_gradients import check_captured
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.pipeline.compilation import compile_call
from msrun.runtime.parallel.plan import ParallelPlan, log, with_traffic
from msrun.runtime.parallel.precision import autocast
from msrun.runtime.parallel.strategy_file import write_operator_strategies
from msrun.runtime.schedule.replay import ActivationEstimate
from msrun.runtime.sharding.layout import Box, build_mesh
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
        compiled: ProgramCall,
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
        """Run a call; gradients reach the stored parameters by `backward()`."""
        self._tensors = tensors
        if self._captured.sizes:
            key = str(kinds_of(tensors))
            if key not in self._sizes:
                self._sizes = dict(list(self._sizes.items())[-_MOST_SIZES:])
                self._sizes[key] = self._captured.sizes[-1].find(self._shapes_of(tensors))
            self.compiled.use(self._sizes[key])
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


@dataclass(frozen=True)
class _KnownTarget(Target):
    known: CapturedCall


class Captured(Engine):
    """Captures a call once for all that do the same, and runs its program; of a pipeline the stages of this rank."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.compilations: dict[int, Compilation] = {}
        """id of the root module -> what compiles its calls"""
        self.calls: list[CapturedCall] = []
        """Calls that were captured, the one that ran last first; no more than the settings say."""
        self._tell_traffic: Callable[[ParallelPlan], ParallelPlan] | None = None
        """Tells the plan what its step moves, until that is asked for: it takes a tenth of a capture."""

    @property
    def is_placed(self) -> bool:  # type: ignore[override]
        """Whether a call was captured."""
        return bool(self.calls)

    def target(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Target:
        """Return what a call runs, with the captured call that does the same if there is one."""
        known = self._find(function, args, kwargs) if self.calls else None
        return super().target(function, args, kwargs) if known is None else _KnownTarget(function, known.root, known)

    def _find(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CapturedCall | None:
        args, kwargs, tensors = tuple(args), dict(kwargs), find_tensors(args, kwargs)
        with autocast(self.settings.precision):
            for index, call in enumerate(self.calls):
                if call.holds(function, args, kwargs, tensors):
                    if index:
                        self.calls.insert(0, self.calls.pop(index))  # the newest one stands first
                    return call
        return None

    def place(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Capture and cut the network for arguments like these, unless that was done."""
        if self._find(target.call, args, kwargs) is None:
            meetings.begin_call()
            self._capture(target, tuple(args), kwargs, find_tensors(args, kwargs))

    def call(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the program; capture it first if no captured call does the same."""
        meetings.begin_call()
        args, kwargs, tensors = tuple(args), dict(kwargs), find_tensors(args, kwargs)
        if isinstance(target, _KnownTarget):
            if target.known.is_of_new_sizes(tensors):
                batch = describe_batch(args, kwargs)
                meetings.capture(batch)
                self.compilations[id(target.root)].check_ranks_agree(batch, batch=batch)
            with contextlib.suppress(ParameterChanged):
                return target.known.run(target.call, args, kwargs, tensors)
        call = self._capture(Target(target.call, target.root), args, kwargs, tensors)
        result = call.run(target.call, args, kwargs, tensors)
        with autocast(self.settings.precision):
            call.check_parts(target.call, args, kwargs)
        return result

    def explain(self, root: nn.Module | None) -> ParallelPlan:
        """Return what was decided last, and what a step moves."""
        plan = super().explain(root)
        if self._tell_traffic is not None:
            self.plan = plan = self._tell_traffic(plan)
            self._tell_traffic = None
        return plan

    @property
    def program(self) -> CompiledCall | None:
        """The program of the call that ran last, where it is no pipeline's."""
        return self.calls[0].compiled.whole

    def boxes(self, root: nn.Module, tensors: Sequence[Tensor]) -> list[Box]:
        """Return which part of each of the global batch's tensors this rank has passed."""
        compilation = self.compilations[id(root)]
        places = [compilation.place_in_batch(index, tensor) for index, tensor in enumerate(tensors)]
        return [Box(shape, tuple(s.start for s in at), tuple(s.stop - s.start for s in at)) for shape, at in places]

    def activations(self) -> ActivationEstimate:
        """Return what a rank keeps between the passes of the newest capture."""
        return self.calls[0].compiled.activations() if self.calls else super().activations()

    def _capture(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> CapturedCall:
        compilation = self.compilations.get(id(target.root))
        if compilation is None:
            check_captured(target.root, self.settings.parallel_mode)
            rank = world.get_rank()
            size = self.settings.pipeline.ranks_per_stage(world.get_group_size())
            mesh = build_mesh(size, rank // size * size)
            if self.settings.hsdp is not None:
                self.settings.hsdp.check_world(mesh.size)
            check_named_cuts(target.root, mesh.size)
            storage = ParameterStorage(target.root, mesh, rank, self.settings.hsdp)
            compilation = Compilation(target, self.settings, mesh, rank, storage)
            self.compilations[id(target.root)] = compilation
        compilation.target = target
        reason = self.calls[0].why_not(target.call, args, kwargs, tensors) if self.calls else ""
        meetings.capture(describe_batch(args, kwargs))
        before = compilation.trace_count
        begin_s = time.perf_counter()
        with without_collector():
            captured, compiled, plan = compile_call(compilation, args, kwargs)
        plan = replace(plan, captured_s=time.perf_counter() - begin_s)
        self.captures += compilation.trace_count - before
        compiled.arriving = self.arriving
        call = CapturedCall(target, tensors, captured, compiled, partial(compilation.shapes_of, parts=compiled.parts))
        self.calls.insert(0, call)
        if len(self.calls) > self.settings.kept_captures:
            self.calls.pop()
            forget_shapes()
        self.tell(target.root, plan)
        is_told = compiled.whole is None  # stages need to know of each other
        self._tell_traffic = None if is_told else partial(with_traffic, compiled=compiled, rank=compilation.rank)
        if world.get_rank() == 0:
            if self.settings.strategies_to is not None and self.captures == 1:
                write_operator_strategies(self.settings.strategies_to, plan.strategies())
            if (count := self.captures) in (8, 64, 512) and compilation.trace_count > before:
                log.warning(
                    "captured %d times, the last time because of %s: keep what changes from call to call out of the "
                    "network's attributes and shapes, or make it a tensor",
                    count,
                    reason or "a parameter that was assigned, frozen or trained again",
                )
        return call
