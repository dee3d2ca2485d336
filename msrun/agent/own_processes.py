"""The processes of msrun beside the workers: the fork server, the scheduler, with rotated logs the log writer,
parameter servers and, for workers of real MindSpore, its scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from msrun import contract
from msrun.agent.attempt import scheduler_log
from msrun.agent.logs.own_file import read_end
from msrun.agent.processes.log_pipes import END_S, ORPHAN_END_S
from msrun.agent.processes.process_control import describe_status, exit_code_of, is_stopped, kill_descendants
from msrun.agent.processes.process_spec import LOG_WRITER_ID, MINDSPORE_SCHEDULER_ID, SCHEDULER_ID, server_index
from msrun.agent.watch.evidence import explain_limit
from msrun.errors import ClusterError, MsrunError, OwnProcessLost, ServerFailed
from msrun.planning.plan import LaunchPlan

LAST_WORDS_BYTES = 2048
_NAMES = {SCHEDULER_ID: "scheduler", LOG_WRITER_ID: "log_writer", MINDSPORE_SCHEDULER_ID: "mindspore_scheduler"}


class OwnProcesses:
    """Which of them run. An attempt cannot go on without them."""

    def __init__(self, plan: LaunchPlan, home: str) -> None:
        """`home`: the folder where the user finds `scheduler.log`; empty where it goes with the job."""
        self._plan = plan
        self._home = home
        self._pids: dict[int, int] = {}
        self._stopped_since: dict[int, float] = {}

    @property
    def scheduler_runs(self) -> bool:
        """Whether the scheduler was started and has not ended."""
        return SCHEDULER_ID in self._pids

    def forget(self) -> None:
        """All of them are gone; others will be started in their place."""
        self._pids.clear()
        self._stopped_since.clear()

    def started(self, process_id: int, pid: int, tell: Callable[..., None]) -> None:
        """Record a start and tell observers of it."""
        index = server_index(process_id)
        if index is not None:
            tell("server", index=index, pid=pid)
        else:
            self._pids[process_id] = pid
            tell(_NAMES[process_id], pid=pid)

    def exited(self, process_id: int, wait_status: int, *, do_workers_run: bool, has_begun: bool) -> MsrunError | None:
        """Record an end and return why the attempt cannot go on; None when it was the orderly end of the log writer, or
        that of a parameter server whom no worker needs any more. `has_begun`: a rank has joined the world or reported
        progress. Before that, what ends by itself, such as for want of a package or of memory, would end again."""
        self._pids.pop(process_id, None)
        how = describe_status(wait_status)
        index = server_index(process_id)
        if index is not None:
            name = f"{contract.server_name(index)}.log"
            where = "" if self._plan.fleet else f" on {self._plan.hosts[0].where}"  # of several, the report names it
            log = f"{self._home}/{name}" if self._home else name
            what = f"server {index}{where} failed first: {how}; its log: {log}"
            return ServerFailed(what, exit_code_of(wait_status)) if do_workers_run else None
        kind, limit = self._judge(wait_status, has_begun=has_begun)
        if process_id == MINDSPORE_SCHEDULER_ID:  # it ends with 0 when all workers have said that they leave
            what = f"MindSpore's scheduler ended ({how}); {self.describe_log()}"
            return kind(what) if wait_status and do_workers_run else None
        if process_id == SCHEDULER_ID:
            return kind(f"the scheduler ended ({how}{', ' if limit else ''}{limit}); {self.describe_log()}")
        return kind(f"the log writer ended ({how}); {self.describe_log()}") if wait_status else None

    def server_ended(self, wait_status: int | None, *, has_begun: bool) -> ClusterError:
        """Return why the attempt cannot go on without its fork server. `wait_status`: None when nobody knows, or msrun
        has ended it. `has_begun`: as for `exited`."""
        kind, limit = self._judge(wait_status, has_begun=has_begun)
        why = f" ({limit})" if limit else ""
        return kind(f"the fork server ended unexpectedly{why}; every worker was stopped with it")

    def _judge(self, wait_status: int | None, *, has_begun: bool) -> tuple[type[ClusterError], str]:
        """Return what the end of one is for the job, and the limit that has made it."""
        if wait_status is None:
            return OwnProcessLost, ""
        limit = explain_limit(wait_status, scheduler_log(self._plan))
        is_final = not has_begun and (bool(limit) or not os.WIFSIGNALED(wait_status))
        return ClusterError if is_final else OwnProcessLost, limit

    def look_for_stopped(self, server_pid: int, now: float, limit_s: float) -> OwnProcessLost | None:
        """Return which of them has been stopped by a signal for too long; None when none has, as far as was looked."""
        names = {pid: f"the {_NAMES[process_id].replace('_', ' ')}" for process_id, pid in self._pids.items()}
        stopped = {pid: name for pid, name in {server_pid: "the fork server", **names}.items() if is_stopped(pid)}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_since.items():
            if now - since >= limit_s:
                how_long = f"has been stopped by a signal for {now - since:.0f} s"
                return OwnProcessLost(f"{stopped[pid]} (pid {pid}) {how_long}")
        return None

    def describe_log(self) -> str:
        """Return where the user finds `scheduler.log`, or its last line where it will be gone when he looks."""
        if not Path(self._plan.log_dir).is_dir():
            return f"the log directory {self._plan.log_dir} was removed: leave it there while the job runs"
        if self._home:
            return f"its log: {self._home}/{contract.SCHEDULER_LOG}"
        lines = read_end(scheduler_log(self._plan), LAST_WORDS_BYTES).split(b"\n")
        last = next((line for line in reversed(lines) if line.strip()), b"").decode("utf-8", "backslashreplace")
        return f"its last words: {last.strip()}" if last else "it said nothing"

    def end_orphans(self, strangers: Collection[int], limit_s: float) -> list[int]:
        """End what is left of a job whose fork server is gone; returns what survived.

        The log writer finishes by itself. The scheduler is the last: should this process be killed meanwhile, it ends
        the rest.
        """
        kept = [*strangers, self._pids.get(SCHEDULER_ID, 0)]
        if LOG_WRITER_ID in self._pids:  # it writes the workers' last words
            kill_descendants(ORPHAN_END_S + END_S, kept, last=self._pids[LOG_WRITER_ID])
        kill_descendants(limit_s, kept)
        return kill_descendants(limit_s, strangers)
