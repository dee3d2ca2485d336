"""Networks whose batch is divided: what their wrappers have in common, and how they are captured.

A wrapper (MicroBatchInterleaved, GradAccumulation) is traced as one part of its batch; the compiled call then runs that
program for all parts.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError
from msrun.runtime.nn.random_stream import part_of_batch
from msrun.runtime.parallel.batch.parts import BatchParts, PartKind, split_batch


class DividedBatch(nn.Module, ABC):
    """A network whose batch is divided into equal parts: rows [i * B / n, (i + 1) * B / n) of dimension 0.

    Raises:
        StrategyError: the number of parts is not a whole number above 0.
    """

    kind: PartKind

    def __init__(self, network: nn.Module, parts: int, argument: str) -> None:
        super().__init__()
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise StrategyError(f"{type(self).__name__}({argument}={parts!r}): must be a whole number above 0")
        self.parts = parts
        self.network = network

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the joined results of the parts."""
        tracing = current_tracing.get()
        if tracing is not None:
            return tracing.enter(self, inputs, named)
        slices = split_batch((*inputs, *named.values()), self.parts, self.kind)
        return self.run_parts(partial(self._call, tuple(named)), slices)

    def _call(self, names: tuple[str, ...], *values: Any) -> Any:
        """Run the network; the last values are those of the names."""
        count = len(values) - len(names)
        return self.network(*values[:count], **dict(zip(names, values[count:], strict=True)))

    @staticmethod
    def results_of(call: Callable[..., Any], batches: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return what the network makes of each part, one after the other."""
        results = []
        for index, batch in enumerate(batches):
            with part_of_batch(index, len(batches), batch):
                results.append(call(*batch))
        return results

    @abstractmethod
    def run_parts(self, call: Callable[..., Any], batches: list[tuple[Any, ...]]) -> Any:
        """Run the network on every part, without AutoParallel, and join the results.

        Args:
            call: runs it on the values of one part.
        """


class Tracing:
    """Lets a captured network be traced as one part of its batch.

    While it is current, the wrappers on its list, outermost first, hand their inputs straight on. That is right only
    when what they are given is the step's own batch and what they return is the step's own result; else it is refused.
    """

    def __init__(self, wrappers: list[DividedBatch]) -> None:
        self._waiting = list(wrappers)
        self._batch: set[int] = set()
        self._results: list[Any] = []

    def watch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with a look at what goes in and comes out."""
        if not self._waiting:
            return call

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._batch = {id(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
            result = call(*args, **kwargs)
            self._check_results(pytree.tree_leaves(result))
            return result

        return watched

    def enter(self, wrapper: DividedBatch, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a wrapper's network on what is one part of the batch already."""
        name = type(wrapper).__name__
        if not self._waiting or self._waiting[0] is not wrapper:
            raise StrategyError(f"{name} is called twice in one step: call it once, on the whole batch")
        given = [value for value in pytree.tree_leaves((inputs, named)) if isinstance(value, Tensor)]
        if any(id(value) not in self._batch for value in given):
            raise StrategyError(
                f"{name} is called with tensors that the step has computed, so its copies cannot take turns: hand the "
                f"step's own inputs to it, and put what you do with them before into its network"
            )
        self._waiting.pop(0)
        result = wrapper.network(*inputs, **named)
        self._results = pytree.tree_leaves(result)  # the outermost one comes last
        return result

    def _check_results(self, results: list[Any]) -> None:
        if self._waiting:
            name = type(self._waiting[0]).__name__
            raise StrategyError(f"{name} is not called by the step that uses its network: call it, or take it out")
        own = {id(value) for value in self._results} | self._batch
        if any(isinstance(value, Tensor) and id(value) not in own for value in results):
            raise StrategyError(
                "the step computes with the result of a network whose batch is divided (MicroBatchInterleaved, "
                "GradAccumulation, Pipeline), so its parts cannot be run apart: return it as it is, and put the rest "
                "into the network"
            )


current_tracing: ContextVar[Tracing | None] = ContextVar("current_tracing", default=None)
"""Set while AutoParallel captures a network whose batch is divided."""


def find_wrappers(root: nn.Module) -> list[DividedBatch]:
    """Return the wrappers in a network that divide its batch, outermost first.

    Raises:
        StrategyError: two of them side by side.
    """
    found = [module for module in root.modules() if isinstance(module, DividedBatch)]
    for outer, inner in itertools.pairwise(found):
        if inner not in outer.modules():
            raise StrategyError(
                f"{type(outer).__name__} and {type(inner).__name__} stand side by side in one step: wrap the network "
                "that holds both parts once"
            )
    return found


def find_parts(wrappers: Sequence[DividedBatch]) -> BatchParts:
    """Return how wrappers, outermost first, divide a batch."""
    return BatchParts(tuple((wrapper.kind, wrapper.parts) for wrapper in wrappers))
