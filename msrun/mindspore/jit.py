"""jit: MindSpore's mark of functions to compile. Here AutoParallel captures what it is given, with or without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msrun.errors import UsageError


def jit(fn: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Return the function as it is; `@jit` and `@jit(...)` both work.

    Raises:
        UsageError: not a function.
    """
    del settings
    if fn is None:
        return lambda function: jit(function)
    if not callable(fn):
        raise UsageError(f"jit({fn!r}): decorate a function with it")
    return fn


ms_function = jit
