"""The findings of a validation as lines for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from ranktable.codec.layout import render_json
from ranktable.problem import Problem
from ranktable.report.words import count_noun
from ranktable.validate import Report

_SHOWN_REPEATS = 3


def render_report(report: Report) -> str:
    """Return a report as lines `FILE:LINE:COLUMN: severity RULE path = value: message`, each with its remedy below.

    Repeats of one fault are shown three times and then counted.
    """
    lines = [line for group in _group(report.problems) for line in _render_group(group, report.source)]
    return "\n".join([*lines, f"{report.source}: {_summarise(report)}"])


def report_as_json(report: Report) -> dict[str, object]:
    """Return a report as an object for JSON, with every problem."""
    return {
        "file": report.source,
        "dialect": report.dialect,
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


def render_reports_json(entries: Sequence[dict[str, object]]) -> str:
    """Return several JSON objects as one array."""
    return render_json(list(entries))


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
    return f"{state}{verdict} (version {report.dialect}, {size}, checked for {report.profile.words})"


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
