"""Networks whose batch is divided: what their wrappers have in common, and how they are captured.

A wrapper (MicroBatchInterleaved, GradAccumulation) is traced as one part of its batch; the compiled call then runs that
program for all parts.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from msrun.errors import StrategyError
from msrun.runtime.capture import marked_calls
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
        self.number = marked_calls.new_number()
        """of its marks in a captured graph"""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the joined results of the parts."""
        if marked_calls.MSRUN_CAPTURING:  # one part is traced; the compiled call runs it for all
            inputs, named = marked_calls.mark((inputs, named), self.number, leaves=False)
            return marked_calls.mark(self.network(*inputs, **named), self.number, leaves=True)
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
