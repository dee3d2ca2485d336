"""One segment of one copy: computed, its collectives started; its way back, and that of its collectives.

Segments of the host run in a thread of their own, with the copies that bring their values to the device. The caller
goes on, and waits where it reads what they make. Messages to other ranks are the caller's: their order is the same on
all ranks.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import active_fake_mode

from msrun.errors import CaptureError
from msrun.runtime.execute.gradients import ParameterGroup, StepParameters, added
from msrun.runtime.execute.phase import is_verifying
from msrun.runtime.execute.transfers import TensorFuture, start_backward, start_forward
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.replay import Replay, SavedResults, forgetting
from msrun.runtime.schedule.segments import (
    BufferPlan,
    Crossing,
    Name,
    Segment,
)
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.sizes import SizesOfCall


class HostTask:
    """Work of the host that may not be done yet."""

    def __init__(self, future: Future[Any], thread: HostThread) -> None:
        self._future = future
        self._thread = thread

    def wait(self) -> Any:
        """Return what the work gives, waiting for it; raises what it raised.

        In the thread itself nothing is waited for: work that began earlier is done, and its own results are there.
        """
        return None if self._thread.is_current else self._future.result()


class HostThread:
    """Runs work in order, in the caller's modes: gradients, inference, context variables. Begins at first use."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()

    @property
    def is_current(self) -> bool:
        """True in the thread."""
        return getattr(self._own, "is_here", False)

    def start(self, work: Callable[[], Any]) -> HostTask:
        """Have work done after all that was given before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "msrun-host")
        context = contextvars.copy_context()
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> Any:
            self._own.is_here = True
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                return context.run(work)

        future = self._pool.submit(run)
        if active_fake_mode() is not None and not self.is_current:  # one thread at a time may use such a mode
            futures.wait([future])
        return HostTask(future, self)


class GradientFromHost(TensorFuture):
    """A gradient that the host computes and copies to the device; there may be none."""

    def __init__(self, task: HostTask) -> None:
        self._task = task

    is_message = False

    def wait(self) -> Any:
        """Return the gradient, a tensor, or None."""
        found = self._task.wait()
        return found if found is None else found.wait()


@dataclass
class Copy:
    """What one copy of the batch holds during a step."""

    values: dict[Name, Tensor] = field(default_factory=dict)
    """What segments read: detached, so that every segment has an autograd graph of its own."""
    arriving: dict[Name, ValueOnItsWay] = field(default_factory=dict)
    """Results of collectives, not yet waited for."""
    written: dict[int, list[Tensor]] = field(default_factory=dict)
    """segment -> what it wrote, with its autograd graph."""
    gradients: dict[Name, list[Tensor | TensorFuture]] = field(default_factory=dict)
    """Parts of a value's gradient that do not come through its leaf."""
    saved: dict[int, SavedResults] = field(default_factory=dict)
    """segment of a recomputed region -> results that are kept of it"""
    copied: dict[Name, Tensor] = field(default_factory=dict)
    """Results that lie in the memory of a gathered parameter, copied out of it before it is given back."""
    computing: dict[Name, HostTask] = field(default_factory=dict)
    """Values that the host may still be computing."""
    reading: dict[Name, list[HostTask]] = field(default_factory=dict)
    """Values whose readers on the host may not have added to their gradient yet."""

    def take_gradient(self, name: Name) -> Tensor | None:
        """Return the whole gradient of a value: from its leaf, from results, from collectives."""
        for task in self.reading.pop(name, ()):
            task.wait()
        parts = [p.wait() if isinstance(p, TensorFuture) else p for p in self.gradients.pop(name, [])]
        leaf = self.values.pop(name, None)
        if leaf is not None and leaf.grad is not None:
            parts.append(leaf.grad)
        total = add_up(parts)
        return total.to_dense() if total is not None and total.is_sparse else total

    def settle_gradients(self, names: Sequence[Name]) -> None:
        """Wait for what is on its way from other ranks to the gradients of these values."""
        for name in names:
            parts = self.gradients.get(name, [])
            parts[:] = [p.wait() if isinstance(p, TensorFuture) and p.is_message else p for p in parts]


def add_up(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the parts of a gradient, of those that there are."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else added(total, part)
    return total


class ValueOnItsWay(TensorFuture):
    """A value on its way that becomes a leaf on arrival."""

    def __init__(self, future: TensorFuture, requires_grad: bool) -> None:
        self._future = future
        self.requires_grad = requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """The type of the value."""
        return self._future.dtype

    @property
    def is_number_on_host(self) -> bool:
        """Whether it is a scalar with a gradient, and waiting for it would hold this process up."""
        return self.requires_grad and self._future.is_number_on_host

    def wait(self) -> Tensor:
        """Return the arrived value as a leaf."""
        return self._future.wait().detach().requires_grad_(self.requires_grad)


def arrived(value: Any) -> Any:
    """Return a result that may have been left on its way (`Executor.results`), waiting for it."""
    return value.wait() if isinstance(value, ValueOnItsWay) else value


def full_like(value: Tensor | ValueOnItsWay, number: float) -> Tensor:
    """Return a tensor of one number, like a result that may still be on its way; that is not waited for."""
    if isinstance(value, ValueOnItsWay):
        return torch.full((), number, dtype=value.dtype)
    return torch.full_like(value, number)


@dataclass
class Step:
    """One forward pass, waiting for its backward pass."""

    copies: list[Copy]
    parameters: StepParameters
    buffers: dict[Name, Tensor] = field(default_factory=dict)
    """Present values of the buffers that the forward pass changes."""
    first_buffers: dict[Name, Tensor] = field(default_factory=dict)
    """What they were before it."""
    readers: dict[int, list[HostTask]] = field(default_factory=dict)
    """group of parameters -> what reads them on the host and may not be done yet"""
    tasks: list[HostTask] = field(default_factory=list)
    """Of the backward pass, on the host."""
    sizes: SizesOfCall = field(default_factory=dict)
    is_verified: bool = field(default_factory=is_verifying.get)
    """Run for verification: it counts as none. Autograd may run the backward pass in a thread without this context."""

    def wait_for_readers(self, group: int) -> None:
        """Wait until the host has done what reads a group of parameters."""
        for task in self.readers.pop(group, ()):
            task.wait()


class SegmentRunner:
    """Runs the segments of one program; the executor has their order."""

    def __init__(
        self,
        program: LocalProgram,
        segments: Sequence[Segment],
        groups: Sequence[ParameterGroup],
        replays: Sequence[Replay],
        buffer_plan: BufferPlan,
        *,
        mesh: Mesh,
        rank: int,
        memory_of: Mapping[Name, Name],
    ) -> None:
        """Make a runner; the arguments are those of `Executor`."""
        self._program = program
        self.segments = segments
        self._replays = replays
        self._buffer_plan = buffer_plan
        self._mesh = mesh
        self._rank = rank
        self._host = HostThread()
        self._copies = {c.result for s in segments for c in s.crossings if c.collective.is_copy}
        self.group_of = {name: i for i, group in enumerate(groups) for name in group.placeholders}
        freed = {name: i for name, i in self.group_of.items() if groups[i].regathers}
        aliases = {value: freed[of] for value, of in memory_of.items() if of in freed}
        self._freed_with = {**freed, **aliases}
        """value -> the group whose memory it is, of those that are given back"""
        borrowed = set(memory_of)
        self._borrowed_results = borrowed & {node.name for node in program.outputs if isinstance(node, fx.Node)}
        self._borrowed_updates = borrowed & {value.name for value in program.buffer_updates.values()}

    def run_again(self, step: Step, copy: Copy, index: int, replay: Replay) -> None:
        """Compute a segment of a recomputed region once more, from what was kept."""
        compute = partial(self._compute_again, step, copy, index, replay)
        self._issue(step, copy, index, compute, replay.crossings.get(index, []))

    def run(self, step: Step, copy: Copy, index: int, needs_grad: bool) -> None:
        """Run a segment forward and start what reads it."""
        segment = self.segments[index]
        self._issue(step, copy, index, partial(self._compute, step, copy, index, needs_grad), segment.crossings)
        self._write_buffers(step, copy, index)
        if needs_grad and segment.region is not None and index == self._replays[segment.region].last:
            for name in self._replays[segment.region].dropped:
                if name in copy.computing:
                    copy.computing[name].wait()
                copy.values.pop(name, None)

    def _issue(
        self, step: Step, copy: Copy, index: int, compute: Callable[[], None], crossings: Sequence[Crossing]
    ) -> None:
        """Compute a segment and start its collectives; the host's in its thread, with the copies of its values."""
        segment = self.segments[index]
        copies = [crossing for crossing in crossings if crossing.collective.is_copy and segment.on_host]
        started = [c for c in crossings if c.collective.is_copy and c.source not in segment.writes and c not in copies]
        for crossing in started:  # what was there before goes first
            self._start_crossing(step, copy, crossing)
        if not segment.on_host:
            compute()
        else:
            for name in segment.reads:  # the thread waits for copies only
                if name in copy.arriving and name not in self._copies:
                    self.read(step, copy, name)
            task = self._host.start(partial(self._compute_and_copy, step, copy, compute, copies))
            copy.computing |= dict.fromkeys([*segment.writes, *(crossing.result for crossing in copies)], task)
            for group in segment.groups:
                step.readers.setdefault(group, []).append(task)
        for crossing in crossings:
            if crossing not in (*copies, *started):
                self._start_crossing(step, copy, crossing)

    def _compute_and_copy(
        self, step: Step, copy: Copy, compute: Callable[[], None], copies: Sequence[Crossing]
    ) -> None:
        compute()
        for crossing in copies:
            self._start_crossing(step, copy, crossing)

    def _compute(self, step: Step, copy: Copy, index: int, needs_grad: bool) -> None:
        segment = self.segments[index]
        if segment.is_empty:
            return
        inputs = [self.read(step, copy, name) for name in segment.reads]
        if needs_grad and segment.region is not None:
            written = self._run_forgetting(copy, index, segment, inputs)
        else:
            written = segment.run(*inputs)
            if needs_grad:
                copy.written[index] = list(written)
        for name, value in zip(segment.writes, written, strict=True):
            copy.values[name] = value.detach().requires_grad_(value.requires_grad) if needs_grad else value
            if name in self._borrowed_results:
                copy.copied[name] = value.detach().clone()

    def _write_buffers(self, step: Step, copy: Copy, index: int) -> None:
        """Let the next copy, and at the end the module, have the buffers' new values."""
        for update in self._buffer_plan.updates.get(index, ()):
            value = self.read(step, copy, update.value)
            if value.requires_grad:
                names = {node.name: name for name, node in self._program.buffers.items()}
                raise CaptureError(
                    f"buffer {names[update.buffer]} is set to a value that gradients flow through, which would reach "
                    "into the next step: give it value.detach()"
                )
            copy.values.setdefault(update.buffer, step.buffers[update.buffer])  # for later readers of the old value
            step.buffers[update.buffer] = value.clone() if update.value in self._borrowed_updates else value

    def _run_forgetting(self, copy: Copy, index: int, segment: Segment, inputs: list[Tensor]) -> Sequence[Tensor]:
        assert segment.region is not None
        policy = self._replays[segment.region].save
        with forgetting():
            if policy is None:
                return tuple(segment.module(*inputs))
            copy.saved[index] = SavedResults(policy)
            return tuple(copy.saved[index].run(segment.module, inputs, again=False))

    def _start_crossing(self, step: Step, copy: Copy, crossing: Crossing) -> None:
        source = self.read(step, copy, crossing.source)
        in_place = crossing.takes_source
        future = start_forward(crossing.collective, source.detach(), self._mesh, self._rank, in_place=in_place)
        if crossing.source in self._freed_with:
            step.parameters.gathered[self._freed_with[crossing.source]].lend(future)
        copy.arriving[crossing.result] = ValueOnItsWay(future, source.requires_grad)
        if crossing.result in self._borrowed_results:
            copy.copied[crossing.result] = future.wait().detach().clone()

    def read(self, step: Step, copy: Copy, name: Name) -> Tensor:
        """Return a value, waiting for it."""
        group = self.group_of.get(name)
        if group is not None:
            return step.parameters.leaf(name)
        if name in step.buffers:  # what the copy read first is what it reads until its end
            return copy.values.setdefault(name, step.buffers[name])
        if name in copy.computing:
            copy.computing[name].wait()
        if name in copy.arriving:
            copy.values[name] = copy.arriving.pop(name).wait()
        return copy.values[name]

    def requires_grad(self, step: Step, copy: Copy, name: Name) -> bool:
        """Return whether gradients flow back from a value; it is not waited for."""
        late = copy.arriving.get(name)
        return late.requires_grad if late is not None else self.read(step, copy, name).requires_grad

    def _compute_again(self, step: Step, copy: Copy, index: int, replay: Replay) -> None:
        if index not in replay.segments:
            return
        segment = self.segments[index]
        inputs = [self.read(step, copy, name) for name in segment.reads]
        saved = copy.saved.pop(index, None)
        written = saved.run(segment.module, inputs, again=True) if saved else segment.module(*inputs)
        copy.written[index] = list(written)
        for name, value in zip(segment.writes, written, strict=True):
            if name in replay.dropped:
                copy.values[name] = value.detach().requires_grad_(value.requires_grad)

    def run_backward(self, step: Step, copy: Copy, index: int) -> None:
        """Run the backward pass of a segment."""
        segment = self.segments[index]
        if not segment.on_host:
            self._backward_of(copy, index)
            return
        copy.settle_gradients(segment.writes)
        task = self._host.start(partial(self._backward_of, copy, index))
        step.tasks.append(task)
        for name in segment.reads:
            copy.reading.setdefault(name, []).append(task)
        for group in segment.groups:
            step.readers.setdefault(group, []).append(task)

    def _backward_of(self, copy: Copy, index: int) -> None:
        segment, written = self.segments[index], copy.written.pop(index, [])
        outputs, gradients = [], []
        for name, value in zip(segment.writes, written, strict=True):
            gradient = copy.take_gradient(name)
            if gradient is not None and value.requires_grad:
                outputs.append(value)
                gradients.append(gradient)
        if outputs:
            torch.autograd.backward(outputs, gradients)

    def give_to_parameters(self, step: Step, copy: Copy, index: int) -> None:
        """Add to a parameter's gradient what comes back through collectives that read it directly."""
        for crossing in self.segments[index].crossings:
            if crossing.source in self.group_of:
                step.wait_for_readers(self.group_of[crossing.source])
                leaf = step.parameters.leaf(crossing.source)
                parts = copy.gradients.pop(crossing.source, [])
                leaf.grad = add_up([leaf.grad, *(p.wait() if isinstance(p, TensorFuture) else p for p in parts)])

    def start_crossings(self, copy: Copy, index: int) -> None:
        """Start the way back of the collectives of one level: everything that read their results is done."""
        for crossing in self.segments[index].crossings:
            if crossing.collective.kind == "to_host":  # the host's thread has the gradient
                found: TensorFuture | None = GradientFromHost(self._host.start(partial(self._way_back, copy, crossing)))
            else:
                found = self._way_back(copy, crossing)
            if found is not None:
                copy.gradients.setdefault(crossing.source, []).append(found)

    def _way_back(self, copy: Copy, crossing: Crossing) -> TensorFuture | None:
        gradient = copy.take_gradient(crossing.result)
        if gradient is None:
            return None
        in_place = crossing.takes_gradient
        return start_backward(crossing.collective, gradient, self._mesh, self._rank, in_place=in_place)
