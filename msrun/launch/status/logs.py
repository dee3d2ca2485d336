"""`msrun logs`: what the workers of a job have written, and what they write from now on."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msrun import contract
from msrun.errors import UsageError
from msrun.launch.directory.worker_log import GrowingFile
from msrun.launch.log_tail import LineCutter
from msrun.launch.printable import printable_bytes
from msrun.launch.status.job_status import read_status
from msrun.planning.ranks import name_ranks
from msrun.planning.spec import parse_tail

COMMAND = "msrun logs"
LOOK_S = 0.2
TAIL_BYTES = 1 << 16
"""In which the last lines of a log are looked for."""
READ_BYTES = 1 << 20


def show_logs(log_dir: Path, ranks: str, *, lines: int, follows: bool) -> int:
    """Print the last lines of workers' logs, and with `follows` what comes until the job has ended.

    With several ranks each line begins with its rank.

    Args:
        ranks: as for --tail_worker_log.

    Returns:
        What `--status` exits with.

    Raises:
        UsageError: no directory of a job, or a rank that the job does not have.
    """
    status = read_status(log_dir, COMMAND)
    log_dir = status.log_dir
    names = {
        row.global_rank: row.log_name or contract.worker_log_name("worker", row.global_rank) for row in status.rows
    }
    wanted = parse_tail(ranks, max(names, default=-1) + 1, "--ranks")
    if missing := [rank for rank in wanted if rank not in names]:
        raise UsageError(f"--ranks {ranks}: the job has no {name_ranks(missing)}; it has {name_ranks(sorted(names))}")
    logs = []
    for rank in wanted:
        head = f"[{rank}] " if len(wanted) > 1 else ""
        apart = log_dir / contract.error_log_name(names[rank])
        logs += [_Log(str(log_dir / names[rank]), head), *([_Log(str(apart), head)] if apart.exists() else [])]
    try:
        for log in logs:
            log.begin(lines)
        while follows and not status.is_over:
            time.sleep(LOOK_S)
            for log in logs:
                log.follow()
            status = read_status(log_dir, COMMAND)
        for log in logs:
            log.follow(at_end=True)
    finally:
        for log in logs:
            log.close()
    return status.status_code


class _Log:
    """One worker's log: also the next file of its name, of another attempt or after a rotation."""

    def __init__(self, path: str, head: str) -> None:
        self._path = path
        self._head = head.encode()
        self._file = GrowingFile(path)
        self._cutter = LineCutter()

    def begin(self, lines: int) -> None:
        """Print the last lines that are there."""
        is_cut = self._file.skip_to_last(TAIL_BYTES)
        self._print(self._cutter.feed(self._file.read(TAIL_BYTES))[is_cut:][-lines:] if lines else [])

    def follow(self, *, at_end: bool = False) -> None:
        """Print what has come since."""
        while True:
            while data := self._file.read(READ_BYTES):
                self._print(self._cutter.feed(data))
            if not self._file.is_renamed() or not Path(self._path).exists():
                break
            self._file.close()  # and open what has the name now
        if at_end:
            self._print(self._cutter.end())

    def _print(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            sys.stdout.buffer.write(self._head + printable_bytes(piece, keep_colours=True))
        sys.stdout.flush()

    def close(self) -> None:
        self._file.close()
