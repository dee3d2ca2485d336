"""The processes of msrun beside the workers: the scheduler and, with rotated logs, the log writer."""

from __future__ import annotations

from collections.abc import Collection

from msrun.agent.attempt import scheduler_log
from msrun.agent.logs.log_pipes import await_log_writer
from msrun.agent.processes.process_spec import LOG_WRITER_ID, SCHEDULER_ID
from msrun.agent.processes.wait_status import describe_status
from msrun.errors import ClusterError
from msrun.planning.plan import LaunchPlan

_NAMES = {SCHEDULER_ID: "scheduler", LOG_WRITER_ID: "log_writer"}


class OwnProcesses:
    """Which of them run. A job cannot go on without them."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._pids: dict[int, int] = {}

    @property
    def scheduler_runs(self) -> bool:
        """Whether the scheduler was started and has not ended."""
        return SCHEDULER_ID in self._pids

    def started(self, process_id: int, pid: int) -> str:
        """Record a start and return its name for observers; empty for a worker."""
        if process_id in _NAMES:
            self._pids[process_id] = pid
        return _NAMES.get(process_id, "")

    def exited(self, process_id: int, wait_status: int) -> ClusterError | None:
        """Record an end and return why the job cannot go on; None when it was the log writer's orderly end."""
        self._pids.pop(process_id, None)
        log = scheduler_log(self._plan)
        how = describe_status(wait_status)
        if process_id == SCHEDULER_ID:
            return ClusterError(f"the scheduler ended ({how}); its log: {log}")
        return ClusterError(f"the log writer ended ({how}); its words: {log}") if wait_status else None

    def await_last_words(self, strangers: Collection[int]) -> None:
        """Let the log writer finish by itself when the fork server has gone before it."""
        if LOG_WRITER_ID in self._pids:
            await_log_writer(self._pids[LOG_WRITER_ID], strangers)
