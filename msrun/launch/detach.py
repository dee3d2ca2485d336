"""--join=False: the launcher goes on in the background with all its guarantees, and the shell gets its prompt back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from msrun import contract
from msrun.errors import UsageError
from msrun.launch.log_directory import create_file


def detach(log_dir: Path) -> None:
    """Return in a background process of its own session; the calling process says where to look and exits with 0.

    The background launcher supervises as in the foreground; `kill PID` ends the job. Its own words go to `msrun.log`.

    Raises:
        UsageError: the log directory cannot be written.
    """
    try:
        log_dir.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        log = create_file(log_dir / contract.LAUNCHER_LOG)
    except OSError as error:
        raise UsageError(f"--log_dir {log_dir}: cannot be written ({error.strerror}); give another directory") from None
    pid = os.fork()
    if pid:
        text = f"msrun: detached as pid {pid}, logs in {log_dir}; kill {pid} ends the job"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the last word before the prompt returns
        os._exit(contract.EXIT_OK)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
