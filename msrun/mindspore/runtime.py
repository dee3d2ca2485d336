"""mindspore.runtime, and mindspore.hal before it: memory and streams of the device, as torch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msrun.mindspore.missing import missing_name
from msrun.mindspore.ops.table import note_once
from msrun.runtime import world

__all__ = [
    "Event", "Stream", "StreamCtx", "current_stream", "default_stream", "dispatch_threads_num", "empty_cache",
    "launch_blocking", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved",
    "memory_stats", "memory_summary", "reset_max_memory_allocated", "reset_max_memory_reserved",
    "reset_peak_memory_stats", "set_cpu_affinity", "set_cur_stream", "set_kernel_launch_group", "set_memory",
    "synchronize",
]  # fmt: skip

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


def _asked(name: str, words: str, otherwise: Any) -> Callable[[], Any]:
    def ask() -> Any:
        return _of_device(name, otherwise)

    ask.__name__, ask.__doc__ = name, f"{words}."
    return ask


synchronize = _asked("synchronize", "Wait until the device has computed what it was given", None)
empty_cache = _asked("empty_cache", "Give unused memory back to the device", None)
memory_allocated = _asked("memory_allocated", "Return the bytes of tensors on the device; 0 on the host", 0)
memory_reserved = _asked("memory_reserved", "Return the bytes that torch holds on the device; 0 on the host", 0)
max_memory_allocated = _asked("max_memory_allocated", "Return the most bytes of tensors at once; 0 on the host", 0)
max_memory_reserved = _asked("max_memory_reserved", "Return the most bytes that torch held; 0 on the host", 0)
memory_stats = _asked("memory_stats", "Return torch's account of the device's memory; empty on the host", {})
memory_summary = _asked("memory_summary", "Return torch's account as a table", "")
reset_peak_memory_stats = _asked("reset_peak_memory_stats", "Begin the maxima anew", None)
reset_max_memory_allocated = reset_max_memory_reserved = reset_peak_memory_stats
current_stream = _asked("current_stream", "Return the device's stream; None on the host", None)
default_stream = _asked("default_stream", "Return the device's first stream; None on the host", None)


def set_cur_stream(stream: Any) -> None:
    """Let the device compute in a stream."""
    if world.device().type != "cpu":
        getattr(torch, world.device().type).set_stream(stream)


def StreamCtx(stream: Any) -> Any:  # noqa: N802 - MindSpore's name
    """Return a context in which the device computes in a stream."""
    return getattr(torch, world.device().type).stream(stream)


def __getattr__(name: str) -> Any:
    raise missing_name("runtime", name, __all__)
