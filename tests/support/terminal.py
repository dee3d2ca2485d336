"""A job on a pseudo-terminal that the test holds the other end of."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

DEADLINE_S = 30.0


class Terminal:
    """A job on a pseudo-terminal that it leads, as a shell's foreground job does."""

    def __init__(self, msrun, cwd, *words, env=None):
        self._master, slave = pty.openpty()
        self.text = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "msrun", *words],
            cwd=cwd,
            env=msrun.environ({"TERM": "xterm", "COLUMNS": "120", **(env or {})}),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: make_controlling(slave),
        )
        os.close(slave)

    def read_until(self, words, count=1):
        """Read until these words have appeared so often, or to the end of the terminal."""
        end = time.monotonic() + DEADLINE_S
        while words is None or self.text.count(words) < count:
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

    @property
    def is_raw(self):
        """Whether keys are passed on as they are."""
        return not termios.tcgetattr(self._master)[3] & (termios.ICANON | termios.ISIG | termios.ECHO)

    def resize(self, rows, columns):
        """Change its size, as who pulls at its window does."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def finish(self):
        """Read to the end and return the exit status of the job."""
        self.read_until(None)
        return self.process.wait(DEADLINE_S)

    def type(self, data):
        """Press these keys."""
        os.write(self._master, data)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)

    def hang_up(self):
        """Close the terminal, as closing its window does."""
        os.close(self._master)


def make_controlling(descriptor):
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
