"""What the user sees of a job: the console, and the metrics file where one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from msrun import contract
from msrun.agent.observer import Observer, OwnFaults
from msrun.agent.processes.terminal import UserEnd
from msrun.agent.signals import stop_this_process
from msrun.cluster.failure import JobFailure
from msrun.cluster.membership import Membership
from msrun.launch.console import Console
from msrun.launch.metrics_file import MetricsFile
from msrun.launch.terminal import UserTerminal
from msrun.planning.plan import LaunchPlan
from msrun.planning.ranks import all_workers
from msrun.planning.spec import LaunchSpec


class Display(Protocol):
    """Who is told of a job's moments, of its end, and of what else is to be known."""

    stop_self: Callable[[], None] | None
    """What Ctrl-Z does to this process; None = nothing."""

    @property
    def user(self) -> UserEnd | None:
        """Where the user's terminal or standard input is, for a rank of this host."""

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who is told of the moments."""

    def say(self, text: str) -> None:
        """Something that is no moment of the job."""

    def finish(self, failure: JobFailure | None, membership: Membership, restarts: int) -> None:
        """Everything has ended.

        Args:
            failure: why the job failed; None when it did not.
            restarts: how often it was started again.
        """


class JobDisplay:
    """A `Display` for the user of this process. What it cannot show is told to `faults`, and not raised."""

    def __init__(
        self,
        spec: LaunchSpec,
        plan: LaunchPlan,
        faults: OwnFaults,
        *,
        quiet: bool,
        terminal: UserTerminal | None = None,
    ) -> None:
        """Write nothing yet. `terminal`: it, or standard input, belongs to a rank; closed by the caller."""
        self.user = terminal
        self.stop_self: Callable[[], None] | None = terminal.stop_process if terminal else stop_this_process
        self._faults = faults
        self._spec = spec
        self._plan = plan
        self._console = Console(
            plan,
            quiet=quiet,
            is_raw=spec.is_raw_tail,
            has_progress=spec.has_progress_line,
            has_times=spec.has_times,
            merges_lines=spec.merges_lines,
        )
        self._metrics: MetricsFile | None = None
        self.also: Observer | None = None
        """Who else is told: the launcher on another host, of whose job this is a part."""

    def open_metrics(self) -> None:
        """Write the first metrics.

        Raises:
            UsageError: the file cannot be written.
        """
        if (path := self._spec.metrics_file) is not None:
            plan, are_here = self._plan, not self._spec.is_remote
            if self._spec.is_joined:  # each of these hosts writes its own ranks
                own = tuple(host for host in plan.hosts if host.node_rank == self._spec.node_rank)
                plan, are_here = replace(plan, hosts=own), True
            self._metrics = MetricsFile(path, plan, are_workers_here=are_here, restarts=self._spec.first_attempt)

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Console, metrics file, and the user's terminal."""
        return tuple(one for one in (self._console, self._metrics, self.user, self.also) if one is not None)

    def say(self, text: str) -> None:
        """Print a line."""
        with self._faults.kept_from_job("display (Console)"):
            self._console.note("note", {"text": text})

    def finish(self, failure: JobFailure | None, membership: Membership, restarts: int) -> None:
        """Write the last metrics and print the closing line; the failure is reported by who gets it."""
        if self._metrics is not None:
            with self._faults.kept_from_job("display (MetricsFile)"):
                self._metrics.finish(membership, failure.exit_code if failure else contract.EXIT_OK)
        hosts = max(len(self._plan.hosts), len(self._plan.fleet))
        where = f" on {hosts} hosts" if hosts > 1 else ""
        again = f" after restart {restarts}" if restarts else ""
        summary = f"{all_workers(self._plan.world_size)}{where} finished successfully{again}"
        self._finish_console("" if failure else summary)

    def pause(self) -> None:
        """Show what workers have written: the job goes on elsewhere, with another plan."""
        self._finish_console("")

    def _finish_console(self, summary: str) -> None:
        with self._faults.kept_from_job("display (Console)"):
            self._console.finish(summary)
