"""The environment of a worker, as a difference to the launcher's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping

from msrun import contract
from msrun.planning.mindspore import mindspore_port
from msrun.planning.placement.host import ASCEND_VARIABLE, CUDA_VARIABLE
from msrun.planning.program import DEFAULT_ROLE, with_numbers
from msrun.planning.spec import LaunchSpec

STACK_SIGNAL = signal.SIGRTMIN + 8
"""On this signal a worker writes the stacks of all its threads."""

LOOPBACK_DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}
"""Keeps the sockets of a one-host job on loopback; a value that the user set wins."""


SET_LATE = (contract.JOB_VARIABLES | LOOPBACK_DEFAULTS.keys()) - {contract.MSRUN_JOB_ID}
"""Variables that a fork server may be given while it runs already: nothing that it imports reads them.

MSRUN_JOB_ID is none of them: by it processes of a job are found, in the environment that they were started with.
"""


def interface_defaults(interface: str) -> dict[str, str]:
    """Return what makes the workers of several hosts talk over the network on which the hosts have met.

    gloo and TensorPipe would take the interface that the host's name resolves to, which is loopback on many systems.
    NCCL and HCCL look for themselves, and may find a faster network.
    """
    return {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface} if interface else {}


FLIGHT_RECORDER_SIZE = "2000"
"""Collectives that torch's flight recorder keeps. Source: torch's own example and NCCL default."""


def common_environment(
    spec: LaunchSpec,
    *,
    caller: Mapping[str, str],
    extra: Mapping[str, str],
    job_id: str,
    run_dir: str,
    local_world_size: int,
    master: tuple[str, int],
    target: str,
    threads: int,
    group_world_size: int = 1,
    rendezvous: str = "env://",
    interfaces: Mapping[str, str] = LOOPBACK_DEFAULTS,
    has_store: bool = True,
    server_token: str = "",
) -> dict[str, str]:
    """Return what every worker of a host gets beside the caller's environment; equal for all of them.

    Args:
        extra: what the user, and the kind of the script's `mindspore`, set for them.
        run_dir: the job's temporary folder on the host; empty = not known yet.
        master: address and port of the store.
        group_world_size: number of hosts.
        interfaces: variables that choose network interfaces.
        has_store: the scheduler serves torch's store; else rank 0 of a torch program opens it itself.
        server_token: what workers and parameter servers know each other by.
    """
    env = {name: value for name, value in interfaces.items() if name not in caller}
    env |= early_environment(caller=caller, extra=extra, threads=threads)
    world_size, port = str(spec.worker_num), str(master[1])
    env |= {
        contract.WORLD_SIZE: world_size,
        contract.LOCAL_WORLD_SIZE: str(local_world_size),
        contract.GROUP_WORLD_SIZE: str(group_world_size),
        contract.ROLE_WORLD_SIZE: world_size,
        contract.ROLE_NAME: DEFAULT_ROLE,
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
        contract.MSRUN_RENDEZVOUS: rendezvous,
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
    """Return the part of `common_environment` that does not depend on the other hosts, nor on the job's addresses.

    It holds all that the interpreter and torch read before a worker's program runs.
    """
    env = {"PYTHONUNBUFFERED": "1"}
    env["TORCH_GLOO_LAZY_INIT"] = caller.get("TORCH_GLOO_LAZY_INIT", "1")  # connect pairs when they first talk
    handling = contract.TORCH_NCCL_ASYNC_ERROR_HANDLING
    env[handling] = caller.get(handling, "1")
    if "PYTHONFAULTHANDLER" not in caller:
        env["PYTHONFAULTHANDLER"] = "1"  # a crash in native code shows where Python was
    if "OMP_NUM_THREADS" not in caller:
        env["OMP_NUM_THREADS"] = str(threads)
    return {**env, **extra}


def rank_environment(*, global_rank: int, local_rank: int, node_rank: int, device_id: int) -> dict[str, str]:
    """Return what makes a process worker `global_rank`."""
    return {
        contract.RANK: str(global_rank),
        contract.LOCAL_RANK: str(local_rank),
        contract.GROUP_RANK: str(node_rank),
        contract.ROLE_RANK: str(global_rank),
        contract.MS_ROLE: contract.ROLE_WORKER,
        contract.MS_NODE_ID: str(global_rank),
        contract.MS_NODE_RANK: str(node_rank),
        contract.RANK_ID: str(global_rank),
        contract.DEVICE_ID: str(device_id),
    }


def role_environment(name: str, role_rank: int, role_world_size: int) -> dict[str, str]:
    """Return what a worker knows of its role where that is not all workers' one role. Source: torchelastic."""
    return {
        contract.ROLE_NAME: name,
        contract.ROLE_RANK: str(role_rank),
        contract.ROLE_WORLD_SIZE: str(role_world_size),
    }


def virtual_rank_environment(target: str, device: str) -> dict[str, str]:
    """Return what a worker has in the place of its place on its host. Source: torchrun's --virtual-local-rank.

    Args:
        device: its number on the host.
    """
    visible = {"gpu": CUDA_VARIABLE, "ascend": ASCEND_VARIABLE}.get(target)
    return {contract.LOCAL_RANK: "0", contract.DEVICE_ID: "0", **({visible: device} if visible else {})}


def of_rank(env: Collection[tuple[str, str]], numbers: Mapping[str, int]) -> dict[str, str]:
    """Return those of a job's variables that name a number of the worker, such as `{rank}`, with that number."""
    found = {name: with_numbers(value, numbers) for name, value in env}
    return {name: found[name] for name, value in env if found[name] != value}


def overridden_names(caller: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    """Return the variables that the caller had set to something else and that workers see replaced."""
    return sorted(
        name
        for name, value in planned.items()
        if name in caller and caller[name] != value and not value.startswith(f"{caller[name]}{os.pathsep}")
    )


def server_environment(caller: Mapping[str, str], common_env: Mapping[str, str]) -> dict[str, str]:
    """Return the fork server's environment: the workers' common one, with OpenBLAS held at one thread.

    numpy's OpenBLAS starts its threads when it is imported, and a process with threads must not fork.
    """
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
