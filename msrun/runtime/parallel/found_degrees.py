"""search_degrees: data, operator, pipeline and optimizer parallel, copies and recompute, searched for together."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import world
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.execute.placement import placement_of
from msrun.runtime.parallel.auto_parallel import AutoParallel
from msrun.runtime.parallel.batch.divided_batch import find_wrappers
from msrun.runtime.parallel.degrees import (
    Degrees,
    Divisions,
    StepPrice,
    find_divisions,
    settings_of,
)
from msrun.runtime.parallel.settings import MB, SearchSettings, profile_of
from msrun.runtime.progress import waiting_in

_SHOWN = 8


@dataclass(frozen=True)
class FoundDegrees:
    """What `search_degrees` has found."""

    divisions: Divisions
    worker_num: int

    @property
    def step(self) -> StepPrice:
        """The fastest step that fits."""
        return self.divisions.best

    @property
    def priced(self) -> tuple[StepPrice, ...]:
        """All steps that were priced, the fastest first."""
        return self.divisions.priced

    @property
    def degrees(self) -> Degrees:
        """Into what a step is divided."""
        return self.step.degrees

    def apply(self, network: nn.Module, degrees: Degrees | None = None) -> AutoParallel:
        """Return the network in parallel with these degrees, for whole batches of the searched size on every rank.

        Args:
            degrees: others of those that were priced.

        Raises:
            StrategyError: degrees that were not priced, or another number of ranks; at the first call, another network
                or batch.
        """
        chosen = next((each for each in self.priced if each.degrees == degrees), None) if degrees else self.step
        if chosen is None:
            raise StrategyError(f"{degrees} was not priced: take the degrees of one of FoundDegrees.priced")
        if self.worker_num != world.get_group_size():
            raise StrategyError(
                f"search_degrees was for {self.worker_num} ranks, and there are {world.get_group_size()}: "
                "search for this number"
            )
        step = AutoParallel(chosen.degrees.wrap(network), "semi_auto")
        step.settings = settings_of(chosen, step.settings)
        return step

    def __str__(self) -> str:
        """Return the fastest divisions as a table, and the one that was found."""
        lines = [f"{'step':>10}  {'memory':>11}  {self.worker_num} ranks"]
        for each in self.priced[:_SHOWN]:
            room = "" if each.memory_bytes <= self.divisions.limit_bytes else ": does not fit"
            lines.append(f"{each.seconds * 1e3:7.1f} ms  {each.memory_bytes / MB:8.1f} MB  {each.degrees}{room}")
        lines.append(f"fastest that fits into {self.divisions.limit_bytes / MB:.0f} MB: {self.degrees}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.divisions.notes)])


def search_degrees(
    network: nn.Module,
    *batch: Tensor,
    worker_num: int | None = None,
    device: str | os.PathLike[str] | DeviceProfile | None = None,
    memory_limit_mb: float | None = None,
    optimizer_states: int = 2,
    time_limit_s: float = 60.0,
) -> FoundDegrees:
    """Search for the fastest way to divide a training step: stages of a pipeline, micro batches, copies, optimizer
    parallel and recomputed blocks; the operators on the ranks of each stage are cut as dynamic programming finds it.

    Nothing is run; of the batch only shapes and types count. Prices are those of `AutoParallel.search`, put together by
    the formulas in `parallel/degrees/divisions.py`. In a world of several ranks all call it together, and rank 0
    decides.

    Args:
        network: with its loss, a scalar; not wrapped, not run in parallel before.
        batch: the whole batch, as one process would train on it.
        worker_num: ranks; None: those of this world.
        device, memory_limit_mb, optimizer_states: as of `AutoParallel.search`.
        time_limit_s: what was priced until then counts; the first division, without parts of the batch, always is.

    Returns:
        The fastest step that fits. `apply(network)` makes the AutoParallel, `print` shows the fastest divisions.

    Raises:
        StrategyError: a value out of its range, a network that divides its batch already, or nothing fits.
        CaptureError: the network cannot be captured.
    """
    ranks = world.get_group_size() if worker_num is None else worker_num
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise StrategyError(f"search_degrees(worker_num={worker_num!r}): must be a whole number above 0")
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, int | float) or not time_limit_s > 0:
        raise StrategyError(f"search_degrees(time_limit_s={time_limit_s!r}): must be a number of seconds above 0")
    if not isinstance(network, nn.Module) or find_wrappers(network):
        what = type(network).__name__
        raise StrategyError(f"search_degrees({what}): give it the network with its loss, not divided; it divides it")
    if any(placement_of(each) is not None for each in network.parameters()):
        raise StrategyError("search_degrees: the network's parameters are placed already; search before its first call")
    settings = SearchSettings("dynamic_programming", profile_of(device), memory_limit_mb, optimizer_states)
    found: list[FoundDegrees | str | None] = [None]
    is_alone = world.simulation_level() is not None or world.get_group_size() == 1
    if is_alone or world.get_rank() == 0:
        try:
            found = [FoundDegrees(find_divisions(network, batch, ranks, settings, time_limit_s), ranks)]
        except (StrategyError, CaptureError) as error:
            if is_alone:
                raise
            found = [str(error)]
    if not is_alone:
        with waiting_in(lambda: "the broadcast of rank 0's degrees"):
            dist.broadcast_object_list(found, 0)
    (answer,) = found
    if not isinstance(answer, FoundDegrees):
        raise StrategyError(str(answer))
    return answer
