"""Findings as text, as SARIF 2.1.0 and as annotations of GitHub's workflows. Pure.

Sources: OASIS, "Static Analysis Results Interchange Format 2.1.0"; GitHub, "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from launch_templates.lint.finding import Finding
from launch_templates.version import own_version


def write_report(findings: Sequence[Finding], style: str) -> str:
    """Text of all findings: `text` one a line, `sarif` one JSON object, `github` one command a line."""
    if style == "sarif":
        return json.dumps(_sarif(findings), indent=2) + "\n"
    line = _annotation if style == "github" else str
    return "".join(f"{line(finding)}\n" for finding in findings)


def _place(finding: Finding) -> str:
    return " ".join(part for part in (finding.document, finding.path) if part)


def _sarif(findings: Sequence[Finding]) -> dict[str, object]:
    rules = [{"id": rule_id} for rule_id in dict.fromkeys(finding.rule_id for finding in findings)]
    results = [
        {
            "ruleId": finding.rule_id,
            "level": str(finding.severity),
            "message": {"text": f"{_place(finding)}: {finding.message}; {finding.remedy}"},
            "locations": [
                {
                    "physicalLocation": {"artifactLocation": {"uri": finding.source}},
                    "logicalLocations": [{"fullyQualifiedName": _place(finding)}],
                }
            ],
        }
        for finding in findings
    ]
    driver = {"name": "launch-template", "version": own_version(), "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _annotation(finding: Finding) -> str:
    file, title = _escape(finding.source, ":,"), _escape(finding.rule_id, ":,")
    return f"::{finding.severity} file={file},title={title}::" + _escape(
        f"{_place(finding)}: {finding.message}; {finding.remedy}"
    )


def _escape(text: str, more: str = "") -> str:
    """Text as a workflow command holds it: %, line ends and in properties also : and , by their code."""
    for letter in "%\r\n" + more:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
