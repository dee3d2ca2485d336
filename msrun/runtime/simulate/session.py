"""The end of a dry run: what happens at the first call of a parallel network, instead of its step."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from msrun import contract
from msrun.runtime import world
from msrun.runtime.capture.target import Target
from msrun.runtime.cost.devices import find_profile
from msrun.runtime.simulate.changes import try_changes
from msrun.runtime.simulate.job import simulate_job
from msrun.runtime.simulate.report import Report, write_report
from msrun.runtime.simulate.table import render_table

if TYPE_CHECKING:
    from msrun.runtime.parallel.auto_parallel import AutoParallel


def end_dry_run(parallel: AutoParallel, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
    """Look at the step that this call would run, write and print the report, and end the process with status 0.

    Raises:
        StrategyError: a mode without capture, or an illegal strategy, schedule or assignment of stages.
        CaptureError: the network cannot be captured.
    """
    level, own_rank = world.simulation_level(), world.get_rank()
    assert level is not None
    device = find_profile(os.environ.get(contract.MSRUN_SIM_DEVICE, "cpu"))
    job = simulate_job(target, parallel.settings, args, kwargs, device, level, own_rank)
    changes = None
    if os.environ.get(contract.MSRUN_SIM_ESTIMATE) == "1":
        changes = try_changes(job, target, parallel.settings, args, kwargs, own_rank)
    notes = list(job.plan.notes)
    if not torch.is_grad_enabled():
        notes.append("the first call had no gradients: this is a forward pass, not a training step")
    if level and not any(found.record.optimizer for found in job.classes if found.record is not None):
        notes.append("no optimizer of these parameters existed at the first call: its memory is not counted")
    report = Report(job, level, world.world().local_world_size, tuple(sys.argv), tuple(notes), changes)
    folder = os.environ.get(contract.MSRUN_LOG_DIR)
    if folder:
        write_report(report, Path(folder))
    sys.stderr.flush()
    print(render_table(report), flush=True)
    raise SystemExit(0)
