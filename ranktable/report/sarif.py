"""The findings of a validation as SARIF 2.1.0, which editors and code scanning services show beside the file.

Source: Static Analysis Results Interchange Format (SARIF) 2.1.0, OASIS Standard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from urllib.parse import quote_from_bytes

from ranktable.codec.layout import render_json
from ranktable.errors import EXIT_USAGE
from ranktable.problem import Problem
from ranktable.report.findings import Unjudged, Verdict
from ranktable.rules import Rule, registered_rules

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render_sarif(verdicts: Sequence[Verdict], exit_code: int) -> str:
    """Return one SARIF log with one run: every rule, every file, every problem; `exit_code` is that of the command."""
    return render_json(build_sarif(verdicts, exit_code))


def build_sarif(verdicts: Sequence[Verdict], exit_code: int) -> dict[str, object]:
    """Return the SARIF log as an object for JSON.

    A file that could not be judged is no result but a notification, and the run was then no success. A file that was
    named twice stands there once.
    """
    rules = registered_rules()
    indexes = {rule.rule_id: index for index, rule in enumerate(rules)}
    by_uri = {_uri(verdict.source): verdict for verdict in verdicts}
    results = [
        _result(problem, uri, artifact_index, indexes)
        for artifact_index, (uri, verdict) in enumerate(by_uri.items())
        if not isinstance(verdict, Unjudged)
        for problem in verdict.problems
    ]
    run = {
        "tool": {"driver": {"name": "ranktable", **_version(), "rules": [_descriptor(rule) for rule in rules]}},
        "invocations": [
            {
                "executionSuccessful": exit_code != EXIT_USAGE,
                "exitCode": exit_code,
                "toolExecutionNotifications": [
                    _notification(uri, verdict) for uri, verdict in by_uri.items() if isinstance(verdict, Unjudged)
                ],
            }
        ],
        "artifacts": [_artifact(uri, verdict) for uri, verdict in by_uri.items()],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _version() -> dict[str, str]:
    try:
        return {"version": version("msrun")}  # the distribution that this package comes in
    except PackageNotFoundError:
        return {}


def _descriptor(rule: Rule) -> dict[str, object]:
    explanation = " ".join((rule.check.__doc__ or "").split()) if rule.check else ""
    full = f"{rule.title}. {explanation}".strip()
    return {
        "id": rule.rule_id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": full},
        "help": {"text": full},
        "defaultConfiguration": {"level": rule.severity if rule.severity == "warning" else "error"},
        "properties": {"dialects": sorted(rule.dialects), "chips": list(rule.chips), "readers": list(rule.readers)},
    }


def _artifact(uri: str, verdict: Verdict) -> dict[str, object]:
    place: dict[str, object] = {"location": {"uri": uri}, "roles": ["analysisTarget"]}
    if isinstance(verdict, Unjudged):
        return place
    facts = {
        "dialect": verdict.dialect,
        "evidence": verdict.evidence,
        "deviceTarget": verdict.profile.device_target,
        "chip": verdict.profile.chip,
        "profile": verdict.profile.reader,
        "ready": verdict.is_ready,
        "servers": verdict.num_servers,
        "devices": verdict.num_devices,
    }
    return {**place, "properties": facts}


def _notification(uri: str, verdict: Unjudged) -> dict[str, object]:
    return {
        "level": "error",
        "message": {"text": _join(verdict.message, verdict.remedy)},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}}}],
    }


def _result(problem: Problem, uri: str, artifact_index: int, indexes: Mapping[str, int]) -> dict[str, object]:
    physical: dict[str, object] = {"artifactLocation": {"uri": uri, "index": artifact_index}}
    if problem.position is not None:
        physical["region"] = {"startLine": problem.position.line, "startColumn": problem.position.column}
    location: dict[str, object] = {"physicalLocation": physical}
    if problem.path:
        location["logicalLocations"] = [{"fullyQualifiedName": problem.path}]
    index = {"ruleIndex": indexes[problem.rule]} if problem.rule in indexes else {}
    return {
        "ruleId": problem.rule,
        **index,
        "level": problem.severity,
        "message": {"text": _join(f"{problem.subject}: {problem.message}", problem.remedy)},
        "locations": [location],
    }


def _join(message: str, remedy: str) -> str:
    return f"{message}; {remedy}" if remedy else message


def _uri(source: str) -> str:
    """Return the path as a URI: absolute ones with the scheme `file`, others relative to the working directory."""
    path = PurePath(source)
    return ("file://" if path.is_absolute() else "") + quote_from_bytes(source.encode("utf-8", "surrogateescape"))
