"""Pipeline: a network whose batch goes through it in micro batches, from stage to stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError
from msrun.runtime.parallel.micro_batch import MicroBatchInterleaved, current_compat, split_batch
from msrun.runtime.parallel.scaling import part_scale, step_gradient_scale
from msrun.runtime.parallel.schedule import choose_schedule


@dataclass
class MicroBatchCalls:
    """What happens to Pipeline modules while one micro batch is captured."""

    results: list[Any] = field(default_factory=list)
    """What they returned."""
    is_returned: bool = True
    """Whether the scalars that the captured function returned are among them."""


_calls: ContextVar[MicroBatchCalls | None] = ContextVar("_calls", default=None)


@dataclass(frozen=True)
class PipelineSpec:
    """Settings of `AutoParallel.pipeline`.

    Raises:
        StrategyError: a value out of its range.
    """

    stages: int = 1
    """Parts of the world, each of consecutive ranks."""
    scheduler: str = "1f1b"
    interleave: bool = False
    output_broadcast: bool = False
    """Whether results that are no scalars come back on every rank, or only where they are made."""

    def __post_init__(self) -> None:
        if isinstance(self.stages, bool) or not isinstance(self.stages, int) or self.stages < 1:
            raise StrategyError(f"pipeline(stages={self.stages!r}): must be a whole number above 0")
        for name in ("interleave", "output_broadcast"):
            if not isinstance(getattr(self, name), bool):
                raise StrategyError(f"pipeline({name}={getattr(self, name)!r}): must be True or False")
        choose_schedule(self.scheduler, self.interleave)

    def ranks_per_stage(self, world_size: int) -> int:
        """Return the number of ranks of one stage.

        Raises:
            StrategyError: the world cannot be divided.
        """
        if world_size % self.stages:
            raise StrategyError(
                f"pipeline(stages={self.stages}): {world_size} ranks cannot be divided into {self.stages} equal stages"
            )
        return world_size // self.stages


class Pipeline(nn.Module):
    """Run `network` (with its loss) on `micro_size` equal slices of the batch, which follow each other through stages.

    Slice i of every tensor is rows [i * B / n, (i + 1) * B / n) of dimension 0. The result is the mean of the slices'
    losses, or with AutoParallel(compat="mindspore") their sum, whose gradient is that of the mean. Inside
    `AutoParallel(...).pipeline(stages=...)` each part of the ranks runs one stage; alone the slices run one after the
    other, with the same result. Parameter names are those of `network`. It is the outermost wrapper:
    `Pipeline(WithLoss(net, loss_fn), 4)`, `Pipeline(MicroBatchInterleaved(WithLoss(net, loss_fn), 2), 4)`.

    Args:
        micro_size: number of slices.
        stage_config: module name -> stage, from 0; modules that are not named follow what they read. None cuts the
            network into stages of equal cost.

    Raises:
        StrategyError: a number that is not whole or not above 0, or that does not divide the batch.
    """

    def __init__(self, network: nn.Module, micro_size: int, stage_config: Mapping[str, int] | None = None) -> None:
        super().__init__()
        if isinstance(micro_size, bool) or not isinstance(micro_size, int) or micro_size < 1:
            raise StrategyError(f"Pipeline(micro_size={micro_size!r}): must be a whole number above 0")
        for name, stage in (stage_config or {}).items():
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise StrategyError(f"stage_config[{name!r}] = {stage!r}: must be a whole number, 0 or more")
        self.micro_size = micro_size
        self.stage_config = dict(stage_config or {})
        self.network = network

    @property
    def copies(self) -> int:
        """Number of copies that take turns in every micro batch."""
        return self.network.interleave_num if isinstance(self.network, MicroBatchInterleaved) else 1

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the mean (or sum) of the slices' losses; other results joined along dimension 0."""
        calls = _calls.get()
        if calls is not None:
            network = self.network.network if isinstance(self.network, MicroBatchInterleaved) else self.network
            calls.results.append(network(*inputs, **named))
            return calls.results[-1]
        flat, spec = [], None
        for batch in split_batch((*inputs, *named.values()), self.micro_size):
            keywords = dict(zip(named, batch[len(inputs) :], strict=True))
            leaves, spec = pytree.tree_flatten(self.network(*batch[: len(inputs)], **keywords))
            flat.append(leaves)
        compat = current_compat.get()
        joined = join_parts(flat, part_scale(compat, self.micro_size))
        ratio = step_gradient_scale(self.micro_size) / part_scale(compat, self.micro_size)
        assert spec is not None
        return pytree.tree_unflatten([_with_gradient_times(value, ratio) for value in joined], spec)


def join_parts(parts: Sequence[Sequence[Any]], factor: float) -> list[Any]:
    """Join the results of slices of the batch: scalars are summed with the factor, others joined along dimension 0."""
    joined: list[Any] = []
    for values in zip(*parts, strict=True):
        if not isinstance(values[0], Tensor):
            joined.append(values[0])
        elif values[0].dim() == 0:
            joined.append(torch.stack(list(values)).sum() * factor)
        else:
            joined.append(torch.cat(list(values)))
    return joined


def _with_gradient_times(value: Any, ratio: float) -> Any:
    """Return a scalar whose gradient is `ratio` times as large."""
    if ratio == 1 or not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        return value
    return value * ratio + (value * (1 - ratio)).detach()


@contextmanager
def capturing_micro_batch() -> Iterator[MicroBatchCalls]:
    """Let Pipeline modules pass one copy of one micro batch through."""
    calls = MicroBatchCalls()
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def note_result(result: Any) -> None:
    """Tell what the captured function returned."""
    calls = _calls.get()
    assert calls is not None
    given = {id(leaf) for leaf in pytree.tree_leaves(calls.results)}
    scalars = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.dim()]
    calls.is_returned = all(id(leaf) in given for leaf in scalars)


def find_pipeline(call: Any, root: nn.Module) -> Pipeline | None:
    """Return the Pipeline that a network is, or that a function calls.

    Raises:
        StrategyError: it is inside another module, or there are several.
    """
    if isinstance(call, Pipeline):
        return call
    found = [module for module in root.modules() if isinstance(module, Pipeline)]
    if len(found) > 1:
        raise StrategyError(f"{len(found)} Pipelines in one network: wrap the whole network, with its loss, in one")
    if found and isinstance(call, nn.Module):
        raise StrategyError(
            f"Pipeline inside {type(call).__name__}: it must be the outermost wrapper, "
            "such as Pipeline(WithLoss(net, loss_fn), micro_size)"
        )
    return found[0] if found else None
