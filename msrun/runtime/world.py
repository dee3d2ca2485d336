"""The world of this process: who it is, how many there are, and how it joined them.

`init()` works under msrun, under torchrun, under mpirun or srun, from RANK_TABLE_FILE + RANK_ID + DEVICE_ID as in the
documents' run.sh, from MS_ROLE variables set by hand, and alone: then the world is one process and nothing is opened.
`joining/` tells them apart, and brings together the ranks of those where no launcher does.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions keep the world group of the moment they are imported as a default argument. Imported later, as
# dynamo does, they would hold the group, and its threads, beyond release().
import torch.distributed.nn.functional
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime import progress, uncaught
from msrun.runtime.joining.launchers import REAL_VALUES, SOURCE, find_cluster, find_world, join_fake_world, read_level
from msrun.runtime.joining.meet import Lifeline, meet, run_scheduler, run_server
from msrun.runtime.joining.spec import (
    ALONE,
    CPU,
    LOOPBACK,
    WorldSpec,
    check_backend,
    choose_backend,
    device_of_group,
    keep_to_interface,
    use_device,
)
from msrun.runtime.requirements import warn_if_untested
from msrun.shm.process_group import register

DEFAULT_TIMEOUT_S = 1800.0
LEAVE_AT_EXIT_S = 2.0
"""How long a process that ends without `release()` may take for it."""


_spec: WorldSpec | None = None
_device: torch.device | None = None
_lifeline: Lifeline | None = None
_forgetters: list[Callable[[], None]] = []


def init(backend_name: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Join the world; call it once at the start of every worker. Alone it only notes that there is one process.

    Where no launcher has done so, it exports RANK_ID, RANK_SIZE and DEVICE_ID, as MindSpore does. A process with
    MS_ROLE=MS_SCHED, the scheduler of workers that were started by hand, serves them here, and ends here; so does one
    with MS_ROLE=MS_PSERVER, a parameter server.

    Args:
        backend_name: shm, gloo, nccl or hccl, or as in torch one for each kind of device, such as
            cpu:gloo,cuda:gloo; None takes those of the device: cpu:gloo,cuda:nccl on CUDA, cpu:gloo,npu:hccl on
            Ascend, on the CPU shm, which uses gloo between hosts. MSRUN_CPU_BACKEND names another one for a job on
            the CPU. The device of this rank, `device()`, becomes torch's current one.
        timeout_s: how long joining, and any collective, may take; for joining by hand MS_TOPO_TIMEOUT comes first.

    Raises:
        WorldError: called twice, contradicting variables, no device for this rank, or the others did not come.
    """
    global _spec, _device
    if _spec is not None:
        raise WorldError("init() was called twice: call release() first to join again")
    uncaught.install()
    warn_if_untested()  # not said yet where the fork server has imported the runtime
    scheduler = find_cluster(os.environ, contract.ROLE_SCHEDULER)
    if scheduler is not None:
        run_scheduler(*scheduler, os.environ, timeout_s)
    if find_cluster(os.environ, contract.ROLE_SERVER) is not None:
        run_server()
    spec = find_world(os.environ)
    progress.open_record(spec.global_rank)
    if spec.world_size > 1 or spec.rendezvous or spec.meeting:
        progress.enter_phase(contract.PHASE_JOINING)
        spec = _join(spec, backend_name, timeout_s)
        uncaught.install()  # torch has put its own hook around, with the world
        atexit.unregister(_leave_at_exit)
        atexit.register(_leave_at_exit)
    else:
        _device = use_device(spec, backend_name or choose_backend(os.environ, 1))
    progress.enter_phase(contract.PHASE_JOINED)
    _spec = spec


def _join(spec: WorldSpec, backend: str | None, timeout_s: float) -> WorldSpec:
    """Join, and return the place, which the scheduler of MS_ROLE may have assigned."""
    global _lifeline, _device
    if dist.is_initialized():  # the script made the default group itself
        _device = device_of_group()
        return replace(spec, global_rank=dist.get_rank())
    if spec.source == SOURCE:
        join_fake_world(spec)
        if read_level(os.environ) < REAL_VALUES:
            # Brings torch's distributed tensors, which take as long to import as half of torch.
            from msrun.runtime.tensors.plain_tensors import keep_no_values

            keep_no_values()
        return spec
    store: Store | None = None
    if spec.meeting is not None:
        met = meet(spec, spec.meeting, os.environ, timeout_s)
        spec, store, _lifeline = met.spec, met.store, met.lifeline
    elif spec.rendezvous.startswith("file://"):
        file = FileStore(spec.rendezvous.removeprefix("file://"), spec.world_size)
        store = PrefixStore(f"attempt_{os.environ.get(contract.TORCHELASTIC_RESTART_COUNT, '0')}", file)
    if spec.device_id is not None:  # no launcher of ours or of torch
        _export(spec)
        if spec.meeting is None:
            keep_to_interface(os.environ, LOOPBACK)
    backend = backend or choose_backend(os.environ, spec.world_size)
    check_backend(backend)
    _device = use_device(spec, backend)
    _init_process_group(spec, store, backend, timedelta(seconds=timeout_s))
    return spec


def _init_process_group(spec: WorldSpec, store: Store | None, backend: str, timeout: timedelta) -> None:
    rank, size = spec.global_rank, spec.world_size
    if backend == "shm":
        register()
    try:
        if store is not None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        place = spec.meeting.place if spec.meeting else spec.rendezvous
        raise WorldError(
            f"rank {rank} of {size} could not join at {place} with {backend}: {str(error).splitlines()[0]}"
        ) from error


def _export(spec: WorldSpec) -> None:
    """Tell the script who it is in MindSpore's words."""
    os.environ[contract.RANK_ID] = str(spec.global_rank)
    os.environ[contract.RANK_SIZE] = str(spec.world_size)
    os.environ[contract.DEVICE_ID] = str(spec.device_id)


def _leave_at_exit() -> None:
    """Release a world that the program did not release; a failing program leaves it standing.

    gloo's threads drop the tensors of a finished collective and need the interpreter lock for that; a thread that asks
    for it while the interpreter ends is unwound by force, and the whole process with it: SIGABRT after good work.
    A collective that others never joined may keep `release()` waiting, so it gets a thread and a moment. After an
    exception nobody waits: one reference more than Python knows of keeps the groups alive, because dropping a group
    waits for its collectives, for as long as the time-out.
    """
    has_failed = getattr(sys, "last_value", None) is not None
    if not dist.is_initialized():
        if not has_failed:  # the program has ended the world by torch's own means
            _leave_scheduler()
        return
    if has_failed:
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
    global _spec, _device
    for forget in _forgetters:
        forget()
    if _spec is not None:
        progress.enter_phase(
            contract.PHASE_LEFT
        )  # before the connections close, which ends whoever waits for this rank
    if dist.is_initialized():
        dist.destroy_process_group()
    _leave_scheduler()
    _spec = _device = None


def _leave_scheduler() -> None:
    global _lifeline
    if _lifeline is not None:
        _lifeline.leave()
    _lifeline = None


def is_initialized() -> bool:
    """Return True after `init()`."""
    return _spec is not None


def world() -> WorldSpec:
    """Return this process's place; before `init()` that is one process alone."""
    return _spec if _spec is not None else ALONE


def stand_for(global_rank: int) -> None:
    """Let a dry run stand for another rank from now on; groups that were made are forgotten."""
    global _spec
    spec = world()
    assert spec.source == SOURCE
    if global_rank == spec.global_rank:
        return
    for forget in _forgetters:
        forget()
    dist.destroy_process_group()
    _spec = replace(spec, global_rank=global_rank, local_rank=global_rank % spec.local_world_size)
    join_fake_world(_spec)


def simulation_level() -> int | None:
    """Return the level of the dry run that this process is, 0 to 3; None in a real job."""
    return read_level(os.environ) if world().source == SOURCE else None


def device() -> torch.device:
    """Return the device of this rank: its CUDA or Ascend device, else the CPU; before `init()` the CPU.

    Parameters of `no_init_parameters` are made there; `network.to(device())` and `batch.to(device())` bring the rest.
    """
    if _device is None and dist.is_initialized():
        return device_of_group()
    return _device or CPU


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
