"""A dry run in the script's process: it ends at the first call of a parallel network, at level 3 after some steps."""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from msrun import contract
from msrun.errors import StrategyError, WorldError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.joining.launchers import REAL_VALUES
from msrun.runtime.parallel.settings import ParallelSettings, own_profile
from msrun.runtime.simulate.changes import try_changes
from msrun.runtime.simulate.job import simulate_job
from msrun.runtime.simulate.report import Measured, Report, build_trace, render_page, render_table
from msrun.runtime.simulate.uncaptured import changes_network
from ranktable.files import replace_file

NOT_THE_JOBS = "nothing was received from other ranks: losses that the script has printed are not those of the job"
COMPUTED_STEPS = 3
"""Steps that level 3 runs; the first one, which captures, does not count."""


@dataclass
class _Steps:
    """What level 3 knows when the steps that it runs are over."""

    report: Report
    begun_s: list[float] = field(default_factory=list)


_running: list[_Steps] = []


def begin_step(settings: ParallelSettings, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """End the dry run in place of this step; at level 3 let the first ones run.

    Raises:
        StrategyError: an illegal strategy, schedule or assignment of stages, or a step that needs values.
        CaptureError: the network cannot be captured.
    """
    level = world.simulation_level()
    assert level is not None
    if level < REAL_VALUES:
        _end(_look(settings, target, args, kwargs, level))
    if not torch.is_grad_enabled():
        return
    if not _running:
        _running.append(_Steps(_look(settings, target, args, kwargs, level)))
    steps = _running[0]
    steps.begun_s.append(time.perf_counter())
    if len(steps.begun_s) > COMPUTED_STEPS:
        took = [later - earlier for earlier, later in itertools.pairwise(steps.begun_s[1:])]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        measured = Measured(len(took), world.get_rank(), sum(took) / len(took), peak)
        _end(replace(steps.report, measured=measured, notes=(*steps.report.notes, NOT_THE_JOBS)))


def _look(
    settings: ParallelSettings, target: Target, args: Sequence[Any], kwargs: dict[str, Any], level: int
) -> Report:
    """Return what a step with these arguments does; this process stands for the same rank as before."""
    own_rank = world.get_rank()
    device = own_profile()
    tries_changes = os.environ.get(contract.MSRUN_SIM_ESTIMATE) == "1"
    if (tries_changes or level == REAL_VALUES) and changes_network(target, settings):
        raise StrategyError(
            f"{'msrun estimate' if tries_changes else '--sim_level 3'} of a step function with "
            f"parallel_mode={settings.parallel_mode!r} and hsdp: it can be looked at only once; use --sim_level 2, or "
            "call the network as a module"
        )
    job = simulate_job(target, settings, args, kwargs, device, level, own_rank)
    changes = None
    if tries_changes:
        changes = try_changes(job, target, settings, args, kwargs, own_rank)
    world.stand_for(own_rank)
    notes = list(job.plan.notes)
    if not torch.is_grad_enabled():
        notes.append("the first call had no gradients: this is a forward pass, not a training step")
    if level and not any(found.record.optimizer for found in job.classes if found.record is not None):
        notes.append("no optimizer of these parameters existed at the first call: its memory is not counted")
    return Report(job, level, world.world().local_world_size, tuple(sys.argv), tuple(notes), changes)


def _end(report: Report) -> NoReturn:
    """Write and print the report, and end the process with status 0."""
    folder = os.environ.get(contract.MSRUN_LOG_DIR)
    if folder:
        write_report(report, Path(folder))
    sys.stderr.flush()
    sys.stdout.write(f"{render_table(report)}\n")
    sys.stdout.flush()
    raise SystemExit(0)


def write_report(report: Report, folder: Path) -> None:
    """Write simulation.json, the page and, where time was looked at, the trace; each whole or not at all.

    Raises:
        WorldError: a file cannot be written.
    """
    files = {contract.SIMULATION_JSON: json.dumps(report.to_json(), indent=1) + "\n"}
    if report.level:
        files[contract.SIMULATION_HTML] = render_page(report)
    if report.job.step is not None:
        files[contract.SIMULATION_TRACE] = json.dumps(build_trace(report.job), separators=(",", ":")) + "\n"
    for name, text in files.items():
        path = folder / name
        try:
            replace_file(path, text.encode(), mode=contract.FILE_MODE)
        except OSError as error:
            raise WorldError(f"{path}: cannot be written ({error.strerror}); give another --log_dir") from None
