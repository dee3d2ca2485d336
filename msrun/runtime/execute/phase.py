"""Whether a step runs to be verified, and how: asked wherever such a step must count as none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor


class Probe(Protocol):
    """Who looks at the gradients of a step function instead of letting it train."""

    def meet(
        self,
        function: Callable[..., Any],
        differentiate: Callable[..., tuple[Any, Any]],
        positions: Sequence[int],
        weights: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
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
