"""The standard input of one rank, of --interactive, seen from the agent: a pseudo-terminal of its own, or a pipe.

A terminal is the rank's stdin, stdout and stderr, and controls its session; what it writes goes to the user, and
into its log, where a line ends with \\n alone. Each start gets a new one: the end of a session hangs the old one up.
What the user's end says, as messages: input {data in base64}, input_end {}, window {rows, columns}.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import selectors
import struct
import termios
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from msrun.agent.logs.log_file import LogFile
from msrun.agent.processes.server_handle import ProcessSpec
from msrun.cluster.own_thread import Inbox

TERMINAL_SAYS = frozenset({"input", "input_end", "window"})  # the types of messages from the user's end
READ_BYTES = 1 << 16
STANDARD_INPUT = 0


class UserEnd(Protocol):
    """Whoever is at the other side of the rank's terminal or pipe."""

    said: Inbox  # what it says

    def show(self, data: bytes) -> None:
        """The rank has written this to its terminal."""

    def taken(self, count: int) -> None:
        """So many bytes of input are no longer waiting here."""


class RankTerminal:
    """Terminal or standard input of one rank. Owned by the agent's event loop; `close` it in the end."""

    def __init__(
        self,
        global_rank: int,
        log_path: str,
        user: UserEnd | None,
        *,
        has_terminal: bool,
        on_lost: Callable[[int, str, int], None] = lambda _rank, _reason, _count: None,
    ) -> None:
        """`user`: None = the rank reads this process's own standard input. `has_terminal`: whether the user has one;
        else the rank gets a pipe, and writes to its log as others do. `on_lost`: told when the log is not complete:
        rank, reason, bytes."""
        self.global_rank, self._user, self._has_terminal, self._on_lost = global_rank, user, has_terminal, on_lost
        self._log_path = log_path
        self._selector: selectors.BaseSelector | None = None
        self._slave = -1
        self._sink = -1  # what input is written to: the master of the terminal, or a pipe
        self._held = b""  # the end of what was written: a \r that may belong to a \n
        self._log: LogFile | None = None
        self._unsent = bytearray()
        self._window = (0, 0)
        self._has_ended_input = False
        self.stdin_fd = -1  # what is to be stdin of the rank at each of its starts; -1 = its terminal is
        if user is None:
            self.stdin_fd = STANDARD_INPUT
        elif not has_terminal:
            self.stdin_fd, self._sink = os.pipe()
            os.set_blocking(self._sink, False)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Be called by the loop of this selector: the data of each key is what to call."""
        self._selector = selector
        if self._user is not None:
            selector.register(self._user.said, selectors.EVENT_READ, self._on_said)

    def given_to(self, specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
        """Return the processes that are to be started, the rank with its terminal or input. Raises OSError: no terminal
        can be made."""
        more = {"terminal": self._open()} if self._has_terminal else {"has_stdin": True}
        return [replace(spec, **more) if spec.process_id == self.global_rank else spec for spec in specs]

    def end_attempt(self) -> None:
        """The rank has ended: take what it has written last."""
        if self._slave < 0:
            return
        os.close(self._slave)
        self._slave = -1
        while self._copy():
            pass
        self._close_terminal()

    def close(self) -> None:
        self.end_attempt()
        self._close_sink()
        if self.stdin_fd > STANDARD_INPUT:
            os.close(self.stdin_fd)
            self.stdin_fd = -1

    # -- input --------------------------------------------------------------------------------------------------------

    def _on_said(self) -> None:
        for message in self._user.said.take() if self._user else ():
            match message:
                case {"type": "input", "data": data}:
                    self._unsent += base64.b64decode(data)
                case {"type": "window", "rows": rows, "columns": columns}:
                    self._window = (int(rows), int(columns))
                    self._resize()
                case {"type": "input_end"} if not self._has_terminal:
                    self._has_ended_input = True
        self._feed()

    def _feed(self) -> None:
        while self._unsent and self._sink >= 0:
            try:
                count = os.write(self._sink, self._unsent)
            except BlockingIOError:
                break
            except OSError:  # its terminal is gone
                count = len(self._unsent)
            self._note_taken(count)
        if self._sink < 0 and self._has_terminal:  # the rank has ended: what is typed now is for nobody
            self._note_taken(len(self._unsent))
        if self._has_ended_input and not self._unsent:
            self._close_sink()
        else:
            self._watch_sink()

    def _note_taken(self, count: int) -> None:
        del self._unsent[:count]
        if self._user is not None and count:
            self._user.taken(count)

    def _watch_sink(self) -> None:
        if self._sink >= 0 and self._selector is not None:
            events = selectors.EVENT_READ if self._has_terminal else 0
            events |= selectors.EVENT_WRITE if self._unsent else 0
            self._leave_sink()
            if events:
                self._selector.register(self._sink, events, self._on_sink)

    def _leave_sink(self) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._sink)

    def _on_sink(self) -> None:
        if self._has_terminal:
            self._copy()
        self._feed()

    def _close_sink(self) -> None:
        if self._sink >= 0:
            self._leave_sink()
            os.close(self._sink)
            self._sink = -1

    # -- the terminal -------------------------------------------------------------------------------------------------

    def _open(self) -> str:
        self.end_attempt()
        self._log = LogFile(self._log_path)
        self._sink, self._slave = os.openpty()
        os.set_blocking(self._sink, False)
        self._resize()
        self._feed()
        return os.ttyname(self._slave)

    def _resize(self) -> None:
        if self._sink >= 0 and any(self._window):
            fcntl.ioctl(self._sink, termios.TIOCSWINSZ, struct.pack("HHHH", *self._window, 0, 0))

    def _copy(self) -> bool:
        """Copy a piece of what the rank has written; False when there is none."""
        try:
            data = os.read(self._sink, READ_BYTES)
        except OSError:  # nothing is there now, or never will be
            return False
        if data and self._user is not None:
            self._user.show(data)
        self._keep(data)
        return bool(data)

    def _keep(self, data: bytes) -> None:
        data = self._held + data
        self._held = b"\r" if data.endswith(b"\r") else b""
        if self._log is not None:
            self._log.write(data[: len(data) - len(self._held)].replace(b"\r\n", b"\n"))

    def _close_terminal(self) -> None:
        self._close_sink()
        self._note_taken(len(self._unsent))
        if self._log is not None:
            self._log.write(self._held)
            self._held = b""
            self._log.close()
            if self._log.fault:
                self._on_lost(self.global_rank, self._log.fault, self._log.lost_bytes)
            self._log = None
