"""The environment of a worker, as a difference to the launcher's own; and which `mindspore` it imports."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.program import imports_package, with_numbers
from ranktable.hosts.host_list import MAX_PORT

if TYPE_CHECKING:
    from msrun.planning.hosts import Fleet
    from msrun.planning.placement.host import HostFacts
    from msrun.planning.spec import LaunchSpec

STACK_SIGNAL = signal.SIGRTMIN + 8  # on this signal a worker writes the stacks of all its threads

LOOPBACK_DEFAULTS = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "lo")
"""Keeps the sockets of a one-host job on loopback; a value that the user set wins. Of several hosts NCCL and HCCL look
for a network themselves, and may find a faster one than that on which the hosts have met."""

SET_LATE = (contract.JOB_VARIABLES | LOOPBACK_DEFAULTS.keys()) - {contract.MSRUN_JOB_ID}
"""Variables that a fork server may be given while it runs already: nothing that it imports reads them.

MSRUN_JOB_ID is none of them: by it processes of a job are found, in the environment that they were started with.
"""


FLIGHT_RECORDER_SIZE = "2000"  # collectives that are kept. Source: torch's own example and default


def common_environment(
    spec: LaunchSpec,
    fleet: Fleet | None,
    *,
    caller: Mapping[str, str],
    extra: Mapping[str, str],
    job_id: str,
    run_dir: str,
    master: tuple[str, int],
    target: str,
    threads: int,
    has_store: bool = True,
    server_token: str = "",
) -> dict[str, str]:
    """Return what every worker of a host gets beside the caller's environment. `fleet`: None = this is the only host;
    `extra`: what the user, and the kind of the script's `mindspore`, set; `run_dir`: empty = not known yet; `master`:
    address and port of the store; `has_store`: the scheduler serves it, else rank 0 opens it itself."""
    interfaces = LOOPBACK_DEFAULTS
    if fleet is not None:  # gloo and TensorPipe would take that of the host's name, which is loopback on many systems
        interfaces = (
            dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), fleet.interface) if fleet.interface else {}
        )
    env = {name: value for name, value in interfaces.items() if name not in caller}
    env |= early_environment(caller=caller, extra=extra, threads=threads)
    world_size, port = str(spec.worker_num), str(master[1])
    env |= {
        contract.WORLD_SIZE: world_size,
        contract.LOCAL_WORLD_SIZE: str(len(fleet.own.ranks) if fleet else spec.local_worker_num),
        contract.GROUP_WORLD_SIZE: str(len(fleet.hosts) if fleet else 1),
        contract.ROLE_WORLD_SIZE: world_size,
        contract.ROLE_NAME: spec.program.role,
        contract.MASTER_ADDR: master[0],
        contract.MASTER_PORT: port,
        contract.TORCHELASTIC_RUN_ID: job_id,
        contract.TORCHELASTIC_RESTART_COUNT: str(spec.first_attempt),
        contract.TORCHELASTIC_MAX_RESTARTS: str(spec.first_attempt + spec.max_restarts),
        contract.TORCHELASTIC_USE_AGENT_STORE: str(has_store),
        contract.MS_WORKER_NUM: world_size,
        contract.MS_SCHED_HOST: master[0],
        contract.MS_SCHED_PORT: str(mindspore_port(master[1])) if spec.mindspore == "real" else port,
        contract.RANK_SIZE: world_size,
        contract.RANK_TABLE_FILE: spec.rank_table_path,
        contract.MSRUN_JOB_ID: job_id,
        contract.MSRUN_LOG_DIR: str(spec.log_folder),
        contract.MSRUN_RENDEZVOUS: "env://" if fleet else f"file://{run_dir}/store",
        contract.MSRUN_DEVICE_TARGET: target,
        contract.MSRUN_PROGRESS: f"{run_dir}/progress",
        contract.MSRUN_STACK_SIGNAL: str(int(STACK_SIGNAL)),
    }
    if not run_dir:
        return env
    if spec.exit_time_out_s != contract.DEFAULT_EXIT_TIME_OUT_S:
        env[contract.MSRUN_EXIT_TIME_OUT] = f"{spec.exit_time_out_s:g}"
    if spec.has_trace:
        env[contract.MSRUN_TRACE_DIR] = str(spec.log_folder)
    if spec.hang_time_out_s:  # pipes at which workers wait to be asked for dumps
        env[contract.MSRUN_FLIGHT_RECORDER] = f"{run_dir}/flight_recorder"
        size = contract.TORCH_FR_BUFFER_SIZE
        env[size] = extra.get(size, caller.get(size, FLIGHT_RECORDER_SIZE))
    if spec.server_num:
        env |= {contract.MS_SERVER_NUM: str(spec.server_num), contract.MSRUN_SERVER_TOKEN: server_token}
    return env


def early_environment(*, caller: Mapping[str, str], extra: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the part of `common_environment` that needs no other host: what is read before a worker's program runs."""
    shown = ("TORCH_GLOO_LAZY_INIT", contract.TORCH_NCCL_ASYNC_ERROR_HANDLING)  # the first: pairs meet when they talk
    env = {"PYTHONUNBUFFERED": "1", **{name: caller.get(name, "1") for name in shown}}
    defaults = {"PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": str(threads)}  # a crash shows where Python was
    return {**env, **{name: value for name, value in defaults.items() if name not in caller}, **extra}


def of_rank(env: Collection[tuple[str, str]], numbers: Mapping[str, int]) -> dict[str, str]:
    """Return those of a job's variables that name a number of the worker, such as `{rank}`, with that number."""
    found = {name: with_numbers(value, numbers) for name, value in env}
    return {name: found[name] for name, value in env if found[name] != value}


def server_environment(caller: Mapping[str, str], common_env: Mapping[str, str]) -> dict[str, str]:
    """Return the fork server's environment: the common one, with one thread of OpenBLAS, so that it may fork."""
    env = {name: value for name, value in caller.items() if name not in contract.RANK_VARIABLES}
    return {**env, **common_env, "OPENBLAS_NUM_THREADS": "1"}


def restored_environment(caller: Mapping[str, str]) -> dict[str, str | None]:
    """Return what undoes `server_environment`'s hold in a worker; None removes a name."""
    return {"OPENBLAS_NUM_THREADS": caller.get("OPENBLAS_NUM_THREADS")}


def blas_threads(caller: Mapping[str, str], common_env: Mapping[str, str]) -> int:
    """Return how many threads OpenBLAS has to get back in a worker."""
    merged = {**caller, **common_env}
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if merged.get(name, "").isdigit():
            return int(merged[name])
    return 1


POSING_FOLDER = Path(__file__).parents[1] / "mindspore" / "posing"
"""On PYTHONPATH it makes `import mindspore` find msrun.mindspore, after everything that stands there already."""


def settle_mindspore(spec: LaunchSpec, host: HostFacts) -> LaunchSpec:
    """Return the spec with `mindspore` decided, none unless the script imports it (UsageError: it is not installed)."""
    if spec.mindspore == "real" and not host.mindspore_version:
        raise UsageError("--mindspore real: this Python has no mindspore; pip install mindspore, or leave it out")
    if spec.mindspore == "torch" and not host.has_torch:
        raise UsageError("--mindspore torch: this Python has no torch; pip install 'msrun[runtime]'")
    if spec.mindspore_semantics == "torch" and spec.mindspore == "real":
        raise UsageError("--mindspore_semantics torch with --mindspore real: MindSpore has its own; leave one out")
    if spec.mindspore != "auto":
        return spec
    if not any(imports_package(file, "mindspore") for file in spec.program.files(spec.working_directory)):
        return replace(spec, mindspore="none")
    has_real = host.mindspore_version and spec.mindspore_semantics == "mindspore"
    return replace(spec, mindspore="real" if has_real else "torch" if host.has_torch else "none")


def mindspore_environment(spec: LaunchSpec, caller: Mapping[str, str]) -> dict[str, str]:
    """Return what workers, and the process that they are forked from, need of the environment for their mindspore."""
    if spec.mindspore == "real":
        return {contract.MS_TOPO_TIMEOUT: str(spec.cluster_time_out_s)}
    semantics = {contract.MSRUN_MINDSPORE_SEMANTICS: "torch"} if spec.mindspore_semantics == "torch" else {}
    if spec.mindspore == "torch":
        before = {**caller, **dict(spec.env)}.get("PYTHONPATH", "")
        path = os.pathsep.join([before, str(POSING_FOLDER)] if before else [str(POSING_FOLDER)])
        return {"PYTHONPATH": path, **semantics}
    return semantics


def mindspore_port(store_port: int) -> int:
    """Return where MindSpore's scheduler listens beside torch's store; 0 = not known yet (UsageError: no such port)."""
    if store_port == MAX_PORT:
        raise UsageError(
            f"--master_port {store_port}: MindSpore's scheduler needs the next one, too; give a lower port"
        )
    return store_port + 1 if store_port else 0
