"""The standard input of one rank, of --interactive: msrun's own, or at a terminal a pseudo-terminal of the rank's own.

That is stdin, stdout and stderr of the rank, and its session's own. The user's terminal is in raw mode meanwhile: every
key goes to the rank, whose own terminal makes SIGINT of Ctrl-C; Ctrl-] three times within a second, as for
`machinectl`, is the way out. What the rank writes goes to the user as it comes, and into its log, where a line ends
with \\n alone. Each start of the rank gets a new terminal: the end of a session hangs the old one up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from msrun.agent.log_file import LogFile
from msrun.agent.processes.server_handle import ProcessSpec

PIECE_BYTES = 1 << 16  # read at a time, and the most that may be typed ahead of the rank
STANDARD_INPUT = 0
WAY_OUT = 0x1D  # Ctrl-]
WAY_OUT_PRESSES = 3
WAY_OUT_S = 1.0


def find_way_out(data: bytes, presses: list[float], now: float) -> bool:
    """Return whether keys, after `presses` of Ctrl-] before, are three within a second; `now`: monotonic seconds."""
    for key in data:
        presses[:] = [*presses, now][-WAY_OUT_PRESSES:] if key == WAY_OUT else []
        if len(presses) == WAY_OUT_PRESSES and now - presses[0] <= WAY_OUT_S:
            presses.clear()
            return True
    return False


class UserEnd(Protocol):
    """The user's terminal, on msrun's standard input."""

    def take(self) -> None:
        """From now on every key is the rank's."""

    def show(self, data: bytes) -> None:
        """The rank has written this."""


class RankTerminal:
    """Terminal or standard input of one rank. Owned by the agent's event loop; `close` it in the end."""

    def __init__(
        self,
        global_rank: int,
        log_path: str,
        user: UserEnd | None,
        *,
        on_lost: Callable[[int, str, int], None] = lambda _rank, _reason, _count: None,
    ) -> None:
        """`user`: None = the rank reads this process's stdin. `on_lost`: told rank, reason, bytes of a log's loss."""
        self.global_rank, self._user, self._on_lost = global_rank, user, on_lost
        self._log_path = log_path
        self._selector: selectors.BaseSelector | None = None
        self._master = self._slave = -1
        self._held = b""  # the end of what was written: a \r that may belong to a \n
        self._log: LogFile | None = None
        self._unsent = bytearray()
        self._presses: list[float] = []
        self.stdin_fd = -1 if user else STANDARD_INPUT  # what is to be stdin of the rank; -1 = its terminal is

    def register(self, selector: selectors.BaseSelector) -> None:
        """Be called by the loop of this selector: the data of each key is what to call."""
        self._selector = selector

    def given_to(self, specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
        """Return the processes to be started, the rank with its terminal or input (OSError: none can be made)."""
        more = {"terminal": self._open()} if self._user is not None else {"has_stdin": True}
        return [replace(spec, **more) if spec.process_id == self.global_rank else spec for spec in specs]

    def end_attempt(self) -> None:
        """The rank has ended: take what it has written last."""
        if self._slave < 0:
            return
        assert self._selector is not None
        os.close(self._slave)
        self._slave = -1
        while self._copy():
            pass
        for descriptor in (self._master, STANDARD_INPUT):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        os.close(self._master)
        self._master = -1
        self._unsent.clear()  # what was typed for nobody
        if self._log is not None:
            self._log.write(self._held)
            self._held = b""
            self._log.close()
            if self._log.fault:
                self._on_lost(self.global_rank, self._log.fault, self._log.lost_bytes)
            self._log = None

    close = end_attempt

    def _open(self) -> str:
        self.end_attempt()
        assert self._selector is not None
        assert self._user is not None
        self._log = LogFile(self._log_path)
        self._master, self._slave = os.openpty()
        os.set_blocking(self._master, False)
        self._resize()
        signal.signal(signal.SIGWINCH, lambda *_: self._resize())
        self._selector.register(self._master, selectors.EVENT_READ, self._on_master)
        self._selector.register(STANDARD_INPUT, selectors.EVENT_READ, self._on_keys)
        self._user.take()
        return os.ttyname(self._slave)

    def _resize(self) -> None:
        with contextlib.suppress(OSError):  # one of the two is gone
            size = os.get_terminal_size(STANDARD_INPUT)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))

    def _on_keys(self) -> None:
        if self._selector is None or self._master < 0:  # the rank has ended in this turn of the loop
            return
        try:
            data = os.read(STANDARD_INPUT, PIECE_BYTES)
        except OSError:  # the user's terminal is gone: SIGHUP says so, too
            data = b""
        if not data:
            self._selector.unregister(STANDARD_INPUT)
            return
        if find_way_out(data, self._presses, time.monotonic()):
            os.kill(os.getpid(), signal.SIGINT)
        self._unsent += data[: PIECE_BYTES - len(self._unsent)]
        self._feed()

    def _on_master(self) -> None:
        self._copy()
        self._feed()

    def _feed(self) -> None:
        if self._selector is None or self._master < 0:
            return
        with contextlib.suppress(OSError):  # the rank takes nothing now, or has closed its terminal
            while self._unsent:
                del self._unsent[: os.write(self._master, self._unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._master, events, self._on_master)

    def _copy(self) -> bool:
        """Copy a piece of what the rank has written; False when there is none."""
        try:
            data = os.read(self._master, PIECE_BYTES)
        except OSError:  # nothing is there now, or never will be
            return False
        if self._user is not None:
            self._user.show(data)
        data = self._held + data
        self._held = b"\r" if data.endswith(b"\r") else b""
        if self._log is not None:
            self._log.write(data[: len(data) - len(self._held)].replace(b"\r\n", b"\n"))
        return bool(data)
