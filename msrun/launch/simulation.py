"""Running a dry run: one process, no scheduler, no network; its output comes here as it is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from types import FrameType

from msrun import contract
from msrun.agent.processes.process_control import die_with_parent
from msrun.errors import UsageError, WorkerFailed
from msrun.launch.output import say_lines
from msrun.planning.simulation import Simulation

_COMPUTES = 3
_BEFORE = {False: "without a training step of AutoParallel", True: "before its fourth training step of AutoParallel"}
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def run_simulation(simulation: Simulation, caller: dict[str, str], *, quiet: bool) -> int:
    """Run the script until its first training step has been looked at; return the exit status.

    The report of an earlier dry run in the log directory is removed.

    Raises:
        UsageError: the log directory cannot be written.
        WorkerFailed: the script ended without a training step of AutoParallel.
    """
    report = simulation.log_dir / contract.SIMULATION_JSON
    try:
        simulation.log_dir.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        for name in (contract.SIMULATION_JSON, contract.SIMULATION_HTML, contract.SIMULATION_TRACE):
            (simulation.log_dir / name).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"--log_dir {simulation.log_dir}: cannot be written ({error.strerror}); give another"
        ) from None
    process = subprocess.Popen(
        simulation.program.argv(),
        cwd=simulation.working_directory,
        env=simulation.environment(caller),
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    with _passing_on(process):
        status = process.wait()
    source = ""
    if simulation.program.kind == "script":
        with contextlib.suppress(OSError, UnicodeDecodeError):
            source = (simulation.working_directory / simulation.program.target).read_text(encoding="utf-8")
    if status > 0 and not report.exists() and "init_process_group(" in source:
        say_lines(
            f"msrun: {simulation.program.target} calls init_process_group(), which finds no other ranks in a dry run: "
            "call msrun.runtime.init() instead, and train with msrun.runtime.AutoParallel"
        )
    if status:
        return contract.EXIT_SIGNAL_BASE - status if status < 0 else status
    if not report.exists():
        raise WorkerFailed(
            f"the script ended {_BEFORE[simulation.level == _COMPUTES]}, so there is nothing to report: call init(), "
            "and train with msrun.runtime.AutoParallel",
            contract.EXIT_USAGE,
        )
    if not quiet:
        pages = [
            name for name in (contract.SIMULATION_HTML, contract.SIMULATION_TRACE) if (report.parent / name).exists()
        ]
        say_lines(f"msrun: wrote {report}{''.join(f', {name}' for name in pages)}")
    return contract.EXIT_OK


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let the script have the signals that end msrun; a terminal sends it SIGINT itself."""

    def pass_on(signum: int, _: FrameType | None) -> None:
        if signum != signal.SIGINT:
            process.send_signal(signum)

    before = {signum: signal.signal(signum, pass_on) for signum in _ENDING}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
