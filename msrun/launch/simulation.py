"""A dry run of a script in one process, which stands for a rank of a job that does not exist: no scheduler, no network;
its output comes here as it is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

from msrun import contract
from msrun.agent.processes.process_control import die_with_parent
from msrun.errors import UsageError, WorkerFailed, near_miss, refused_as
from msrun.launch.output import say_lines
from msrun.planning.program import Program
from msrun.planning.record import Record


class Simulation(Record, kw_only=True):
    """What a dry run is to look like (UsageError: no such rank or device profile, or hosts not filled by the ranks)."""

    program: Program
    level: int
    worker_num: int
    local_worker_num: int
    global_rank: int
    device: str  # name or file of the device profile
    working_directory: Path
    log_dir: Path
    env: tuple[tuple[str, str], ...] = ()
    tries_changes: bool = False  # whether other settings are priced, too

    def __post_init__(self) -> None:
        if self.worker_num < 1:
            raise UsageError(f"--worker_num {self.worker_num}: must be 1 or more")
        if not 0 <= self.global_rank < self.worker_num:
            raise UsageError(
                f"--sim_rank_id {self.global_rank}: no such rank; the ranks of this job are 0 to {self.worker_num - 1}"
            )
        if self.local_worker_num < 1 or self.worker_num % self.local_worker_num:
            fits = next(count for count in range(min(8, self.worker_num), 0, -1) if not self.worker_num % count)
            remedy = f"--hosts {self.worker_num // fits}" if self.tries_changes else f"--local_worker_num {fits}"
            raise UsageError(
                f"--worker_num {self.worker_num} on hosts of {self.local_worker_num}: a dry run fills all hosts alike; "
                f"give {remedy}"
            )
        is_file, option = self.device.endswith(".json"), "--device" if self.tries_changes else "--sim_device"
        if not is_file and self.device.lower() not in contract.SIM_DEVICES:
            raise UsageError(
                f"{option} {self.device}{near_miss(self.device, contract.SIM_DEVICES)}: must be one of "
                f"{', '.join(contract.SIM_DEVICES)}, or a JSON file of calibrate()"
            )
        if is_file and not (self.working_directory / self.device).is_file():
            raise UsageError(f"{option} {self.device}: no such file; calibrate() writes one")

    def environment(self, caller: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the script's process: the caller's, without those of a rank of another job."""
        local_rank = self.global_rank % self.local_worker_num
        foreign = contract.RANK_VARIABLES | contract.JOB_VARIABLES
        own = {name: value for name, value in caller.items() if name not in foreign}
        own |= dict(self.env)
        own |= {
            contract.MSRUN_SIM_LEVEL: str(self.level),
            contract.MSRUN_SIM_DEVICE: self.device,
            contract.MSRUN_LOG_DIR: str(self.log_dir),
            contract.RANK: str(self.global_rank),
            contract.WORLD_SIZE: str(self.worker_num),
            contract.LOCAL_RANK: str(local_rank),
            contract.LOCAL_WORLD_SIZE: str(self.local_worker_num),
            contract.RANK_ID: str(self.global_rank),
            contract.RANK_SIZE: str(self.worker_num),
            contract.DEVICE_ID: str(local_rank),
        }
        return own | ({contract.MSRUN_SIM_ESTIMATE: "1"} if self.tries_changes else {})


_COMPUTES = 3
_BEFORE = {False: "without a training step of AutoParallel", True: "before its fourth training step of AutoParallel"}
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def run_simulation(simulation: Simulation, caller: dict[str, str], *, quiet: bool) -> int:
    """Run the script until its first training step has been looked at; return the exit status. The report of an earlier
    dry run is removed (UsageError: the log directory cannot be written; WorkerFailed: no training step of AutoParallel
    came)."""
    report = simulation.log_dir / contract.SIMULATION_JSON
    with refused_as(f"--log_dir {simulation.log_dir}: cannot be written", "give another"):
        simulation.log_dir.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        for name in (contract.SIMULATION_JSON, contract.SIMULATION_HTML, contract.SIMULATION_TRACE):
            (simulation.log_dir / name).unlink(missing_ok=True)
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
