"""The user's terminal: with --interactive a rank's own while that runs, see `agent.processes.terminal`; with
--join=False it goes back to the shell, and the launcher goes on in the background.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import stat
import termios
import time
import tty
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.observer import Observer
from msrun.agent.own_file import create_own_file
from msrun.agent.signals import stop_this_process
from msrun.errors import Interrupted, refused_as
from msrun.launch import output
from msrun.launch.directory.log_directory import publish_file

STANDARD_INPUT = 0


class UserTerminal(Observer):
    """The user's terminal, which is a rank's own from its start to its end."""

    def __init__(self, global_rank: int, say: Callable[[str], None]) -> None:
        """`say`: prints a line. `give_back` it in the end."""
        self._rank, self._say = global_rank, say
        self._saved: list[Any] | None = None  # the terminal's mode, while it is another one

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind in ("stopping", "restarting", "over") or (kind == "exited" and fields["global_rank"] == self._rank):
            self.give_back()

    def take(self) -> None:
        self._say(
            f"the terminal belongs to rank {self._rank}: Ctrl-C is its SIGINT; Ctrl-] three times within a second "
            "ends the job"
        )
        output.place(output.STDERR).is_idle(time.monotonic() + output.STALL_S)  # lines before this end as others do
        self._make_raw()

    def show(self, data: bytes) -> None:
        output.write(output.STDOUT, data)

    def give_back(self) -> None:
        if self._saved is not None:
            with contextlib.suppress(termios.error):  # it has been closed
                termios.tcsetattr(STANDARD_INPUT, termios.TCSANOW, self._saved)
            self._saved = None
            output.set_line_end("\n")

    def stop_process(self) -> None:
        """Stop as Ctrl-Z wants, with the terminal as the shell wants it."""
        is_raw = self._saved is not None
        self.give_back()
        stop_this_process()
        if is_raw:
            self._make_raw()

    def _make_raw(self) -> None:
        self._saved = termios.tcgetattr(STANDARD_INPUT)
        tty.setraw(STANDARD_INPUT, termios.TCSANOW)
        output.set_line_end("\r\n" if os.isatty(output.STDERR) else "\n")


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
    """Let the command in the foreground return; words go to `msrun.log` from here on (UsageError, Interrupted)."""
    path = log_dir / contract.LAUNCHER_LOG
    with refused_as(f"--log_dir: cannot write {path}", "give another directory"):
        log = create_own_file(path)
        publish_file(path)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.write(foreground, b"\0".join((_HELD, job_id.encode(), os.fsencode(log_dir))))
    except BrokenPipeError:
        raise Interrupted("the command that was to start it in the background was ended", signal.SIGTERM) from None
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (null, log, foreground):
        os.close(descriptor)


def detach(*, quiet: bool) -> Callable[[str, Path], None]:
    """Return in a background process of its own session. The calling process waits until that calls what is returned,
    with the job's id and log directory, says how to look after the job and exits with 0; if it comes to nothing, with
    the status of the other."""
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
