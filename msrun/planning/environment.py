"""The environment of a worker, as a difference to the launcher's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping

from msrun import contract
from msrun.planning.masking import MASK, SECRET_NAME, mask_url
from msrun.planning.placement.host import ASCEND_VARIABLE, CUDA_VARIABLE
from msrun.planning.program import DEFAULT_ROLE, with_numbers

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
    *,
    caller: Mapping[str, str],
    extra: Mapping[str, str],
    job_id: str,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    log_dir: str,
    rank_table_file: str,
    rendezvous: str,
    progress: str,
    max_restarts: int,
    device_target: str,
    threads: int,
    group_world_size: int = 1,
    interfaces: Mapping[str, str] = LOOPBACK_DEFAULTS,
    has_store: bool = True,
    trace_dir: str = "",
    flight_recorder: str = "",
    first_attempt: int = 0,
) -> dict[str, str]:
    """Return what every worker of a host gets beside the caller's environment; equal for all of them.

    Args:
        group_world_size: number of hosts.
        first_attempt: how often the job was started before on other hosts; `max_restarts` is what is left.
        trace_dir: where workers write their parts of a trace; empty = they write none.
        flight_recorder: where pipes are at which workers wait to be asked for dumps; empty = they are not asked.
        interfaces: variables that choose network interfaces.
        has_store: the scheduler serves torch's store; else rank 0 of a torch program opens it itself.
    """
    env = {name: value for name, value in interfaces.items() if name not in caller}
    env.update(early_environment(caller=caller, extra=extra, threads=threads))
    env.update(
        {
            contract.WORLD_SIZE: str(world_size),
            contract.LOCAL_WORLD_SIZE: str(local_world_size),
            contract.GROUP_WORLD_SIZE: str(group_world_size),
            contract.ROLE_WORLD_SIZE: str(world_size),
            contract.ROLE_NAME: DEFAULT_ROLE,
            contract.MASTER_ADDR: master_addr,
            contract.MASTER_PORT: str(master_port),
            contract.TORCHELASTIC_RUN_ID: job_id,
            contract.TORCHELASTIC_RESTART_COUNT: str(first_attempt),
            contract.TORCHELASTIC_MAX_RESTARTS: str(first_attempt + max_restarts),
            contract.TORCHELASTIC_USE_AGENT_STORE: str(has_store),
            contract.MS_WORKER_NUM: str(world_size),
            contract.MS_SCHED_HOST: master_addr,
            contract.MS_SCHED_PORT: str(master_port),
            contract.RANK_SIZE: str(world_size),
            contract.RANK_TABLE_FILE: rank_table_file,
            contract.MSRUN_JOB_ID: job_id,
            contract.MSRUN_LOG_DIR: log_dir,
            contract.MSRUN_RENDEZVOUS: rendezvous,
            contract.MSRUN_DEVICE_TARGET: device_target,
            contract.MSRUN_PROGRESS: progress,
            **({contract.MSRUN_TRACE_DIR: trace_dir} if trace_dir else {}),
            contract.MSRUN_STACK_SIGNAL: str(int(STACK_SIGNAL)),
        }
    )
    if flight_recorder:
        env[contract.MSRUN_FLIGHT_RECORDER] = flight_recorder
        size = contract.TORCH_FR_BUFFER_SIZE
        env[size] = extra.get(size, caller.get(size, FLIGHT_RECORDER_SIZE))
    return env


def parameter_server_environment(server_num: int, token: str) -> dict[str, str]:
    """Return what workers and parameter servers get beside `common_environment`; nothing in a job without servers."""
    if not server_num:
        return {}
    return {contract.MS_SERVER_NUM: str(server_num), contract.MSRUN_SERVER_TOKEN: token}


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


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the values of secret-looking names and passwords in URLs hidden, for plans, logs and events."""
    return {name: MASK if SECRET_NAME.search(name) else mask_url(value) for name, value in env.items()}


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
