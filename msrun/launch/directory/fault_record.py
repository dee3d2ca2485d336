"""Where the traceback of a fault of msrun itself is kept: at the end of the job's `scheduler.log`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from msrun import contract
from msrun.agent.logs.own_file import open_own_file
from msrun.launch.printable import printable

MAX_CHARS = 1 << 16
"""Of a traceback, which another host may have sent."""


def record_fault(folder: Path, what: str, trace: str) -> None:
    """Append a fault with its traceback; to stderr where there is no `scheduler.log` to write.

    Args:
        folder: the job's log directory.
        what: one line.
    """
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    text = printable(f"{stamp} {what}\n{trace[-MAX_CHARS:].rstrip()}\n")
    try:
        descriptor = open_own_file(folder / contract.SCHEDULER_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError:
        sys.stderr.write(text)
        return
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
