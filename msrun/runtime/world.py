"""The world of this process: who it is, how many there are, and how it joined them.

`init()` works under msrun, under torchrun, under mpirun or srun, from RANK_TABLE_FILE + RANK_ID + DEVICE_ID as in the
documents' run.sh, from MS_ROLE variables set by hand, and alone: then the world is one process and nothing is opened.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions keep the world group of the moment they are imported as a default argument. Imported later, as
# torch.export does, they would hold the group, and its threads, beyond release().
import torch.distributed.nn.functional
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime import progress

DEFAULT_TIMEOUT_S = 1800.0
LEAVE_AT_EXIT_S = 2.0
"""How long a process that ends without `release()` may take for it."""


@dataclass(frozen=True)
class WorldSpec:
    """Where a process stands, read from its environment."""

    source: str
    """Which variables said so: msrun, torchrun, mpirun, Slurm, rank table, MS_ROLE, or alone."""
    global_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str
    """file:///path, tcp://address:port, env://, or empty when alone."""


_spec: WorldSpec | None = None
_forgetters: list[Callable[[], None]] = []


def find_world(environ: Mapping[str, str]) -> WorldSpec:
    """Find this process's place from its environment; pure.

    Order: msrun's variables; torchrun's; mpirun's (OMPI_*); Slurm's; RANK_TABLE_FILE with RANK_ID; MS_ROLE by hand;
    none of them = one process.

    Raises:
        WorldError: variables that contradict each other or are not numbers.
    """
    for finder in (_from_msrun, _from_torchrun, _from_mpirun, _from_slurm, _from_rank_table, _from_ms_role):
        spec = finder(environ)
        if spec is not None:
            _check(spec)
            return spec
    return WorldSpec("alone", 0, 1, 0, 1, "")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise WorldError(f"{name}={text!r}: a whole number is expected; start the job with msrun") from None


def _torch_world(environ: Mapping[str, str], source: str, rendezvous: str) -> WorldSpec:
    size = _number(environ, contract.WORLD_SIZE)
    return WorldSpec(
        source,
        _number(environ, contract.RANK),
        size,
        _number(environ, contract.LOCAL_RANK, 0),
        _number(environ, contract.LOCAL_WORLD_SIZE, size),
        rendezvous,
    )


def _from_msrun(environ: Mapping[str, str]) -> WorldSpec | None:
    if contract.MSRUN_JOB_ID not in environ or contract.RANK not in environ:
        return None
    return _torch_world(environ, "msrun", environ.get(contract.MSRUN_RENDEZVOUS) or "env://")


def _from_torchrun(environ: Mapping[str, str]) -> WorldSpec | None:
    if contract.RANK not in environ or contract.WORLD_SIZE not in environ:
        return None
    return _torch_world(environ, "torchrun", "env://")


def _from_mpirun(environ: Mapping[str, str]) -> WorldSpec | None:
    if "OMPI_COMM_WORLD_RANK" not in environ or contract.MS_ROLE in environ:
        return None
    return WorldSpec(
        "mpirun",
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        _number(environ, "OMPI_COMM_WORLD_SIZE"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        _master(environ, "mpirun -x MASTER_ADDR=... -x MASTER_PORT=..."),
    )


def _from_slurm(environ: Mapping[str, str]) -> WorldSpec | None:
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return None  # an interactive shell on a node carries these variables too
    return WorldSpec(
        "Slurm",
        _number(environ, "SLURM_PROCID"),
        size,
        _number(environ, "SLURM_LOCALID", 0),
        size // _number(environ, "SLURM_STEP_NUM_NODES", 1),
        _master(environ, "export MASTER_ADDR and MASTER_PORT before srun"),
    )


def _from_rank_table(environ: Mapping[str, str]) -> WorldSpec | None:
    if contract.RANK_TABLE_FILE not in environ or contract.RANK_ID not in environ:
        return None
    size = _number(environ, contract.RANK_SIZE)
    local = _number(environ, contract.DEVICE_ID, 0)
    return WorldSpec(
        "rank table",
        _number(environ, contract.RANK_ID),
        size,
        local,
        size,
        _master(environ, "export MASTER_ADDR and MASTER_PORT beside RANK_TABLE_FILE"),
    )


def _from_ms_role(environ: Mapping[str, str]) -> WorldSpec | None:
    if environ.get(contract.MS_ROLE) != contract.ROLE_WORKER:
        return None
    size = _number(environ, contract.MS_WORKER_NUM)
    rank = _number(environ, contract.RANK_ID if contract.RANK_ID in environ else contract.MS_NODE_ID, -1)
    if rank < 0:
        raise WorldError(f"{contract.MS_ROLE}={contract.ROLE_WORKER} but no {contract.RANK_ID}: export it as 0 to N-1")
    address = f"tcp://{environ.get(contract.MS_SCHED_HOST, '127.0.0.1')}:{_number(environ, contract.MS_SCHED_PORT)}"
    return WorldSpec("MS_ROLE", rank, size, _number(environ, contract.DEVICE_ID, 0), size, address)


def _master(environ: Mapping[str, str], remedy: str) -> str:
    if contract.MASTER_ADDR not in environ or contract.MASTER_PORT not in environ:
        raise WorldError(
            f"{contract.MASTER_ADDR} and {contract.MASTER_PORT} are not set: {remedy}, or start with msrun"
        )
    return f"tcp://{environ[contract.MASTER_ADDR]}:{environ[contract.MASTER_PORT]}"


def _check(spec: WorldSpec) -> None:
    if not 0 <= spec.global_rank < spec.world_size:
        raise WorldError(
            f"rank {spec.global_rank} of a world of {spec.world_size} ({spec.source} variables): must be 0 to "
            f"{spec.world_size - 1}; stale variables in the shell? start with msrun"
        )


def init(backend_name: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Join the world; call it once at the start of every worker. Alone it only notes that there is one process.

    Args:
        backend_name: gloo, nccl or hccl; None takes the one of the device (nccl on CUDA, hccl on Ascend, else gloo).
        timeout_s: how long joining, and any collective, may take.

    Raises:
        WorldError: called twice, contradicting variables, or the others did not come in time.
    """
    global _spec
    if _spec is not None:
        raise WorldError("init() was called twice: call release() first to join again")
    spec = find_world(os.environ)
    progress.open_record(spec.global_rank)
    if spec.world_size > 1 or spec.rendezvous:
        progress.enter_phase(contract.PHASE_JOINING)
        _join(spec, backend_name or _default_backend(), timedelta(seconds=timeout_s))
        atexit.unregister(_leave_at_exit)
        atexit.register(_leave_at_exit)
    progress.enter_phase(contract.PHASE_JOINED)
    _spec = spec


def _join(spec: WorldSpec, backend: str, timeout: timedelta) -> None:
    if dist.is_initialized():  # the script made the default group itself
        return
    rank, size = spec.global_rank, spec.world_size
    try:
        if spec.rendezvous.startswith("file://"):
            file = FileStore(spec.rendezvous.removeprefix("file://"), size)
            attempt = os.environ.get(contract.TORCHELASTIC_RESTART_COUNT, "0")
            store = PrefixStore(f"attempt_{attempt}", file)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        elif spec.rendezvous.startswith("tcp://"):
            dist.init_process_group(backend, init_method=spec.rendezvous, rank=rank, world_size=size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {spec.global_rank} of {spec.world_size} could not join at {spec.rendezvous} with {backend}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _default_backend() -> str:
    target = os.environ.get(contract.MSRUN_DEVICE_TARGET)
    if target == "ascend":
        return "hccl"
    return "nccl" if target != "cpu" and torch.cuda.is_available() else "gloo"


def _leave_at_exit() -> None:
    """Release a world that the program did not release; a failing program leaves it standing.

    gloo's threads drop the tensors of a finished collective and need the interpreter lock for that; a thread that asks
    for it while the interpreter ends is unwound by force, and the whole process with it: SIGABRT after good work.
    A collective that others never joined may keep `release()` waiting, so it gets a thread and a moment. After an
    exception nobody waits: one reference more than Python knows of keeps the groups alive, because dropping a group
    waits for its collectives, for as long as the time-out.
    """
    if not dist.is_initialized():
        return
    if getattr(sys, "last_value", None) is not None:
        for process_group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
        return
    leaving = threading.Thread(target=release, name="msrun-release", daemon=True)
    leaving.start()
    leaving.join(LEAVE_AT_EXIT_S)


def at_release(forget: Callable[[], None]) -> None:
    """Have something forgotten when this process leaves its world."""
    _forgetters.append(forget)


def release() -> None:
    """Leave the world and forget every named group. Harmless when the process never joined."""
    global _spec
    for forget in _forgetters:
        forget()
    if _spec is not None:
        progress.enter_phase(
            contract.PHASE_LEFT
        )  # before the connections close, which ends whoever waits for this rank
    if dist.is_initialized():
        dist.destroy_process_group()
    _spec = None


def is_initialized() -> bool:
    """Return True after `init()`."""
    return _spec is not None


def world() -> WorldSpec:
    """Return this process's place; before `init()` that is one process alone."""
    return _spec if _spec is not None else WorldSpec("alone", 0, 1, 0, 1, "")


def device() -> torch.device:
    """Return the device of this rank: its CUDA or Ascend device, else the CPU."""
    if dist.is_initialized() and dist.get_backend() in ("nccl", "hccl"):
        kind = "cuda" if dist.get_backend() == "nccl" else "npu"
        return torch.device(kind, int(os.environ.get(contract.DEVICE_ID, world().local_rank)))
    return torch.device("cpu")


def get_rank() -> int:
    """Return this process's rank in the world."""
    return world().global_rank


def get_group_size() -> int:
    """Return the number of ranks in the world."""
    return world().world_size


def get_local_rank() -> int:
    """Return this process's index on its host."""
    return world().local_rank


def get_local_rank_size() -> int:
    """Return the number of ranks on this host."""
    return world().local_world_size
