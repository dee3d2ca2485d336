"""How this host's part of a job gets its fork server and, through that, its scheduler: the first, and new ones for
those that are lost.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.logs.own_file import open_own_file
from msrun.agent.observer import Observer
from msrun.agent.processes.server_handle import ForkServerHandle, start_fork_server
from msrun.agent.warm import WarmStart, start_warm
from msrun.cluster.messages import Channel
from msrun.cluster.rendezvous import BACKLOG, forget_waiting
from msrun.errors import ClusterError
from msrun.planning.environment import server_environment
from msrun.planning.plan import LaunchPlan
from msrun.planning.spec import LaunchSpec

_ROOT = Path(__file__).parents[2]


def describe_shadowed_package(spec: LaunchSpec, environment: Mapping[str, str]) -> str:
    """Return which package or module of the user's cannot be imported by its name msrun, in one line; else nothing.

    Args:
        environment: of the workers.
    """
    if not spec.program.is_python or spec.start_method == "exec":
        return ""
    at, paths = spec.working_directory, environment.get("PYTHONPATH", "").split(os.pathsep)
    first = (at / spec.program.target).parent if spec.program.kind == "script" else at
    folders = [*([] if environment.get("PYTHONSAFEPATH") else [first]), *(at / path for path in paths if path)]
    for folder in folders:
        if folder.resolve() == _ROOT:
            return ""
        for found in (folder / "msrun", folder / "msrun.py"):
            if (found / "__init__.py").is_file() or (found.suffix and found.is_file()):
                return (
                    f"{found.resolve()}: workers import msrun's own package of that name, not this one; rename it, or "
                    "give --start_method exec, with which they import it and not msrun.runtime"
                )
    return ""


RECORD_S = 2.0  # how long the scheduler may leave the record of a moment unread before it gets no more


class SchedulerRecord(Observer):
    """Forwards the moments of the job to the scheduler, which writes them down."""

    def __init__(self, plan: LaunchPlan, *, has_store: bool) -> None:
        """`has_store`: the scheduler of this host serves the workers' store."""
        self._plan = plan
        self._has_store = has_store
        self._channel: Channel | None = None

    def follow(self, channel: Channel) -> None:
        """Tell this scheduler which job it is, and from now on everything else."""
        self._channel = channel
        host = self._plan.hosts[0]
        self.note(
            "job",
            {
                "job_id": self._plan.job_id,
                "world_size": len(host.workers),
                "host": host.where,
                "has_store": self._has_store,
                "is_store_needed": host.common_env[contract.TORCHELASTIC_USE_AGENT_STORE] == "True",
            },
        )

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._channel is not None and not self._channel.is_closed:
            try:
                self._channel.send({"type": kind, **fields})
            except TimeoutError:  # it is stopped: the job can do without its record
                self._channel.is_closed = True


class OwnStart:
    """Starts the fork server of a job, again for each that is lost."""

    def __init__(
        self,
        plan: LaunchPlan,
        caller: Mapping[str, str],
        listener: socket.socket,
        *,
        has_store: bool,
        early: ForkServerHandle | None,
        warm: WarmStart | None,
        **given: int | float,
    ) -> None:
        """
        Args:
            listener: the socket of the workers' store; open as long as the job may start again, closed by the caller.
            has_store: the store is on this host.
            early: a fork server that was started before the plan was made; ended here if it cannot serve.
            given: open_files, stopped_limit_s and stdin_fd of `ForkServerHandle.begin`.
        """
        self.record = SchedulerRecord(plan, has_store=has_store)
        self._plan, self._caller = plan, caller
        self._listener, self._has_store = listener, has_store
        self._early, self._warm = early, warm
        self._given: Any = given
        self._has_started = False

    def start(self) -> tuple[ForkServerHandle, Channel]:
        """Return a fork server that has its job, and the channel to the scheduler that it will start; the caller ends
        the one and closes the other.

        Raises:
            ClusterError: it cannot be started.
        """
        env = server_environment(self._caller, self._plan.hosts[0].common_env)
        try:
            if self._has_started and self._has_store:
                self._listener.listen(BACKLOG)  # a scheduler without torch has shut it
                forget_waiting(self._listener)
            log = open_own_file(Path(self._plan.log_dir) / contract.SCHEDULER_LOG, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise ClusterError(f"cannot start the fork server: {error.filename or 'store'}: {error.strerror}") from None
        self._has_started = True
        ours, theirs = socket.socketpair()
        ours.settimeout(RECORD_S)
        with os.fdopen(log, "ab"), theirs:
            server = self._find_server(env, log)
            descriptors = {"log_fd": log, "scheduler_fd": theirs.fileno(), "listener_fd": self._listener.fileno()}
            server.begin(env, **descriptors, **self._given)
        scheduler = Channel(ours)
        self.record.follow(scheduler)
        return server, scheduler

    def _find_server(self, env: Mapping[str, str], log_fd: int) -> ForkServerHandle:
        folder = self._plan.hosts[0].working_directory
        server, self._early = self._early, None
        if server is not None and not server.can_serve(env, folder):
            server.kill()
            server = None
        warm, self._warm = self._warm, None  # what it starts beside the job must not be adopted, as all is by then
        if server is None and warm and warm.imports:
            job_id = self._plan.job_id
            server = start_warm(warm, env=env, working_directory=folder, job_id=job_id, caller=self._caller)
        return server or start_fork_server(env=env, working_directory=folder, log_fd=log_fd)
