"""The user's terminal. With --interactive it, or standard input, belongs to one rank while that runs: a terminal in raw
mode, every key goes to the rank, whose own terminal makes SIGINT of Ctrl-C; Ctrl-] three times within a second, as for
`machinectl`, is the way out. A thread reads, as a file cannot be waited for, and sends at most WINDOW_BYTES ahead of
the rank. With --join=False the terminal goes back to the shell, and the launcher goes on in the background.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import shlex
import signal
import stat
import termios
import threading
import time
import tty
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from msrun import contract
from msrun.agent.logs.own_file import create_own_file
from msrun.agent.observer import Observer
from msrun.agent.signals import stop_this_process
from msrun.cluster.own_thread import Inbox, OwnThread
from msrun.errors import Interrupted, UsageError
from msrun.launch import output
from msrun.launch.directory.log_directory import publish_file

STANDARD_INPUT = 0
WINDOW_BYTES = 1 << 16
WAY_OUT = 0x1D
"""Ctrl-]"""
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


class UserTerminal(Observer):
    """Gives msrun's standard input, maybe a terminal, to a rank from its start to its end; a context of the main
    thread. `say`: prints a line; `send`: takes a message for the rank's end from any thread; None: the rank is here,
    and it lies in `said`.
    """

    def __init__(
        self,
        global_rank: int,
        say: Callable[[str], None],
        send: Callable[..., None] | None = None,
        *,
        has_terminal: bool,
    ) -> None:
        self._rank = global_rank
        self._say = say
        self.said = Inbox()
        self._send = send or (lambda kind, **fields: self.said.post({"type": kind, **fields}))
        self._has_terminal = has_terminal
        self._saved: list[Any] | None = None
        """The terminal's mode, while it is another one."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ahead_bytes = 0
        """Sent, and not taken by the rank yet."""
        self._is_ending = self._has_ended_input = False
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_handler: Any = None
        self._size: os.terminal_size | None = None
        """As the rank's end knows it."""

    def __enter__(self) -> Self:
        if self._has_terminal:
            # the thread sends the size: in the handler a lock of its way may be held
            self._old_handler = signal.signal(signal.SIGWINCH, lambda *_: self._wake())
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._has_terminal:
            signal.signal(signal.SIGWINCH, self._old_handler)
        self.said.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "started" and fields["global_rank"] == self._rank:
            self._begin()
        elif kind in ("stopping", "restarting", "over") or (kind == "exited" and fields["global_rank"] == self._rank):
            self._end()

    def show(self, data: bytes) -> None:
        output.write(output.STDOUT, data)

    def taken(self, count: int) -> None:
        """So many bytes of input have reached the rank."""
        with self._lock:
            self._ahead_bytes -= count
        self._wake()

    def stop_process(self) -> None:
        """Stop as Ctrl-Z wants, with the terminal as the shell wants it."""
        is_raw = self._saved is not None
        self._restore()
        stop_this_process()
        if is_raw:
            self._make_raw()
            self._wake()

    def _begin(self) -> None:
        if self._thread is not None or self._has_ended_input:
            return
        if self._has_terminal:
            self._say(
                f"the terminal belongs to rank {self._rank}: Ctrl-C is its SIGINT; Ctrl-] three times within a second "
                "ends the job"
            )
            output.place(output.STDERR).is_idle(time.monotonic() + output.STALL_S)  # lines before this end as others do
            self._make_raw()
        self._is_ending = False
        self._thread = OwnThread("msrun-input", self._pump, self._on_fault)
        self._thread.start()

    def _end(self) -> None:
        if self._thread is not None:
            self._is_ending = True
            self._wake()
            self._thread.join()
            self._thread = None
        self._restore()

    def _make_raw(self) -> None:
        self._saved = termios.tcgetattr(STANDARD_INPUT)
        tty.setraw(STANDARD_INPUT, termios.TCSANOW)
        output.set_line_end("\r\n" if os.isatty(output.STDERR) else "\n")

    def _restore(self) -> None:
        if self._saved is not None:
            with contextlib.suppress(termios.error):  # it has been closed
                termios.tcsetattr(STANDARD_INPUT, termios.TCSANOW, self._saved)
            self._saved = None
            output.set_line_end("\n")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"!")

    def _on_fault(self, error: BaseException) -> None:
        """End the job: the user could not get out any more."""
        self._say(f"standard input cannot be read ({type(error).__name__}: {error}), so the job is ended")
        os.kill(os.getpid(), signal.SIGTERM)

    def _pump(self) -> None:
        presses: list[float] = []
        while not self._is_ending:
            with contextlib.suppress(OSError):  # its terminal is gone
                size = os.get_terminal_size(STANDARD_INPUT) if self._has_terminal else None
                if size is not None and size != self._size:
                    self._size = size
                    self._send("window", rows=size.lines, columns=size.columns)
            if not self._is_input_there():
                continue
            try:
                data = os.read(STANDARD_INPUT, WINDOW_BYTES - self._ahead_bytes)
            except OSError:  # its terminal is gone: SIGHUP says so, too
                data = b""
            if not data:
                self._has_ended_input = True
                self._send("input_end")
                return
            with self._lock:
                self._ahead_bytes += len(data)
            self._send("input", data=base64.b64encode(data).decode("ascii"))
            if self._has_terminal and find_way_out(data, presses, time.monotonic()):
                os.kill(os.getpid(), signal.SIGINT)

    def _is_input_there(self) -> bool:
        waiting = select.poll()
        waiting.register(self._wake_reader, select.POLLIN)
        if self._ahead_bytes < WINDOW_BYTES:
            waiting.register(STANDARD_INPUT, select.POLLIN)
        ready = [descriptor for descriptor, _ in waiting.poll()]
        if self._wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_reader, 4096)
        return STANDARD_INPUT in ready and not self._is_ending


def describe_unread_input() -> str:
    """Return that nobody will read what standard input holds; else nothing: an idle pipe, as of cron, is no mistake."""
    try:
        found = os.fstat(STANDARD_INPUT)
        if stat.S_ISREG(found.st_mode):
            is_there = os.lseek(STANDARD_INPUT, 0, os.SEEK_CUR) < found.st_size
        elif stat.S_ISFIFO(found.st_mode):
            waiting = select.poll()
            waiting.register(STANDARD_INPUT, select.POLLIN)
            is_there = any(events & select.POLLIN for _, events in waiting.poll(0))
        else:
            return ""
    except OSError:
        return ""
    return "standard input is not read: --interactive gives it to rank 0" if is_there else ""


def is_in_background() -> bool:
    """Return whether standard input is the terminal of this process's session, and other processes have it now."""
    try:
        return os.tcgetpgrp(STANDARD_INPUT) != os.getpgrp()
    except OSError:
        return False


_HELD = b"1"


def begin_in_background(foreground: int, job_id: str, log_dir: Path) -> None:
    """Let the command in the foreground return, as the job holds its directory; words go to `msrun.log` from here on.
    `job_id` and `log_dir`: of this host's part (UsageError: the log cannot be written; Interrupted: nobody waits any
    more).
    """
    path = log_dir / contract.LAUNCHER_LOG
    try:
        log = create_own_file(path)
        publish_file(path)
    except OSError as error:
        raise UsageError(f"--log_dir: cannot write {path} ({error.strerror}); give another directory") from None
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.write(foreground, b"\0".join((_HELD, job_id.encode(), os.fsencode(log_dir))))
    except BrokenPipeError:
        raise Interrupted("the command that was to start it in the background was ended", signal.SIGTERM) from None
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (null, log, foreground):
        os.close(descriptor)


def detach(*, quiet: bool = False) -> Callable[[str, Path], None]:
    """Return in a background process of its own session. The calling process waits until that calls what is returned,
    with the job's id and log directory, says how to look after the job and exits with 0; if it comes to nothing, with
    the status of the other.
    """
    output.close()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(writer)
        status = _wait_in_foreground(pid, reader, quiet=quiet)
        output.close()
        os._exit(status)
    os.setsid()
    os.close(reader)
    return partial(begin_in_background, writer)


def _wait_in_foreground(pid: int, reader: int, *, quiet: bool) -> int:
    try:
        held, _, job = os.read(reader, 1 << 16).partition(b"\0")
        if held == _HELD:
            if not quiet:
                job_id, _, log_dir = job.partition(b"\0")
                folder = os.fsdecode(log_dir)
                output.say_lines(
                    f"msrun: job {job_id.decode()} runs in the background as pid {pid}, logs in {folder}\n"
                    f"msrun: to look at it: msrun --status {shlex.quote(folder)}\n"
                    f"msrun: to end it: msrun --stop {shlex.quote(folder)}"
                )
            return contract.EXIT_OK
    except KeyboardInterrupt:
        os.close(reader)
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        return contract.EXIT_SIGNAL_BASE + signal.SIGINT
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        output.say_lines(
            f"msrun: error: the background launcher was ended by {signal.Signals(-code).name} before its job began"
        )
        return contract.EXIT_SIGNAL_BASE - code
    return code or contract.EXIT_CLUSTER
