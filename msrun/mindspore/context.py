"""Settings of a process, in MindSpore's words: set_context, and the context of parallel training."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from msrun import contract
from msrun.errors import UsageError
from msrun.mindspore.ops.table import note_once, refuse_unknown
from msrun.runtime import world
from msrun.runtime.parallel.context import ParallelMode, get_auto_parallel_context, reset_auto_parallel_context
from msrun.runtime.parallel.context import set_auto_parallel_context as _set_auto_parallel_context
from msrun.server.parameters import get_ps_context, reset_ps_context, set_ps_context

__all__ = [
    "COMPATIBLE", "GRAPH_MODE", "LAX", "PYNATIVE_MODE", "STRICT", "ParallelMode", "get_auto_parallel_context",
    "get_context", "get_current_device", "get_ps_context", "reset_auto_parallel_context", "reset_ps_context",
    "set_auto_parallel_context", "set_context", "set_deterministic", "set_device", "set_offload_context",
    "set_ps_context",
]  # fmt: skip

GRAPH_MODE = 0
PYNATIVE_MODE = 1
TARGETS = {"Ascend": "npu", "GPU": "cuda", "CPU": "cpu"}
"""MindSpore's name of a device -> torch's."""
_NAMES = {kind: target for target, kind in TARGETS.items()}
_DEFAULTS: dict[str, Any] = {"mode": PYNATIVE_MODE, "device_target": None, "device_id": None}
STRICT, COMPATIBLE, LAX = 0, 1, 2
"""MindSpore's levels of syntax in graph mode; all of Python runs here."""
_OF_THE_COMPILER: dict[str, Any] = {
    "save_graphs": 0, "save_graphs_path": ".", "enable_graph_kernel": False, "graph_kernel_flags": "",
    "max_call_depth": 1000, "reserve_class_name_in_scope": False, "max_device_memory": "1024GB", "jit_config": {},
    "variable_memory_max_size": "30GB", "enable_dump": False, "save_dump_path": ".", "print_file_path": "",
    "enable_profiling": False, "profiling_options": "training_trace", "enable_reduce_precision": True,
    "enable_compile_cache": False, "compile_cache_path": ".", "runtime_num_threads": 30, "ascend_config": {},
    "disable_format_transform": False, "support_binary": False, "memory_optimize_level": "O0", "gpu_config": {},
    "memory_offload": "OFF", "aoe_tune_mode": "", "aoe_config": {}, "op_timeout": 900,
    "mempool_block_size": "1GB", "inter_op_parallel_num": 0, "check_bprop": False, "env_config_path": "",
    "pynative_synchronize": False, "debug_level": 0, "jit_level": "O0", "jit_syntax_level": LAX,
    "precompile_only": False, "exec_order": "", "enable_sparse": False, "auto_tune_mode": "NO_TUNE",
    "grad_for_scalar": False, "enable_loop_sink": True, "enable_mem_reuse": True,
    "enable_auto_mixed_precision": False, "enable_task_sink": True, "save_ms_model": False,
    "save_ms_model_path": ".", "enable_gpu_summary": True, "enable_cache": False, "backend_policy": "ms",
    "jit_enable_inplace_ops": True, "device_info": "", "recompute_comm_overlap": "", "deterministic": "OFF",
}  # fmt: skip
"""Words of MindSpore's compiler, memory and dumps -> what they are unless set; they change nothing here."""
_PARALLEL_TUNING = ("all_reduce_fusion_config", "allreduce_fusion_config", "enable_alltoall", "communi_parallel_mode")
_chosen: dict[str, Any] = {}
_log = logging.getLogger("msrun.runtime")


def set_context(**words: Any) -> None:
    """Say where this process computes. Called before `init()`.

    Args:
        words: words of MindSpore's compiler and memory are taken with a note, and change nothing; `deterministic` "ON"
            lets torch choose deterministic kernels. `mode`, GRAPH_MODE or PYNATIVE_MODE: both run alike, because
            AutoParallel captures what it needs.
            `device_target`, "Ascend", "GPU" or "CPU": where this host has no such device, a warning says which one is
            taken. `device_id`: index of this process's device on its host; under a launcher it is the one assigned.

    Raises:
        UsageError: an unknown word, a value out of its range, or another device than the one assigned.
    """
    acting = f"; those that act here are deterministic, {', '.join(_DEFAULTS)}"
    refuse_unknown("set_context", words, _DEFAULTS | _OF_THE_COMPILER, acting)
    for word in words:
        if word == "deterministic":
            set_deterministic(words[word] == "ON")
        elif word in _OF_THE_COMPILER:
            note_once(f"set_context({word}=...)")
    if words.get("mode", PYNATIVE_MODE) not in (GRAPH_MODE, PYNATIVE_MODE):
        raise UsageError(f"set_context(mode={words['mode']!r}): GRAPH_MODE or PYNATIVE_MODE")
    if "device_target" in words:
        _choose_target(words["device_target"])
    if "device_id" in words:
        _choose_device(words["device_id"])
    _chosen.update(words)


def get_context(attr_key: str) -> Any:
    """Return what was set for a word, or what is done when nothing was.

    Raises:
        UsageError: an unknown word.
    """
    known = _DEFAULTS | _OF_THE_COMPILER | _chosen
    refuse_unknown("get_context", [attr_key], known)
    if attr_key not in ("device_target", "device_id") or attr_key in _chosen:
        return known[attr_key]
    device = world.device()
    return device.index or 0 if attr_key == "device_id" else _NAMES[device.type]


def set_device(device_target: str, device_id: int | None = None) -> None:
    """Say where this process computes; see `set_context`."""
    set_context(device_target=device_target, **({} if device_id is None else {"device_id": device_id}))


def get_current_device() -> str:
    """Return "Ascend:0", "GPU:0" or "CPU:0"."""
    return f"{get_context('device_target')}:{get_context('device_id')}"


def set_deterministic(deterministic: bool) -> None:
    """Let torch choose deterministic kernels, or fail where there is none."""
    torch.use_deterministic_algorithms(deterministic)


def set_auto_parallel_context(**words: Any) -> None:
    """Set how to run in parallel; see `msrun.runtime.set_auto_parallel_context`. Words of tuning are noted."""
    for word in [word for word in words if word in _PARALLEL_TUNING]:
        note_once(f"set_auto_parallel_context({word}=...)")
        del words[word]
    _set_auto_parallel_context(**words)


def set_offload_context(offload_config: dict[str, Any]) -> None:
    """Do nothing: `optimizer.target = "CPU"` and `nn.EmbeddingLookup(target="CPU")` keep tensors on the host."""
    note_once(f"set_offload_context({', '.join(offload_config)})")


def _choose_target(target: Any) -> None:
    if target not in TARGETS:
        raise UsageError(f"set_context(device_target={target!r}): one of {', '.join(TARGETS)}")
    kind = TARGETS[target]
    is_here = hasattr(torch, kind) and getattr(torch, kind).is_available()
    found = world.device().type if world.is_initialized() else kind if is_here else "cpu"
    if found != kind:
        _log.warning(f"set_context(device_target={target!r}): not here, this process computes on {found}")
    if not world.is_initialized():
        os.environ.setdefault(contract.MSRUN_DEVICE_TARGET, {"cuda": "gpu", "npu": "ascend", "cpu": "cpu"}[found])


def _choose_device(index: Any) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UsageError(f"set_context(device_id={index!r}): a whole number, 0 or more")
    if world.is_initialized() or contract.DEVICE_ID in os.environ:
        assigned = int(os.environ.get(contract.DEVICE_ID, world.get_local_rank()))
        if index != assigned and world.get_group_size() > 1:
            raise UsageError(
                f"set_context(device_id={index}): this process was assigned device {assigned}; leave the word out, or "
                "give int(os.environ['DEVICE_ID'])"
            )
    else:
        os.environ[contract.DEVICE_ID] = str(index)
