"""A job on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from job_runner import JobRunner

DEADLINE_S = 30.0


class Terminal:
    """A job on a pseudo-terminal that it leads, as a shell's foreground job does."""

    def __init__(self, msrun: JobRunner, cwd: Path, *words: str) -> None:
        self._master, slave = pty.openpty()
        self.text = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "msrun", *words],
            cwd=cwd,
            env=msrun.environ({"TERM": "xterm", "COLUMNS": "120"}),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: make_controlling(slave),
        )
        os.close(slave)

    def read_until(self, words: bytes | None) -> None:
        """Read until these words have appeared, or to the end of the terminal."""
        end = time.monotonic() + DEADLINE_S
        while words is None or words not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    data = os.read(self._master, 4096)
                except OSError:  # every process has closed the terminal
                    data = b""
                if not data:
                    assert words is None, self.text
                    return
                self.text += data

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)

    def hang_up(self) -> None:
        """Close the terminal, as closing its window does."""
        os.close(self._master)


def make_controlling(descriptor: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
