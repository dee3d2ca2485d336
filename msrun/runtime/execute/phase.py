"""Whether a step runs to be verified, and how: asked wherever such a step must count as none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Differentiation:
    """One call of a function that `value_and_grad` made."""

    function: Callable[..., Any]
    run: Callable[..., tuple[Any, Any]]
    """Runs `function` and returns its result and gradients, those of `weights` last."""
    positions: Sequence[int]
    """Of the arguments that have gradients."""
    weights: Sequence[Tensor]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Probe(Protocol):
    """Who looks at the gradients of a step function instead of letting it train."""

    def meet(self, call: Differentiation) -> None:
        """Take over; does not return."""


current_probe: ContextVar[Probe | None] = ContextVar("current_probe", default=None)
"""Set while a step function is verified."""
is_verifying: ContextVar[bool] = ContextVar("is_verifying", default=False)
"""True while steps are run for verification: they count as none."""
runs_alone: ContextVar[bool] = ContextVar("runs_alone", default=False)
"""True while a network runs as in a world of one process: in stand_alone mode, or whole, to be compared."""


@contextmanager
def running_alone() -> Iterator[None]:
    """Have nothing exchanged with other ranks."""
    token = runs_alone.set(True)
    try:
        yield
    finally:
        runs_alone.reset(token)
