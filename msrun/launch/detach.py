"""--join=False: the launcher goes on in the background with all its guarantees, and the shell gets its prompt back."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

from msrun import contract
from msrun.agent.logs.own_file import create_own_file
from msrun.errors import Interrupted, UsageError
from msrun.launch import output
from msrun.launch.directory.jobs import publish_file

_HELD = b"1"


class Background:
    """The background launcher's side of a detached start."""

    def __init__(self, foreground: int) -> None:
        self._foreground = foreground

    def begin(self, job_id: str, log_dir: Path) -> None:
        """Let the command in the foreground return: the job holds its directory. From here on words go to `msrun.log`.

        Args:
            job_id: of the job, which the scheduler of several hosts gives.
            log_dir: of this host's part of it.

        Raises:
            UsageError: the log cannot be written.
            Interrupted: nobody waits any more for the job's id.
        """
        path = log_dir / contract.LAUNCHER_LOG
        try:
            log = create_own_file(path)
            publish_file(path)
        except OSError as error:
            raise UsageError(f"--log_dir: cannot write {path} ({error.strerror}); give another directory") from None
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.write(self._foreground, b"\0".join((_HELD, job_id.encode(), os.fsencode(log_dir))))
        except BrokenPipeError:
            raise Interrupted("the command that was to start it in the background was ended", signal.SIGTERM) from None
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        for descriptor in (null, log, self._foreground):
            os.close(descriptor)


def detach(*, quiet: bool = False) -> Background:
    """Return in a background process of its own session, which supervises its job as in the foreground.

    The calling process waits until the other holds the log directory (see `Background.begin`), says how to look after
    the job and exits with 0; or, when it comes to nothing, exits with the status of the other, which has told why.
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
    return Background(writer)


def _wait_in_foreground(pid: int, reader: int, *, quiet: bool) -> int:
    """Return the exit status of the command that was typed."""
    try:
        held, _, job = os.read(reader, 1 << 16).partition(b"\0")
        if held == _HELD:
            if not quiet:
                job_id, _, log_dir = job.partition(b"\0")
                output.say_lines(_instructions(pid, job_id.decode(), Path(os.fsdecode(log_dir))))
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


def _instructions(pid: int, job_id: str, log_dir: Path) -> str:
    """Return what somebody needs to know who has just started a job in the background."""
    directory = shlex.quote(str(log_dir))
    return (
        f"msrun: job {job_id} runs in the background as pid {pid}, logs in {log_dir}\n"
        f"msrun: to look at it: msrun --status {directory}\n"
        f"msrun: to end it: msrun --stop {directory}"
    )
