"""Where AutoParallel meets its verification: the method, and the look at MSRUN_VERIFY in every call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from msrun import contract

if TYPE_CHECKING:
    from msrun.runtime.parallel.auto_parallel import AutoParallel
    from msrun.runtime.parallel.verification.report import VerificationReport

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


def verify(
    self: AutoParallel, *batch: Any, raises: bool = True, tolerance: float | None = None, **kwargs: Any
) -> VerificationReport:
    """Run one training step in parallel, and again as one process would, and compare loss, gradients and buffers.

    All ranks call it together, with what they would pass to the network or the step function. It leaves no trace:
    nothing is trained, and parameters, gradients, buffers and random streams are as before; a first call places the
    parameters. Every rank needs the memory of the whole network and of its step on the global batch.

    Args:
        raises: raise when a difference is above its tolerance; else only the report says so.
        tolerance: largest difference allowed, relative to the largest element of each value; None: one for each type
            (`verification/distance.py`).

    Returns:
        The largest difference of every value; `print` shows it as a table.

    Raises:
        VerificationError: a value differs; the same on every rank.
        UnverifiableError: this network has no step of one process to compare with.
    """
    from msrun.runtime.parallel.verification.verify import verify_step

    return verify_step(self, batch, kwargs, raises=raises, tolerance=tolerance)


def verify_first_step(parallel: AutoParallel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """With MSRUN_VERIFY=1, verify the first training step of an AutoParallel, once; rank 0 logs the report.

    Raises:
        VerificationError: the step differs from that of one process.
    """
    if os.environ.get(contract.MSRUN_VERIFY, "0") not in ("", "0"):
        from msrun.runtime.parallel.verification.verify import verify_once

        verify_once(parallel, args, kwargs)
