"""What the user sees of a job: worker lines on stdout, msrun's own words on stderr, and the metrics file. On a terminal
one live line shows the progress bar of the rank that is shown, else ranks up, running and done and the newest loss.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from msrun import contract
from msrun.agent.observer import Observer, OwnFaults
from msrun.agent.processes.progress_board import PROGRESS_BOARD, read_record
from msrun.agent.signals import stop_this_process
from msrun.cluster.failure import JobFailure
from msrun.cluster.membership import Membership, WorkerState, describe_delay
from msrun.launch import output
from msrun.launch.directory.worker_log import Cutter, LineCutter, LogTail, RawLineCutter, read_log_end
from msrun.launch.failure import render_attempt
from msrun.launch.metrics_file import MetricsFile
from msrun.launch.output import ERASE_LINE, STDERR, STDOUT, describe_span, fit, one_line, printable_bytes
from msrun.launch.terminal import UserTerminal
from msrun.planning.hosts import count_workers
from msrun.planning.plan import LaunchPlan
from msrun.planning.spec import LaunchSpec

LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"  # torchrun's: what stands before a rank's lines
BAR_CHARS = 20


class ProgressLine:
    """Tells how far the first rank is: by its record, or its log where it runs on another host or reports nothing."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._board = Path(plan.run_dir, PROGRESS_BOARD)
        self._rank = plan.workers[0].global_rank
        self._log = Path(plan.workers[0].log_path)
        self._first: tuple[int, float] | None = None  # the first step that the log told, and when

    def text(self, now: float) -> str:
        """Return the line; empty as long as no step is known. `now`: monotonic seconds."""
        told, log = read_record(self._board, self._rank), read_log_end(self._log)
        step, speed, loss = log.step, None, log.loss_text
        if told.steps:
            step, speed = told.steps, told.steps_per_s(now)
            loss = f"{told.loss:.4g}" if math.isfinite(told.loss) else loss
        elif step is not None:
            if self._first is None or step < self._first[0]:  # the first one, or the job was started again
                self._first = step, now
            first_step, first_at = self._first
            speed = (step - first_step) / (now - first_at) if now > first_at else None
        line = "" if step is None else describe_progress(step, told.total if told.steps else 0, speed, loss)
        return f"rank {self._rank}: {line}" if self._rank and line else line


def describe_progress(step: int, total: int, steps_per_s: float | None, loss: str) -> str:
    """Return e.g. "step 21/40 [###---] 52 %, 9.9 steps/s, loss 0.048, 1.9 s left"; 0 and empty: not known."""
    parts = [f"step {step}"]
    if total > 0:
        share = min(1.0, step / total)
        done = math.floor(share * BAR_CHARS)
        parts = [f"step {step}/{total} [{'#' * done}{'-' * (BAR_CHARS - done)}] {math.floor(100 * share)} %"]
    if steps_per_s:
        parts.append(f"{steps_per_s:.3g} steps/s")
    if loss:
        parts.append(f"loss {loss}")
    if steps_per_s and total > step:
        parts.append(f"{describe_span((total - step) / steps_per_s)} left")
    return ", ".join(parts)


def _line_prefixes(plan: LaunchPlan) -> dict[int, str]:
    from string import Template  # not where one rank is shown

    template = Template(os.environ.get(LINE_PREFIX, "[${host}:${rank}] "))
    return {
        worker.global_rank: template.safe_substitute(
            role_name="default", host=host.name, rank=worker.global_rank, local_rank=worker.local_rank
        )
        for host in plan.hosts
        for worker in host.workers
    }


TAIL_TICK_S = 0.2
RAW_TICK_S = 0.05
LIVE_TICK_S = 0.25
COPY_S = 0.1  # how long the event loop may be busy with lines of workers at a time
MAX_STATE_BYTES = 1 << 12  # no terminal shows more of a progress bar in its line


def say(text: str, *, quiet: bool) -> None:
    if not quiet:
        output.say_lines(f"msrun: {text}")


class Display(Observer):
    """Who is told of a job's moments, of its end, and of what else is to be known."""

    stop_self: Callable[[], None] | None = None  # what Ctrl-Z does to this process; None = nothing

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who is told of the moments."""
        return (self,)

    def say(self, text: str) -> None:
        """Something that is no moment of the job."""
        self.note("note", {"text": text})

    def finish(self, failure: JobFailure | None, membership: Membership, restarts: int) -> None:
        """Everything has ended; `failure`: why the job failed, if it did; `restarts`: how often it started again."""


class Console(Display):
    """A `Display` for the user of this process, owned by the agent's event loop. What it cannot show is no error."""

    def __init__(
        self,
        spec: LaunchSpec,
        plan: LaunchPlan,
        faults: OwnFaults,
        *,
        quiet: bool,
        terminal: UserTerminal | None = None,
    ) -> None:
        """Write nothing yet. `terminal`: it belongs to a rank; given back by the caller."""
        self._terminal = terminal
        self.stop_self = terminal.stop_process if terminal else stop_this_process
        self._faults = faults
        self._spec = spec
        self._plan = plan
        self._metrics: MetricsFile | None = None
        self.also: Observer | None = None  # who else is told: the launcher on another host, of whose job this is a part
        self._quiet = quiet
        self._is_raw = spec.is_raw_tail
        self._has_times = spec.has_times
        self._has_colours = os.isatty(STDOUT)
        self._begin = time.monotonic()
        workers = {worker.global_rank: worker for worker in plan.workers}
        ranks = [rank for rank in plan.tail_ranks if rank in workers]
        is_alone = len(ranks) < 2
        self._prefixes = dict.fromkeys(workers, "") if is_alone else _line_prefixes(plan)
        cutter = LineCutter if not self._is_raw else Cutter if is_alone else RawLineCutter
        self._tails = [LogTail(rank, path, cutter) for rank in ranks for path in workers[rank].log_paths]
        self._errors = {workers[rank].error_log_path for rank in ranks}  # logs of stderr alone, which are shown there
        self._progress = ProgressLine(plan) if spec.has_progress_line else None
        can_redraw = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        may_be_live = (spec.has_progress_line or not quiet) and plan.interactive_rank is None
        self._is_live = may_be_live and os.isatty(STDERR) and can_redraw
        self._has_live_bar = is_alone and not self._is_raw and self._has_colours and can_redraw
        """The last state of a progress bar is the live line, not a line of its own every few seconds."""
        self._turn = 0
        self._is_running = False
        self._live: tuple[int, bytes] | None = None  # the last line, to be written again: where, and what
        tail_tick_s = RAW_TICK_S if self._is_raw else TAIL_TICK_S
        self.tick_s = tail_tick_s if self._tails else LIVE_TICK_S if self._is_live else None

    def open_metrics(self) -> Self:
        """Write the first metrics; UsageError: the file cannot be written."""
        if (path := self._spec.metrics_file) is not None:
            plan, are_here = self._plan, not self._spec.is_remote
            if self._spec.is_joined:  # each of these hosts writes its own ranks
                own = tuple(host for host in plan.hosts if host.node_rank == self._spec.node_rank)
                plan, are_here = replace(plan, hosts=own), True
            self._metrics = MetricsFile(path, plan, are_workers_here=are_here, restarts=self._spec.first_attempt)
        return self

    @property
    def observers(self) -> tuple[Observer, ...]:
        return tuple(one for one in (self, self._metrics, self._terminal, self.also) if one is not None)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Say the moments that a user wants to know."""
        if kind == "preparing":
            host = self._plan.hosts[0]
            self._say(f"{count_workers(len(host.workers))} on {host.where}, logs in {self._plan.log_dir}")
            for note in self._plan.notes:
                self._say(note)
        elif kind == "ready" and fields["reason"] and fields["reason"] != "asked for":
            self._say(f"workers start by exec, not by fork: {fields['reason']}")
        elif kind == "running":
            self._is_running = True
        elif kind in ("note", "waiting"):
            self._say(str(fields["text"]))
        elif kind == "signal":
            self._say(f"signal {fields['name']} passed on to {count_workers(len(fields['global_ranks']))}")
        elif kind == "hang":
            self._say("the job is stuck: asking every worker for its stacks")
        elif kind == "lingering":
            what = fields["what"]
            self._say(f"the program of rank {fields['global_rank']} has ended, its process waits for {what}")
        elif kind == "restarting":
            self._begin_anew(fields)
        elif kind in ("stopping", "over"):
            self._erase_live_line()
            self._is_running = False
            if kind == "stopping":
                self._say(f"stopping all workers: {fields['reason']}")

    def tick(self, membership: Membership) -> None:
        """Copy new worker lines to stdout and refresh the live line."""
        self._copy_lines()
        if not self._is_running:
            return
        columns = shutil.get_terminal_size().columns - 1
        if self._has_live_bar and self._tails and (state := self._tails[-1].cutter.state):
            bar = printable_bytes(state[:MAX_STATE_BYTES], keep_colours=True).decode().replace("\t", " ")
            self._draw(STDOUT, fit(bar, columns))
        elif self._is_live:
            self._draw(STDERR, one_line(self._status(membership))[:columns])

    def finish(self, failure: JobFailure | None, membership: Membership, restarts: int) -> None:
        """Write the last metrics and print the closing line; the failure is reported by who gets it."""
        if self._metrics is not None:
            with self._faults.kept_from_job("display (MetricsFile)"):
                self._metrics.finish(membership, failure.exit_code if failure else contract.EXIT_OK)
        hosts = max(len(self._plan.hosts), len(self._plan.fleet))
        where = f" on {hosts} hosts" if hosts > 1 else ""
        again = f" after restart {restarts}" if restarts else ""
        what = f"{'all ' if self._plan.world_size > 1 else ''}{count_workers(self._plan.world_size)}"
        summary = f"{what}{where} finished successfully{again}"
        self.pause("" if failure else summary)

    def pause(self, summary: str = "") -> None:
        """Copy what workers wrote last: the job has ended, or goes on elsewhere, with another plan."""
        with self._faults.kept_from_job("display (Console)"):
            self._erase_live_line()
            self._is_running = False
            deadline = time.monotonic() + output.FLUSH_S
            for tail in self._tails:
                tail.end()
            while self._tails and output.place(STDOUT).has_room(deadline):
                tail = self._tails[0]
                self._copy(tail)
                if self._tails and not tail.has_more:
                    self._tails.remove(tail)
                    tail.close()
            if self._tails or not output.place(STDOUT).is_idle(deadline):
                self._say(f"stdout is not read: the rest of what workers wrote is in {self._plan.log_dir}")
            if summary:
                self._say(f"{summary} in {time.monotonic() - self._begin:.1f} s")

    def _copy_lines(self) -> None:
        """Copy for COPY_S at most, each log in its turn."""
        deadline = time.monotonic() + COPY_S
        turns = deque(self._tails)
        turns.rotate(-self._turn)
        while turns and self._tails and output.place(STDOUT).has_room(deadline) and time.monotonic() < deadline:
            tail = turns.popleft()
            self._turn += 1
            self._copy(tail)
            if tail.has_more:
                turns.append(tail)
        if not self._has_live_bar and output.place(STDOUT).has_room():
            for tail in self._tails:
                self._print(tail, tail.cutter.take_state(time.monotonic()))

    def _copy(self, tail: LogTail) -> None:
        pieces = tail.read(output.ROOM_BYTES)
        if output.place(STDOUT).is_open(STDOUT):
            self._print(tail, pieces)
        else:  # `msrun ... | head` has enough, or the disk below `msrun > file` is full
            while self._tails:
                self._tails.pop().close()

    def _print(self, tail: LogTail, pieces: list[bytes]) -> None:
        descriptor = STDERR if tail.path in self._errors else STDOUT
        if pieces:
            self._write(descriptor, self._prefixes[tail.global_rank].encode(), pieces)

    def _write(self, descriptor: int, prefix: bytes, pieces: list[bytes]) -> None:
        self._erase_live_line()
        if self._has_times:
            now = time.time()
            prefix = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} ".encode() + prefix
        text = b"".join(prefix + piece for piece in pieces) if prefix else b"".join(pieces)
        text = text if self._is_raw else printable_bytes(text, keep_colours=self._has_colours)
        output.write(descriptor, text, is_kept=True)

    def _say(self, text: str) -> None:
        self._erase_live_line()
        say(text, quiet=self._quiet)

    def _begin_anew(self, fields: Mapping[str, Any]) -> None:
        for tail in self._tails:
            tail.end()
        self._copy_lines()
        self._say(
            f"{fields['reason']}; starting all workers again {describe_delay(fields['delay_s'])}, "
            f"restart {fields['attempt']}"
        )
        shown = self._plan.tail_ranks if output.is_one_place() else ()
        report = render_attempt(self._plan, fields["attempt"] - 1, fields["global_ranks"], shown)
        if report and not self._quiet:
            output.say_lines(report)

    def _erase_live_line(self) -> None:
        if self._live is not None:
            output.write(self._live[0], ERASE_LINE)
            self._live = None

    def _draw(self, descriptor: int, text: str) -> None:
        line = (descriptor, text.encode("utf-8", "backslashreplace"))
        if line == self._live or not output.place(descriptor).is_idle():
            return
        if self._live is None and not output.place(descriptor).is_at_line_start:
            return
        if self._live is not None and self._live[0] != descriptor:
            self._erase_live_line()
        output.write(descriptor, ERASE_LINE + line[1])
        self._live = line

    def _status(self, membership: Membership) -> str:
        if self._progress is not None and (line := self._progress.text(time.monotonic())):
            return f"msrun: {line}"
        running = membership.count(WorkerState.RUNNING)
        done = membership.count(WorkerState.DONE)
        up = len(membership.members) - membership.count(WorkerState.PLANNED)
        loss = read_log_end(Path(self._plan.workers[0].log_path)).loss_text
        run_time_s = time.monotonic() - self._begin
        text = f"{up} of {len(membership.members)} up, {running} running, {done} done, {run_time_s:.0f} s"
        return f"msrun: {text}{', loss ' + loss if loss else ''}"
