"""What a launcher of many hosts needs of its own host: room for all logs. For --check; a run finds out by itself."""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import MsrunError
from msrun.launch.preflight.checks import CHECKS
from msrun.launch.preflight.fleet_finding import FleetFinding
from msrun.planning.spec import LaunchSpec

OF_LAUNCHER = frozenset({"log_dir", "disk"})


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
