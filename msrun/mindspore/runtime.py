"""mindspore.runtime, and mindspore.hal before it: memory and streams of the device, as torch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msrun.mindspore.missing import missing_names
from msrun.mindspore.ops.table import note_once, taking
from msrun.runtime import world

__all__ = [
    "Event", "Stream", "StreamCtx", "current_stream", "default_stream", "dispatch_threads_num", "empty_cache",
    "launch_blocking", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved",
    "memory_stats", "memory_summary", "reset_max_memory_allocated", "reset_max_memory_reserved",
    "reset_peak_memory_stats", "set_cpu_affinity", "set_cur_stream", "set_kernel_launch_group", "set_memory",
    "synchronize",
]  # fmt: skip
__getattr__ = missing_names("runtime", __all__)

Stream, Event = torch.Stream, torch.Event


def _of_device(name: str, otherwise: Any) -> Any:
    """Return what torch's module of this rank's device says; of the host, which keeps no account, a stand-in."""
    module = getattr(torch, world.device().type, None)
    function = getattr(module, name, None)
    return function() if function is not None and world.device().type != "cpu" else otherwise


def _noted(name: str, words: str, reason: str) -> Callable[..., None]:
    """Return a function that does nothing but say so once."""
    function = taking(words, lambda **settings: note_once(f"runtime.{name}"))
    function.__name__, function.__doc__ = name, f"Do nothing: {reason}."
    return function


_MEMORY = """
init_size='2GB' increase_size='2GB' max_size='1024GB' optimize_level='O0' huge_page_reserve_size='0GB'
"""
_AS_CALLED = "operators are started as the script calls them"
set_memory = _noted("set_memory", _MEMORY, "torch's allocator takes what it needs")
set_cpu_affinity = _noted("set_cpu_affinity", "enable_affinity affinity_cpu_list=None", "`msrun --bind_core` binds")
launch_blocking = _noted("launch_blocking", "", "CUDA_LAUNCH_BLOCKING=1 in the environment does")
dispatch_threads_num = _noted("dispatch_threads_num", "threads_num", _AS_CALLED)
set_kernel_launch_group = _noted("set_kernel_launch_group", "thread_num=2 kernel_group_num=8", _AS_CALLED)


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
