"""What the commands print: findings of a validation, the ranks of a table, what a file is, the register of rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.rules import Rule
from ranktable.tables import FileKind
from ranktable.text import count_noun, plain, render_json
from ranktable.validate import Report

_HEADER = ("rule", "severity", "chips", "profiles", "asks that")
_SHOWN_REPEATS = 3


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


def render_table(table: RankTable) -> str:
    """Return the table as plain columns, one line per rank in ascending order."""
    placed = sorted(table.placements, key=lambda placement: placement[1].rank_id)
    rows = [("rank", "server_id", "device_id", "device_ip")]
    rows += [
        (str(device.rank_id), plain(server.server_id), str(device.device_id), plain(device.device_ip or "-"))
        for server, device in placed
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    lines = [f"version {plain(table.dialect)}, status {plain(table.status)}, {size}"]
    lines += [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}" for row in rows]
    return "\n".join(lines)


def kind_as_json(kind: FileKind) -> dict[str, object]:
    """Return what a file that is no table for a job of training is, as an object for JSON."""
    return {
        "file": kind.source,
        "dialect": kind.dialect.name,
        "title": kind.dialect.title,
        "evidence": kind.evidence,
        "consumer": kind.dialect.consumer,
        "advice": kind.dialect.instead,
    }


def render_kind(kind: FileKind) -> str:
    """Return what the file is, and below it what is known of it."""
    facts = kind_as_json(kind)
    lines = [f"    {key + ':':<10}{plain(str(facts[key]))}" for key in ("dialect", "evidence", "consumer", "advice")]
    return "\n".join([f"{kind.source}: {kind.dialect.title}", *lines])


def render_rules(rules: Sequence[Rule]) -> str:
    """Return one line per rule, with the ids that findings carry."""
    rows = [_HEADER, *(_row(entry) for entry in rules)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return "\n".join(lines) + "\n"


def _row(entry: Rule) -> tuple[str, str, str, str, str]:
    chips, readers = ",".join(entry.chips) or "all", ",".join(entry.readers) or "all"
    return entry.rule_id, entry.severity, chips, readers, entry.title


def rules_as_json(rules: Sequence[Rule]) -> str:
    """Return the rules as a JSON array; an empty list of chips or profiles stands for all of them."""
    return render_json(
        [
            {
                "rule": entry.rule_id,
                "severity": entry.severity,
                "chips": list(entry.chips),
                "profiles": list(entry.readers),
                "dialects": sorted(entry.dialects),
                "title": entry.title,
                "sources": list(entry.sources),
            }
            for entry in rules
        ]
    )


def render_sources(rules: Sequence[Rule]) -> str:
    """Return a line per rule and source; a rule that no public source asks for says so."""
    lines = [(entry.rule_id, source) for entry in rules for source in entry.sources or ("none: it only warns",)]
    return "".join(f"{rule_id:<4}  {source}\n" for rule_id, source in lines)
