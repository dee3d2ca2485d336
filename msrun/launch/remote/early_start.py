"""Lets an agent's fork server import while the hosts of the job are still looked at and come together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from msrun.agent.host.host_facts import read_host_facts
from msrun.agent.processes.server_handle import ForkServerHandle, start_fork_server
from msrun.errors import MsrunError
from msrun.planning.early_server import plan_early_server
from msrun.planning.spec import LaunchSpec

STDERR = 2


def start_early(spec: LaunchSpec, caller: Mapping[str, str], job_id: str) -> ForkServerHandle | None:
    """Start a fork server that imports; None where that would be of no use, or is not possible.

    What is wrong here is for the checks to say, so nothing is raised.
    """
    with contextlib.suppress(MsrunError, OSError):
        early = plan_early_server(spec, read_host_facts({**caller, **dict(spec.env)}), caller, job_id)
        if early is not None:
            server = start_fork_server(env=early.environment, working_directory=early.working_directory, log_fd=STDERR)
            server.import_early(early.imports)
            return server
    return None
