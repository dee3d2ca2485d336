"""Evidence of a full disk: a worker whose lines cannot be written fails, and its log cannot say why."""

from __future__ import annotations

import os
from pathlib import Path

FULL_BYTES = 1 << 16
"""With less than this free, a write of ordinary size fails."""


def explain_full_disk(path: str) -> str:
    """Return that the disk which holds a file is full, for the failure report; empty when it is not, or not known."""
    try:
        status = os.statvfs(path)
    except OSError:
        parent = Path(path).parent
        return "" if parent.exists() else f"its log directory was removed ({parent}): leave it there while the job runs"
    if not status.f_blocks:  # a file system that does not count
        return ""
    blocks = status.f_bavail if os.geteuid() else status.f_bfree  # what is kept back is for root
    is_full = blocks * status.f_frsize < FULL_BYTES or bool(status.f_files and not status.f_favail)
    return f"the disk of its log is full ({Path(path).parent}): make room, or give another --log_dir" if is_full else ""
