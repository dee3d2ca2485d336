"""What other settings would do to a job: each one is really looked at, none is guessed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from msrun.errors import ParallelError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.parallel.batch.divided_batch import GradAccumulation, find_wrappers
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.degrees import find_divisions, settings_of
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, Level
from msrun.runtime.parallel.recomputation import blocks_of, recomputed
from msrun.runtime.parallel.settings import RECURSIVE, ParallelSettings, SearchSettings
from msrun.runtime.simulate.job import Asked, SimulatedJob, changes_network, simulate_job
from msrun.runtime.simulate.recording import format_bytes, format_seconds

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
    is_semi_auto = settings.is_captured and isinstance(settings.dataset_strategy, str)
    return is_open and is_plain and is_semi_auto and not find_wrappers(target.root) and torch.is_grad_enabled()


@contextmanager
def divided(
    target: Target, settings: ParallelSettings, args: Sequence[Tensor], device: DeviceProfile, optimizer_states: int
) -> Iterator[DividedStep]:
    """Search, and give what was found as long as the context lasts."""
    times = world.get_group_size() if settings.dataset_strategy == "data_parallel" else 1
    shapes = [(each.shape[0] * times, *each.shape[1:]) if each.dim() else () for each in args]
    batch = [torch.empty(shape, dtype=each.dtype) for shape, each in zip(shapes, args, strict=True)]
    wanted = SearchSettings("dynamic_programming", device, optimizer_states=optimizer_states)
    best = find_divisions(target.root, batch, world.get_group_size(), wanted, TIME_LIMIT_S).best
    with recomputed(blocks_of(target.root) if best.degrees.recomputes else []):
        root = replace(best.degrees, recomputes=False).wrap(target.root)
        words = f'search_degrees: {best.degrees}, dataset_strategy("full_batch")'
        yield DividedStep(words, Target(root, root), settings_of(best, settings), batch)


LEVELS: tuple[Level, ...] = ("level1", "level2", "level3")
MICRO_BATCHES = (2, 4, 8)
_MOST_CHARACTERS = 160
"""Of why a change is not possible."""


@dataclass(frozen=True)
class Change:
    """One set of settings, with what it gives."""

    words: tuple[str, ...]
    """What to write."""
    peak_bytes: int
    step_s: float
    fits: bool


@dataclass(frozen=True)
class Changes:
    """What was tried."""

    present: Change
    tried: tuple[Change, ...]
    refused: tuple[str, ...] = ()
    """What this network cannot have, and why."""

    @property
    def best(self) -> Change | None:
        """The fastest one that fits; None when none does, or the present settings are that already."""
        fitting = [change for change in (self.present, *self.tried) if change.fits]
        best = min(fitting, key=lambda change: change.step_s, default=None)
        return None if best is self.present else best

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        best = self.best
        return {
            "present": vars(self.present),
            "tried": [vars(change) for change in self.tried],
            "refused": list(self.refused),
            "best": None if best is None else list(best.words),
        }

    def lines(self) -> list[str]:
        """Return the answer, and every change with its figures, fastest first."""
        present, best = self.present, self.best
        fits = "It fits" if present.fits else "It does not fit"
        if best is not None:
            gain = f"{format_bytes(best.peak_bytes)}, {format_seconds(best.step_s)} a step"
            answer = f"{fits}; better: {' and '.join(best.words)} ({gain})"
        else:
            answer = f"{fits}; {'nothing that was tried is faster' if present.fits else 'nothing that was tried does'}"
        found = [f"{answer}.", "", f"{'peak':>9}  {'step':>9}  change"]
        for change in (present, *sorted(self.tried, key=lambda change: (not change.fits, change.step_s))):
            words = " and ".join(change.words) or "as it is"
            room = "" if change.fits else ": does not fit"
            found.append(f"{format_bytes(change.peak_bytes):>9}  {format_seconds(change.step_s):>9}  {words}{room}")
        return [*found, *(f"not possible: {text}" for text in self.refused)]


@dataclass(frozen=True)
class _Try:
    words: str
    change: Callable[[Target, ParallelSettings], Any]
    """Context manager that gives the changed target and settings."""


def try_changes(job: SimulatedJob, asked: Asked) -> Changes:
    """Look at the same step with other settings: searched strategies, such as tensor parallel, more optimizer
    parallel, recomputed blocks, micro batches.

    First each alone; then those that save memory together, the strongest of each kind; then what a search of degrees
    finds, stages of a pipeline and copies of the batch too.
    """
    target, settings, args, kwargs = asked.target, asked.settings, asked.args, asked.kwargs
    kinds = [
        _levels(target, settings),
        [_Try("recompute(block) of every block", _recomputing)] if blocks_of(target.root) else [],
        _micro_batches(target, args, kwargs),
    ]
    tried, refused = [], []
    singles = [(each,) for kind in (_searched(settings, job.device), *kinds) for each in kind]
    strongest = [kind[-1] for kind in kinds if kind]
    together = [tuple(strongest[:count]) for count in range(2, len(strongest) + 1)]
    for tries in [*singles, *together]:
        words = tuple(each.words for each in tries)
        try:
            with ExitStack() as stack:
                changed, with_settings = target, settings
                for each in tries:
                    changed, with_settings = stack.enter_context(each.change(changed, with_settings))
                found = simulate_job(replace(asked, target=changed, settings=with_settings))
        except (ParallelError, RuntimeError) as error:
            refused.append(f"{' and '.join(words)}: {_shorten(error)}")
            continue
        tried.append(_change(words, found))
    if can_be_divided(target, settings, args, kwargs):
        try:
            with divided(target, settings, args, job.device, _optimizer_states(job)) as step:
                found = simulate_job(
                    replace(asked, target=step.target, settings=step.settings, args=step.batch, kwargs={})
                )
                tried.append(_change((step.words,), found))
        except (ParallelError, RuntimeError) as error:
            refused.append(f"search_degrees: {_shorten(error)}")
    return Changes(_change((), job), tuple(tried), tuple(refused))


def _optimizer_states(job: SimulatedJob) -> int:
    """Return how many tensors of a parameter's size the script's optimizer keeps; without one as many as Adam."""
    records = [found.record for found in job.classes if found.record is not None and found.record.optimizer]
    sizes = [(record.optimizer_bytes, record.parameter_bytes) for record in records]
    return round(sum(own for own, _ in sizes) / max(1, sum(of for _, of in sizes))) if sizes else 2


def _shorten(error: Exception) -> str:
    """Return the first line of an error, cut between words."""
    return textwrap.shorten(str(error).splitlines()[0], _MOST_CHARACTERS, placeholder=" ...")


def _change(words: tuple[str, ...], job: SimulatedJob) -> Change:
    assert job.step is not None
    return Change(words, job.peak_bytes, job.step.seconds, job.fits)


def _searched(settings: ParallelSettings, device: DeviceProfile) -> list[_Try]:
    """Return the strategies that a search finds for the device, where the user has asked for none."""

    @contextmanager
    def change(target: Target, before: ParallelSettings) -> Iterator[tuple[Target, ParallelSettings]]:
        yield target, replace(before, parallel_mode="semi_auto", search=SearchSettings(RECURSIVE, device))

    return [_Try(f'AutoParallel(net, "{RECURSIVE}")', change)] if settings.search is None else []


def _levels(target: Target, settings: ParallelSettings) -> list[_Try]:
    """Return the levels of optimizer parallel above the present one, where they leave the user's network alone."""
    if settings.is_lone or changes_network(target, replace(settings, hsdp=HsdpSpec())):
        return []
    present = LEVELS.index(settings.hsdp.optimizer_level) if settings.hsdp is not None else -1

    def at(level: Level) -> Callable[[Target, ParallelSettings], Any]:
        @contextmanager
        def change(target: Target, before: ParallelSettings) -> Iterator[tuple[Target, ParallelSettings]]:
            spec = replace(before.hsdp or HsdpSpec(), optimizer_level=level)
            yield target, replace(before, hsdp=spec)

        return change

    return [_Try(f'hsdp(optimizer_level="{level}")', at(level)) for level in LEVELS[present + 1 :]]


@contextmanager
def _recomputing(target: Target, settings: ParallelSettings) -> Iterator[tuple[Target, ParallelSettings]]:
    with recomputed(blocks_of(target.root)):
        yield target, settings


def _micro_batches(target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Try]:
    """Return numbers of micro batches into which the batch of a network, called as a module, can be cut."""
    rows = [tensor.shape[0] for tensor in find_tensors(args, kwargs) if tensor.dim()]
    if target.call is not target.root or find_wrappers(target.root) or not rows or not torch.is_grad_enabled():
        return []

    def by(count: int) -> Callable[[Target, ParallelSettings], Any]:
        @contextmanager
        def change(before: Target, settings: ParallelSettings) -> Iterator[tuple[Target, ParallelSettings]]:
            wrapped = GradAccumulation(before.root, count)
            yield Target(wrapped, wrapped), settings

        return change

    return [
        _Try(f"GradAccumulation(net, {count})", by(count))
        for count in MICRO_BATCHES
        if all(size % count == 0 for size in rows)
    ]
