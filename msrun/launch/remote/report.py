"""What an agent's part of a job tells the launcher: its plan, every moment, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msrun.agent.observer import Observer
from msrun.cluster.failure import JobFailure
from msrun.cluster.membership import Membership
from msrun.launch.remote.launcher_link import LauncherLink
from msrun.launch.remote.log_sender import LogSender
from msrun.planning.plan import LaunchPlan
from msrun.planning.record_json import encode_record


class LauncherReport:
    """Passes a job's moments on to the launcher. A `Display`."""

    tick_s: float | None = None

    def __init__(self, link: LauncherLink, plan: LaunchPlan, logs: LogSender) -> None:
        self._link = link
        self._logs = logs
        self._is_between = False
        """An attempt is over, and no worker of the next has started."""
        host, names = encode_record(plan.hosts[0]), logs.names
        link.send("planned", host=host, notes=list(plan.notes), target=plan.device_target, logs=names)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Pass a moment on."""
        if kind == "restarting":  # told before the logs of the attempt that is over are renamed
            self._logs.end_attempt()
            self._is_between = True
        elif kind == "started" and self._is_between:
            self._logs.begin_attempt()
            self._is_between = False
        self._link.send("event", moment=kind, fields=dict(fields))

    def tick(self, membership: Membership) -> None:
        """Nothing regular to pass on."""

    @property
    def observers(self) -> tuple[Observer, ...]:
        """This one."""
        return (self,)

    def say(self, text: str) -> None:
        """Have the launcher say it."""
        self.note("note", {"text": text})

    def finish(self, failure: JobFailure | None, membership: Membership, restarts: int) -> None:
        """The result says it all."""
