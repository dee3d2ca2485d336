"""Simulation: a dry run of a script in one process, which stands for a rank of a job that does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msrun import contract
from msrun.errors import UsageError, near_miss
from msrun.planning.program import Program


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a dry run is to look like.

    UsageError: no such rank, hosts that the ranks do not fill, or no such device profile.
    """

    program: Program
    level: int
    worker_num: int
    local_worker_num: int
    global_rank: int
    device: str
    """Name or file of the device profile."""
    working_directory: Path
    log_dir: Path
    env: tuple[tuple[str, str], ...] = ()
    tries_changes: bool = False
    """Whether other settings are priced, too."""

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
