"""`--check` of a job over many hosts: everything that a run would look at before it starts, and nothing started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from msrun.agent.signals import SignalPipe
from msrun.launch.console import say
from msrun.launch.fleet.opener import HostOpener
from msrun.launch.fleet.preparation import Preparation
from msrun.launch.job import new_job_id
from msrun.launch.preflight.fleet_finding import exit_code_of_fleet, order_findings, render_fleet_findings
from msrun.launch.preflight.launcher_look import inspect_launcher
from msrun.planning.spec import LaunchSpec


def check_fleet(spec: LaunchSpec, caller: Mapping[str, str], *, quiet: bool) -> tuple[int, list[str]]:
    """Return the exit status and the lines of `--check`; with `quiet` only what needs attention.

    Raises:
        Interrupted: a signal came.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(SignalPipe())
        job_id = new_job_id()
        opener = HostOpener(spec, job_id, lambda text: say(text, quiet=quiet))
        preparation = Preparation(
            spec, caller, job_id, opener, signals, None, None, lambda text: say(text, quiet=quiet)
        )
        stack.enter_context(preparation)
        preparation.look()
    findings = order_findings([*inspect_launcher(spec, caller), *preparation.findings])
    return exit_code_of_fleet(findings), render_fleet_findings(findings, spec.host_entries, quiet=quiet)
