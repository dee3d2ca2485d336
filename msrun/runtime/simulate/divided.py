"""The division of a step that a search of degrees finds, for a dry run of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from msrun.runtime import world
from msrun.runtime.capture.target import Target
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.parallel.batch.divided_batch import find_wrappers
from msrun.runtime.parallel.degrees.divisions import find_divisions, settings_of
from msrun.runtime.parallel.recomputation import blocks_of, recomputed
from msrun.runtime.parallel.search_settings import SearchSettings
from msrun.runtime.parallel.settings import ParallelSettings

TIME_LIMIT_S = 30.0


@dataclass(frozen=True)
class DividedStep:
    """A step as a search of degrees has divided it."""

    words: str
    target: Target
    settings: ParallelSettings
    batch: list[Tensor]
    """The whole one; only shapes and types count."""


def can_be_divided(target: Target, settings: ParallelSettings, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the user has left it open how a step is divided, and calls the network with tensors."""
    is_open = settings.hsdp is None and settings.search is None and settings.pipeline.stages == 1
    is_plain = target.call is target.root and not kwargs and all(isinstance(each, Tensor) for each in args)
    is_semi_auto = settings.parallel_mode == "semi_auto" and isinstance(settings.dataset_strategy, str)
    return is_open and is_plain and is_semi_auto and not find_wrappers(target.root) and torch.is_grad_enabled()


@contextmanager
def divided(
    target: Target, settings: ParallelSettings, args: Sequence[Tensor], device: DeviceProfile, optimizer_states: int
) -> Iterator[DividedStep]:
    """Search, and give what was found as long as the context lasts.

    Raises:
        StrategyError: nothing fits.
        CaptureError: the network cannot be captured.
    """
    times = world.get_group_size() if settings.dataset_strategy == "data_parallel" else 1
    shapes = [(each.shape[0] * times, *each.shape[1:]) if each.dim() else () for each in args]
    batch = [torch.empty(shape, dtype=each.dtype) for shape, each in zip(shapes, args, strict=True)]
    wanted = SearchSettings("dynamic_programming", device, optimizer_states=optimizer_states)
    best = find_divisions(target.root, batch, world.get_group_size(), wanted, TIME_LIMIT_S).best
    with recomputed(blocks_of(target.root) if best.degrees.recomputes else []):
        root = replace(best.degrees, recomputes=False).wrap(target.root)
        words = f'search_degrees: {best.degrees}, dataset_strategy("full_batch")'
        yield DividedStep(words, Target(root, root), settings_of(best, settings), batch)
