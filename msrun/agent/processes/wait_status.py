"""Wait statuses in words and as exit codes."""

from __future__ import annotations

import os
import signal

from msrun import contract


def signal_name(signum: int) -> str:
    """Return "SIGKILL" for 9; a number without a name stays "signal 40"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_status(wait_status: int) -> str:
    """Return how a process ended, from waitpid's status: "exit code 3" or "signal SIGKILL"."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    return name if name.startswith("signal") else f"signal {name}"


def exit_code_of(wait_status: int) -> int:
    """Return the code that msrun exits with for this worker: its own, or 128 + signal."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else contract.EXIT_SIGNAL_BASE - code
