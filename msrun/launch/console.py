"""What the user sees while a job runs: worker lines on stdout, msrun's own words on stderr.

On a terminal one live line shows ranks up / running / done and the newest loss; elsewhere plain lines do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from msrun.cluster.membership import Membership, WorkerState
from msrun.launch.directory.rotated_reader import RotatedReader
from msrun.launch.directory.worker_log import newest_loss
from msrun.planning.plan import LaunchPlan

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live

TAIL_TICK_S = 0.2
LIVE_TICK_S = 0.25
READ_BYTES = 1 << 20
MAX_HELD_BYTES = 1 << 20
"""A line longer than this is shown in pieces."""


def discard_output(stream: TextIO) -> None:
    """Send what is written from now on nowhere: the reader has gone. The interpreter's last flush then succeeds too."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def say(text: str, *, quiet: bool) -> None:
    """Print a line of msrun's own on stderr."""
    if not quiet:
        try:
            print(f"msrun: {text}", file=sys.stderr, flush=True)  # noqa: T201 - this module is the console
        except OSError:
            discard_output(sys.stderr)


class LogTail:
    """Follows one worker's log and gives back whole lines. A progress bar's last state counts as its line."""

    def __init__(self, global_rank: int, path: str, *, rotated: int = 0) -> None:
        """Follow `path`; `rotated` is how many older files stay of a log that is rotated, 0 when it is not."""
        self.global_rank = global_rank
        self.path = path
        self.rotated = rotated
        self._reader = RotatedReader(path, rotated) if rotated else None
        self._offset = 0
        self._held = b""

    def read_lines(self, *, at_end: bool = False) -> list[bytes]:
        """Return the lines that are complete now, without their ends; at the end also a last unfinished one."""
        lines: list[bytes] = []
        while True:
            data = self._read()
            if not data:
                break
            *whole, self._held = (self._held + data).split(b"\n")
            lines += whole
            if len(self._held) > MAX_HELD_BYTES:
                lines.append(self._held)
                self._held = b""
        if at_end and self._held:
            lines.append(self._held)
            self._held = b""
        if at_end and self._reader:
            self._reader.close()
        return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]

    def _read(self) -> bytes:
        if self._reader:
            return self._reader.read(READ_BYTES)
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123 - a plain open is half the cost, many times a second
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:
            return b""
        self._offset += len(data)
        return data


class Console:
    """Prints for one job. An Observer; owned by the agent's event loop."""

    def __init__(self, plan: LaunchPlan, *, quiet: bool) -> None:
        self._plan = plan
        self._quiet = quiet
        self._begin = time.monotonic()
        paths = {worker.global_rank: worker.log_path for worker in plan.workers}
        self._prefixes = {
            w.global_rank: f"[{host.name}:{w.global_rank}] ".encode() for host in plan.hosts for w in host.workers
        }
        rotated = plan.log_keep if plan.log_max_bytes else 0
        self._tails = [LogTail(rank, paths[rank], rotated=rotated) for rank in plan.tail_ranks if rank in paths]
        self._live: Live | None = None
        self._rich: RichConsole | None = None
        self._is_live = not quiet and sys.stderr.isatty()
        self.tick_s = TAIL_TICK_S if self._tails else LIVE_TICK_S if self._is_live else None

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Say the moments that a user wants to know."""
        if kind == "preparing":
            host = self._plan.hosts[0]
            self._say(f"{len(host.workers)} workers on {host.where}, logs in {self._plan.log_dir}")
            for note in self._plan.notes:
                self._say(note)
        elif kind == "ready" and fields["reason"] and fields["reason"] != "asked for":
            self._say(f"workers start by exec, not by fork: {fields['reason']}")
        elif kind == "running" and self._is_live:
            self._start_live()
        elif kind in ("note", "waiting"):
            self._say(str(fields["text"]))
        elif kind == "signal":
            self._say(f"signal {fields['name']} passed on to {len(fields['global_ranks'])} workers")
        elif kind == "hang":
            self._say("the job is stuck: asking every worker for its stacks")
        elif kind == "log_lost":
            lost = ", ".join(f"{count} bytes of rank {rank}" for rank, count in fields["lost_bytes"].items())
            self._say(f"logs are not complete ({fields['reason']}): lost {lost}")
        elif kind == "restarting":
            self._begin_anew(fields)
        elif kind == "stopping":
            self._stop_live()
            self._say(f"stopping all workers: {fields['reason']}")
        elif kind == "over":
            self._stop_live()

    def tick(self, membership: Membership) -> None:
        """Copy new worker lines to stdout and refresh the live line."""
        self._copy_lines(at_end=False)
        if self._live is not None:
            from rich.text import Text

            with self._terminal():
                self._live.update(Text(self._status(membership)), refresh=True)

    def finish(self, summary: str) -> None:
        """Copy what workers wrote last and print the closing line."""
        self._stop_live()
        self._copy_lines(at_end=True)
        if summary:
            self._say(f"{summary} in {time.monotonic() - self._begin:.1f} s")

    def _copy_lines(self, *, at_end: bool) -> None:
        chunks: list[bytes] = []
        for tail in self._tails:
            prefix = self._prefixes[tail.global_rank] if len(self._tails) > 1 else b""
            chunks += [prefix + line + b"\n" for line in tail.read_lines(at_end=at_end)]
        if not chunks:
            return
        if self._live is not None:
            with self._terminal():
                self._live.stop()  # the line gives way to worker output and comes back below it
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(b"".join(chunks))
            sys.stdout.buffer.flush()
        except OSError:  # `msrun ... | head` has enough, or the disk below `msrun > file` is full: the job goes on
            self._tails = []
            discard_output(sys.stdout)
        if self._live is not None:
            with self._terminal():
                self._live.start()

    def _say(self, text: str) -> None:
        say(text, quiet=self._quiet)

    def _begin_anew(self, fields: Mapping[str, Any]) -> None:
        """Show the last lines of an attempt that is over; its logs are moved away after this."""
        self._copy_lines(at_end=True)
        self._tails = [LogTail(tail.global_rank, tail.path, rotated=tail.rotated) for tail in self._tails]
        self._say(
            f"{fields['reason']}; starting all workers again in {fields['delay_s']:g} s, restart {fields['attempt']}"
        )

    def _start_live(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._rich = RichConsole(stderr=True)
        self._live = Live(
            console=self._rich, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        with self._terminal():
            self._live.start()

    def _stop_live(self) -> None:
        if self._live is not None:
            with self._terminal():
                self._live.stop()
            self._live = None

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # the terminal has been closed
            self._live = None
            discard_output(sys.stderr)

    def _status(self, membership: Membership) -> str:
        running = membership.count(WorkerState.RUNNING)
        done = membership.count(WorkerState.DONE)
        up = len(membership.members) - membership.count(WorkerState.PLANNED)
        loss = newest_loss(Path(self._plan.workers[0].log_path))
        run_time_s = time.monotonic() - self._begin
        text = f"{up} of {len(membership.members)} up, {running} running, {done} done, {run_time_s:.0f} s"
        return f"msrun: {text}{', loss ' + loss if loss else ''}"
