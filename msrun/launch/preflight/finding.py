"""What one check of a host has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from msrun import contract


@dataclass(frozen=True)
class Finding:
    """One line of --check."""

    status: Literal["ok", "warn", "fail"]
    name: str
    text: str
    """One line; for `fail` the error that a run would end with."""
    exit_code: int = contract.EXIT_OK


def render_finding(finding: Finding) -> str:
    """Return `status  name  text`."""
    text = finding.text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{finding.status:<4}  {finding.name:<13}  {text}"


def exit_code_of_findings(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing failed, else the status of the first kind: what the user has to change before the host."""
    return min((finding.exit_code for finding in findings if finding.status == "fail"), default=contract.EXIT_OK)
