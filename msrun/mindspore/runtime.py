"""mindspore.runtime, and mindspore.hal before it: memory and streams of the device, as torch has them."""

from __future__ import annotations

from typing import Any

import torch

from msrun.mindspore.missing import missing_name
from msrun.mindspore.ops.table import note_once
from msrun.runtime import world

__all__ = [
    *("Event", "Stream", "StreamCtx", "current_stream", "default_stream", "dispatch_threads_num", "empty_cache"),
    *("launch_blocking", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
    *("memory_stats", "memory_summary", "reset_max_memory_allocated", "reset_max_memory_reserved"),
    *("reset_peak_memory_stats", "set_cpu_affinity", "set_cur_stream", "set_kernel_launch_group", "set_memory"),
    *("synchronize",),
]

Stream, Event = torch.Stream, torch.Event


def _of_device(name: str, otherwise: Any) -> Any:
    """Return what torch's module of this rank's device says; of the host, which keeps no account, a stand-in."""
    module = getattr(torch, world.device().type, None)
    function = getattr(module, name, None)
    return function() if function is not None and world.device().type != "cpu" else otherwise


def set_memory(
    init_size: str = "2GB",
    increase_size: str = "2GB",
    max_size: str = "1024GB",
    optimize_level: str = "O0",
    huge_page_reserve_size: str = "0GB",
) -> None:
    """Do nothing: torch's allocator takes what it needs."""
    del init_size, increase_size, max_size, optimize_level, huge_page_reserve_size
    note_once("runtime.set_memory")


def set_cpu_affinity(enable_affinity: bool, affinity_cpu_list: Any = None) -> None:
    """Do nothing: `msrun --bind_core` binds."""
    del enable_affinity, affinity_cpu_list
    note_once("runtime.set_cpu_affinity (msrun --bind_core binds)")


def launch_blocking() -> None:
    """Do nothing; CUDA_LAUNCH_BLOCKING=1 in the environment does."""
    note_once("runtime.launch_blocking")


def dispatch_threads_num(threads_num: int) -> None:
    """Do nothing: operators are started as the script calls them."""
    del threads_num
    note_once("runtime.dispatch_threads_num")


def set_kernel_launch_group(thread_num: int = 2, kernel_group_num: int = 8) -> None:
    """Do nothing: see `dispatch_threads_num`."""
    del thread_num, kernel_group_num
    note_once("runtime.set_kernel_launch_group")


def synchronize() -> None:
    """Wait until the device has computed what it was given."""
    _of_device("synchronize", None)


def empty_cache() -> None:
    """Give unused memory back to the device."""
    _of_device("empty_cache", None)


def memory_allocated() -> int:
    """Return the bytes of tensors on the device; 0 on the host."""
    return _of_device("memory_allocated", 0)


def memory_reserved() -> int:
    """Return the bytes that torch holds on the device; 0 on the host."""
    return _of_device("memory_reserved", 0)


def max_memory_allocated() -> int:
    """Return the most bytes of tensors on the device at once; 0 on the host."""
    return _of_device("max_memory_allocated", 0)


def max_memory_reserved() -> int:
    """Return the most bytes that torch held on the device; 0 on the host."""
    return _of_device("max_memory_reserved", 0)


def memory_stats() -> dict[str, Any]:
    """Return torch's account of the device's memory; empty on the host."""
    return dict(_of_device("memory_stats", {}))


def memory_summary() -> str:
    """Return torch's account as a table."""
    return _of_device("memory_summary", "")


def reset_peak_memory_stats() -> None:
    """Begin the maxima anew."""
    _of_device("reset_peak_memory_stats", None)


reset_max_memory_allocated = reset_max_memory_reserved = reset_peak_memory_stats


def current_stream() -> Any:
    """Return the device's stream; None on the host."""
    return _of_device("current_stream", None)


def default_stream() -> Any:
    """Return the device's first stream; None on the host."""
    return _of_device("default_stream", None)


def set_cur_stream(stream: Any) -> None:
    """Let the device compute in a stream."""
    if world.device().type != "cpu":
        getattr(torch, world.device().type).set_stream(stream)


def StreamCtx(stream: Any) -> Any:  # noqa: N802 - MindSpore's name
    """Return a context in which the device computes in a stream."""
    return getattr(torch, world.device().type).stream(stream)


def __getattr__(name: str) -> Any:
    raise missing_name("runtime", name, __all__)
