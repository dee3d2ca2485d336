"""Which backend carries a rank's messages, and which device is its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.joining.spec import WorldSpec

CPU = torch.device("cpu")
_DEVICE_OF_BACKEND = {"nccl": "cuda", "hccl": "npu"}
_REMEDY = "or give --device_target cpu"


def choose_backend(environ: Mapping[str, str], world_size: int) -> str:
    """Return the backend of a job that names none: those of its accelerator, else of the CPU."""
    target = environ.get(contract.MSRUN_DEVICE_TARGET)
    if target == "ascend":
        _import_torch_npu()
        return "cpu:gloo,npu:hccl"
    if target != "cpu" and torch.cuda.is_available():
        return "cpu:gloo,cuda:nccl"
    if target not in ("cpu", "gpu") and hasattr(torch, "npu") and torch.npu.is_available():
        return "cpu:gloo,npu:hccl"
    return environ.get(contract.MSRUN_CPU_BACKEND) or ("shm" if world_size > 1 else "gloo")


def _import_torch_npu() -> None:
    """Let torch know Ascend's devices, also where the script has not imported torch_npu."""
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise WorldError(
            f"--device_target ascend needs torch_npu, and it cannot be imported ({error}): install the torch_npu of "
            f"torch {torch.__version__.partition('+')[0]}, {_REMEDY}"
        ) from None


def check_backend(backend: str) -> None:
    """Refuse backends that torch would take in one another's place."""
    pairs = [part.rpartition(":") for part in backend.split(",")]
    if len(pairs) > 1 and any(name == "shm" for _, _, name in pairs):
        raise WorldError(f"init({backend!r}): shm carries tensors of the CPU alone; give cpu:gloo beside other devices")


def kind_of(backend: str) -> str:
    """Return what torch calls the devices of a backend such as `cpu:gloo,cuda:nccl`: its accelerator's, else `cpu`."""
    kinds = []
    for part in backend.lower().split(","):
        kind, _, name = part.rpartition(":")
        kinds.append(kind or _DEVICE_OF_BACKEND.get(name, "cpu"))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def use_device(spec: WorldSpec, backend: str) -> torch.device:
    """Make this rank's device torch's current one, and return it: what names no device goes there."""
    kind = kind_of(backend)
    if kind == "cpu":
        return CPU
    if kind == "npu" and not hasattr(torch, "npu"):
        _import_torch_npu()
    devices, index = torch.get_device_module(kind), int(os.environ.get(contract.DEVICE_ID, spec.local_rank))
    count = devices.device_count()
    if index >= count:
        raise WorldError(
            f"rank {spec.global_rank} is to use {kind} device {index}, and this host has {count}: start at most one "
            f"worker for each device, {_REMEDY}"
        )
    devices.set_device(index)
    return torch.device(kind, index)


def device_of_group() -> torch.device:
    """Return the device of a rank whose script has made torch's default group itself: the current one of its kind."""
    names = {part.rpartition(":")[2] for part in dist.get_backend_config().split(",")}
    kind = next((kind for name, kind in _DEVICE_OF_BACKEND.items() if name in names), "cpu")
    return CPU if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
