"""`--check` of a job over many hosts: everything that a run would look at before it starts, and nothing started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from msrun.agent.signals import SignalPipe
from msrun.errors import MsrunError
from msrun.launch.console import say
from msrun.launch.fleet.opener import HostOpener
from msrun.launch.fleet.preparation import Preparation
from msrun.launch.job import new_job_id
from msrun.launch.preflight.checks import CHECKS
from msrun.launch.preflight.fleet_finding import (
    FleetFinding,
    exit_code_of_fleet,
    order_findings,
    render_fleet_findings,
)
from msrun.planning.spec import LaunchSpec

OF_LAUNCHER = frozenset({"log_dir", "disk"})
"""What the launcher needs of its own host: room for all logs."""


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


def inspect_launcher(spec: LaunchSpec, caller: Mapping[str, str]) -> list[FleetFinding]:
    """Return what was found on this host; writes nothing."""
    findings = []
    for check in CHECKS:
        if check.name in OF_LAUNCHER:
            try:
                found = check.look(spec, caller)
                findings.append(FleetFinding(found.status, found.name, f"here: {found.text}"))
            except MsrunError as error:
                findings.append(FleetFinding("fail", check.name, f"here: {error}", exit_code=error.exit_code))
    return findings
