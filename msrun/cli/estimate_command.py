"""`msrun estimate`: does a job fit, and what would help. A command only as the first word."""

from __future__ import annotations

import os
from pathlib import Path

import click

from msrun.cli.option_types import option
from msrun.errors import UsageError
from msrun.planning.program import parse_program
from msrun.planning.simulation import Simulation

_LEVEL = 2


@click.command(
    "estimate",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Argument(["words"], metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED),
        option("device", "PROFILE", default="cpu", show_default=True, help="Device profile, or a JSON file of one."),
        option("worker_num", "N", type=int, default=8, show_default=True, help="Ranks of the job."),
        option("hosts", "N", type=int, help="Hosts that they fill.  [default: 8 ranks on each]"),
        option(
            "log_dir",
            "DIR",
            type=click.Path(path_type=Path),
            default="log_output",
            show_default=True,
            help="Directory of the report.",
        ),
    ],
)
def estimate_command(words: tuple[str, ...], device: str, worker_num: int, hosts: int | None, log_dir: Path) -> int:
    """Tell whether the training step of SCRIPT fits into the memory of a device, how long it takes, and what to change.

    Runs the script up to its first training step in one process, without devices. Every change that it names has been
    computed. Options of the script itself stand after --.

    `estimate` is this command only as the first word; start a program of that name as `msrun ./estimate`.
    """
    from msrun.launch.simulation import run_simulation

    if hosts is not None and (hosts < 1 or worker_num % hosts):
        raise UsageError(f"--hosts {hosts}: must divide --worker_num {worker_num}; give another number")
    here = Path.cwd()
    simulation = Simulation(
        program=parse_program(words, is_module=False, working_directory=here),
        level=_LEVEL,
        worker_num=worker_num,
        local_worker_num=worker_num // hosts if hosts else min(8, worker_num),
        global_rank=0,
        device=device,
        working_directory=here,
        log_dir=log_dir.absolute(),
        tries_changes=True,
    )
    return run_simulation(simulation, dict(os.environ), quiet=False)
