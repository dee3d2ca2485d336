"""The executor of one pipeline stage: its backward pass can leave the weights' gradients for later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from msrun.runtime.graph.execute import Executor
from msrun.runtime.graph.gradients import StepParameters
from msrun.runtime.graph.segments import Name, Segment
from msrun.runtime.graph.split_backward import DeferredWeights, start_backward
from msrun.runtime.graph.step import Copy, Step


class StageExecutor(Executor):
    """Runs the program of one stage for one micro batch after the other."""

    _splits: list[tuple[Segment, DeferredWeights]] | None = None
    """During `backward_input`: what it leaves for later, newest last."""
    _parameters: StepParameters | None = None

    def backward_input(self, step: Step, gradients: Sequence[Mapping[Name, Tensor]]) -> DeferredStep:
        """Run the part of the backward pass that gives the gradients of the stage's inputs."""
        self._splits, self._parameters = [], step.parameters
        try:
            self.backward(step, gradients, reduces=False)
            return DeferredStep(step.parameters, self._splits)
        finally:
            self._splits, self._parameters = None, None

    def _run_backward(self, copy: Copy, index: int, segment: Segment) -> None:
        if self._splits is None or self._parameters is None:
            super()._run_backward(copy, index, segment)
            return
        results, gradients = [], []
        for name, value in zip(segment.writes, copy.written.pop(index, []), strict=True):
            gradient = self._take_gradient(copy, name)
            if gradient is not None and value.requires_grad:
                results.append(value)
                gradients.append(gradient)
        if not results:
            return
        inputs = [copy.values[name] for name in segment.reads if name not in self._group_of]
        weights = [self._parameters.leaf(n) for n in segment.reads if n in self._group_of]
        trained = [leaf for leaf in weights if leaf.requires_grad]
        left = start_backward(results, gradients, [leaf for leaf in inputs if leaf.requires_grad], trained)
        self._splits.append((segment, left))


class DeferredStep:
    """The weights' gradients of one micro batch, still to be computed."""

    def __init__(self, parameters: StepParameters, parts: Sequence[tuple[Segment, DeferredWeights]]) -> None:
        self._parameters = parameters
        self._parts = parts

    def run(self) -> None:
        """Add the gradients to those of the micro batches before."""
        parts, self._parts = self._parts, ()
        with torch.enable_grad():
            for segment, deferred in parts:
                for group in segment.groups:
                    self._parameters.gathered[group].wait()  # level3 has freed them meanwhile
                deferred.run()
