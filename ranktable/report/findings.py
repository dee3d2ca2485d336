"""The findings of a validation: lines for people, JSON for programs, and SARIF 2.1.0 for editors and code scanning.

Source: Static Analysis Results Interchange Format (SARIF) 2.1.0, OASIS Standard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePath
from urllib.parse import quote_from_bytes

from ranktable.errors import EXIT_USAGE
from ranktable.problem import Problem
from ranktable.rules import Rule, registered_rules
from ranktable.text import count_noun, plain, render_json
from ranktable.validate import Report

_SHOWN_REPEATS = 3
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A file that could not be read, or is of a kind that has no rules here: why, and what to do."""

    source: str
    message: str
    remedy: str


Verdict = Report | Unjudged
"""What the validation of one file gave."""


def render_report(report: Report, *, shows_warnings: bool = True) -> str:
    """Return a report as lines `FILE:LINE:COLUMN: severity RULE path = value: message`, each with its remedy below.

    Errors come first, each kind of problem in the order of the text. Repeats of one fault are shown three times and
    then counted. Below problems a line says what kind of table was seen and by which keys.
    """
    source = plain(report.source)
    errors = [problem for problem in report.problems if problem.is_error]
    warnings = [problem for problem in report.problems if shows_warnings and not problem.is_error]
    lines = [line for group in _group([*errors, *warnings]) for line in _render_group(group, source)]
    if lines and report.dialect is not None:
        lines.append(f"{source}: taken for {report.dialect_title} because it has {report.evidence}")
    return "\n".join([*lines, f"{source}: {_summarise(report)}"])


def render_unjudged(verdict: Unjudged) -> str:
    """Return the line of a file that could not be judged."""
    return f"ranktable: error: {verdict.message}" + (f"; {verdict.remedy}" if verdict.remedy else "")


def verdict_as_json(verdict: Verdict) -> dict[str, object]:
    """Return what was found as an object for JSON, with every problem in the order of the text."""
    if isinstance(verdict, Unjudged):
        return {"file": verdict.source, "error": verdict.message, "remedy": verdict.remedy}
    return _report_as_json(verdict)


def _report_as_json(report: Report) -> dict[str, object]:
    return {
        "file": report.source,
        "dialect": report.dialect,
        "evidence": report.evidence or None,
        "device_target": report.profile.device_target,
        "chip": report.profile.chip,
        "profile": report.profile.reader,
        "ready": report.is_ready,
        "servers": report.num_servers,
        "devices": report.num_devices,
        "errors": report.num_errors,
        "warnings": report.num_warnings,
        "problems": [_problem_as_json(problem) for problem in report.problems],
    }


def render_verdicts_json(verdicts: Sequence[Verdict]) -> str:
    """Return what was found in several files as one JSON array."""
    return render_json([verdict_as_json(verdict) for verdict in verdicts])


def _group(problems: Iterable[Problem]) -> list[list[Problem]]:
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.rule, problem.severity, problem.message), []).append(problem)
    return list(groups.values())


def _render_group(group: Sequence[Problem], source: str) -> Iterable[str]:
    shown = group[:_SHOWN_REPEATS]
    for problem, following in zip_longest(shown, shown[1:]):
        place = f":{problem.position.line}:{problem.position.column}" if problem.position else ""
        yield f"{source}{place}: {problem.severity} {problem.rule} {problem.subject}: {problem.message}"
        if following is None and len(group) > len(shown):
            yield f"    and {len(group) - len(shown)} more like this"
        if following is None or following.remedy != problem.remedy:
            yield f"    remedy: {problem.remedy}"


def _summarise(report: Report) -> str:
    found = f"{count_noun(report.num_errors, 'error')}, {count_noun(report.num_warnings, 'warning')}"
    if report.dialect is None:
        return f"{found}; not a rank table"
    size = f"{count_noun(report.num_servers, 'server')}, {count_noun(report.num_devices, 'device')}"
    state = "" if report.is_ready else "not ready; "
    verdict = found if report.problems else "valid"
    kind = f"version {report.dialect}" if report.dialect[:1].isdigit() else report.dialect
    return f"{state}{verdict} ({kind}, {size}, checked for {report.profile.words})"


def _problem_as_json(problem: Problem) -> dict[str, object]:
    position = problem.position
    return {
        "path": problem.path,
        "line": position.line if position else None,
        "column": position.column if position else None,
        "rule": problem.rule,
        "severity": problem.severity,
        "value": problem.value,
        "message": problem.message,
        "remedy": problem.remedy,
    }


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
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and for this format alone

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
