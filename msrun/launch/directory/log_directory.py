"""The job's log directory: made, checked and filled before anything starts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.logs.own_file import create_own_file, open_own_file
from msrun.agent.observer import Observer
from msrun.errors import UsageError
from msrun.launch.printable import printable
from msrun.planning.plan import LaunchPlan
from ranktable.files import replace_file

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


def prepare_log_directory(plan: LaunchPlan) -> None:
    """Create the directory (0700) and this job's empty log files (0600), and write `plan.json`.

    The caller holds its lock.

    Raises:
        UsageError: it cannot be created or written, or a file of the job is not a plain file.
    """
    folder = Path(plan.log_dir)
    try:
        folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        for path in (folder / contract.SCHEDULER_LOG, folder / contract.EVENTS_JSONL):
            os.close(create_own_file(path))
        for log in plan.log_paths:
            os.close(create_own_file(Path(log)))
        write_private(folder / contract.PLAN_JSON, json.dumps(plan.to_json(), indent=2) + "\n")
    except OSError as error:
        raise UsageError(
            f"--log_dir {plan.log_dir}: cannot write {error.filename or folder} ({error.strerror}); "
            "give a directory that you may write"
        ) from None


def describe_removed(folder: Path, before: os.stat_result) -> str:
    """Return that the log directory is another one than before, or is gone; empty when it is the same."""
    with contextlib.suppress(OSError):
        if os.path.samestat(folder.stat(), before):
            return ""
    return f"the log directory {folder} was removed while the job ran: what was written before and since is lost"


def write_private(path: Path, text: str) -> None:
    """Write a whole file of the log directory, mode 0600, in the place of whatever is there."""
    replace_file(path, text.encode("utf-8", "surrogateescape"), mode=contract.FILE_MODE)


class EventLog(Observer):
    """Writes `events.jsonl`: one JSON object per moment of the job, with wall-clock and job time in seconds."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(create_own_file(path), "w", encoding="utf-8", buffering=1)
        self.folder = path.parent.stat()
        """The folder that it is in, as it was when this was made: for `describe_removed`."""
        self._begin = time.monotonic()

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one event."""
        moment = {"time": round(time.time(), 6), "job_s": round(time.monotonic() - self._begin, 6), "event": kind}
        with contextlib.suppress(OSError):  # disk full: no reason to end the job
            self._file.write(json.dumps({**moment, **fields}) + "\n")

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()
