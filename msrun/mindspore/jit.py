"""jit: MindSpore's mark of functions to compile. Here AutoParallel captures what it is given, with or without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msrun.errors import UsageError, near_miss

__all__ = [
    "JitConfig", "constexpr", "jit", "jit_class", "lazy_inline", "ms_class", "ms_function", "ms_memory_recycle",
    "mutable", "no_inline",
]  # fmt: skip
_WORDS = (
    *("mode", "input_signature", "hash_args", "jit_config", "compile_once", "capture_mode", "jit_level", "dynamic"),
    *("fullgraph", "backend", "options", "infer_boost", "exc_mode", "jit_syntax_level", "debug_level"),
)


def jit(fn: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Return the function as it is; `@jit` and `@jit(...)` both work.

    Raises:
        UsageError: not a function, or an unknown setting.
    """
    for word in settings:
        if word not in _WORDS:
            raise UsageError(f"jit({word}=...): unknown word{near_miss(word, _WORDS)}")
    if fn is None:
        return lambda function: jit(function)
    if not callable(fn):
        raise UsageError(f"jit({fn!r}): decorate a function with it")
    return fn


ms_function = jit


class JitConfig:
    """Settings of MindSpore's compiler, kept for whoever reads them."""

    def __init__(
        self, jit_level: str = "", exc_mode: str = "auto", jit_syntax_level: str = "", **settings: Any
    ) -> None:
        self.jit_config_dict = {"jit_level": jit_level, "exc_mode": exc_mode, "jit_syntax_level": jit_syntax_level}
        self.jit_config_dict.update(settings)


def as_it_is(target: Any = None, **settings: Any) -> Any:
    """Return what it decorates: MindSpore's compiler alone needs the mark."""
    del settings
    return target if target is not None else lambda one: one


jit_class = ms_class = ms_memory_recycle = lazy_inline = no_inline = constexpr = as_it_is


def mutable(input_data: Any, dynamic_len: bool = False) -> Any:
    """Return the value: all values may change here."""
    del dynamic_len
    return input_data
