"""Whether this host can start a job again: what may have changed since its first start."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msrun.errors import ClusterError
from msrun.launch.preflight.checks import FULL_DISK_BYTES, place_own_devices
from msrun.launch.preflight.host_room import free_disk_bytes
from msrun.planning.spec import LaunchSpec


def check_restart(spec: LaunchSpec, caller: Mapping[str, str], survivors: Collection[int]) -> None:
    """Look at the disks of the logs and for the devices of the workers.

    Args:
        caller: the environment that workers inherit.
        survivors: processes of the attempt before that could not be ended.

    Raises:
        ClusterError: there are such processes; a folder of logs has gone, or its disk is full.
        UsageError: a device has gone.
    """
    if survivors:
        raise ClusterError(f"processes {sorted(survivors)} could not be ended")
    for folder in filter(None, (spec.log_dir, spec.worker_log_dir)):
        try:
            free = free_disk_bytes(folder)
        except OSError as error:
            raise ClusterError(f"{folder}: {error.strerror}; logs are written there") from None
        if free is not None and free < FULL_DISK_BYTES:
            raise ClusterError(f"the disk of {folder}, where logs are written, is full; make room")
    place_own_devices(spec, caller)
