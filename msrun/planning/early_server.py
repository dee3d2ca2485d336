"""What a host's fork server can begin with before the hosts of a job have come together: importing takes longest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msrun import contract
from msrun.planning.build import choose_start_method, preloaded_modules
from msrun.planning.environment import early_environment, server_environment
from msrun.planning.imports import SAFE_PACKAGES
from msrun.planning.mindspore import mindspore_environment, settle_mindspore
from msrun.planning.placement.binding import bind_workers
from msrun.planning.placement.host import HostFacts, place_devices
from msrun.planning.placement.threads import threads_per_worker
from msrun.planning.spec import LaunchSpec


@dataclass(frozen=True)
class EarlyServer:
    """A fork server without its job."""

    environment: Mapping[str, str]
    working_directory: str
    imports: tuple[str, ...]
    """Nothing of the user's own: whether the job starts is not known yet."""


def early_imports(spec: LaunchSpec, caller: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a fork server may import before it has its job: nothing of the user's own."""
    if choose_start_method(spec, caller) == "exec":
        return ()
    return tuple(name for name in preloaded_modules(spec) if name.partition(":")[0].partition(".")[0] in SAFE_PACKAGES)


def plan_early_server(spec: LaunchSpec, host: HostFacts, caller: Mapping[str, str], job_id: str) -> EarlyServer | None:
    """Return what to begin with on this host; None when there is nothing to import.

    Args:
        caller: the environment that workers inherit.

    Raises:
        UsageError: more workers than devices, or a binding that this host does not allow.
    """
    spec = settle_mindspore(spec, host)
    imports = early_imports(spec, caller)
    if not imports:
        return None
    devices = place_devices(spec.device_target, spec.local_worker_num, host, spec.own_device_ids)
    topology = host.known_topology()
    binding = bind_workers(topology, devices.physical, target=devices.target, core=spec.bind_core, numa=spec.bind_numa)
    threads = min(threads_per_worker(topology, binding.workers))
    known = early_environment(
        caller=caller, extra={**dict(spec.env), **mindspore_environment(spec, caller)}, threads=threads
    )
    environment = server_environment(caller, {**known, contract.MSRUN_JOB_ID: job_id})
    return EarlyServer(environment, str(spec.working_directory), imports)
