"""What the commands print: findings of a validation, the ranks and servers of a table, what a file is, the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import compress, zip_longest
from typing import Any

from ranktable.errors import BuildError, RankTableError
from ranktable.hosts.ranges import fold_numbers
from ranktable.kinds import Detection
from ranktable.model import RankTable, Server
from ranktable.problem import Problem
from ranktable.rules import Rule
from ranktable.validate import Report
from ranktable.values import count_noun, plain, render_json

_SHOWN_REPEATS = 3
Verdict = Report | RankTableError
"""What the validation of one file gave; an error for one that could not be read, or is of a kind without rules here."""


def render_report(report: Report, *, shows_warnings: bool = True) -> str:
    """Return a report as lines `FILE:LINE:COLUMN: severity RULE path = value: message`, each with its remedy below.

    Errors come first, each kind of problem in the order of the text. Repeats of one fault are shown three times and
    then counted. Below problems a line says what kind of table was seen and by which keys.
    """
    source = plain(report.source)
    errors = [problem for problem in report.problems if problem.is_error]
    warnings = [problem for problem in report.problems if shows_warnings and not problem.is_error]
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in [*errors, *warnings]:
        groups.setdefault((problem.rule, problem.severity, problem.message), []).append(problem)
    lines = [line for group in groups.values() for line in _render_group(group, source)]
    if lines and report.detection is not None:
        kind, evidence = report.detection.dialect, report.detection.evidence
        lines.append(f"{source}: taken for {kind.title} because it has {evidence}")
    return "\n".join([*lines, f"{source}: {_summarise(report)}"])


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


def render_verdicts_json(verdicts: Iterable[tuple[str, Verdict]]) -> str:
    """Return what was found in files of those names as one JSON array, every problem in the order of the text."""
    return render_json([_verdict_as_json(*verdict) for verdict in verdicts])


def _verdict_as_json(name: str, verdict: Verdict) -> dict[str, object]:
    if isinstance(verdict, RankTableError):
        return {"file": name, "error": verdict.message, "remedy": verdict.remedy}
    return {
        "file": verdict.source,
        "dialect": verdict.dialect,
        "evidence": verdict.detection and verdict.detection.evidence,
        "device_target": verdict.profile.device_target,
        "chip": verdict.profile.chip,
        "profile": verdict.profile.reader,
        "ready": verdict.is_ready,
        "servers": verdict.num_servers,
        "devices": verdict.num_devices,
        "errors": verdict.num_errors,
        "warnings": verdict.num_warnings,
        "problems": [
            {**(members.pop("position") or {"line": None, "column": None}), **members}
            for members in map(asdict, verdict.problems)
        ],
    }


def _list_servers(table: RankTable) -> Iterator[tuple[Server, dict[str, object]]]:
    """Yield each server, by rank unless ranks start again in groups, with what the table says of it."""
    ranks = [device.rank_id for _, device in table.placements]
    servers = table.servers_by_rank if len(set(ranks)) == len(ranks) else table.servers
    pods = {server_id: pod.super_pod_id for pod in table.super_pods for server_id in pod.server_ids}
    for place, server in enumerate(servers):
        own = {key: getattr(server, key) for key in ("host_ip", "pod_ip", "group")}
        yield server, {"node_rank": place, **own, "super_pod_id": pods.get(server.server_id)}


def list_ranks(table: RankTable, global_rank: int | None = None) -> list[dict[str, Any]]:
    """Return where every device is, by rank, or those of one rank: several where each group has ranks from 0.

    Each is an object for JSON; null for what the table does not say. Raises BuildError.
    """
    found = []
    for server, facts in _list_servers(table):
        for device in [device for device in server.devices if global_rank in (None, device.rank_id)]:
            local_rank = sum(other.rank_id < device.rank_id for other in server.devices)
            own = {key: getattr(device, key) for key in ("device_id", "device_ip", "super_device_id")}
            place = {"server_id": server.server_id, "node_rank": facts["node_rank"], "local_rank": local_rank}
            found.append({"rank_id": device.rank_id, **place, **own, **facts})
    if not found and global_rank is not None:
        raise BuildError(f"no device of the table has rank {global_rank}", f"it has {table.world_size} devices")
    return sorted(found, key=lambda row: row["rank_id"])


def render_rank(row: Mapping[str, object]) -> str:
    """Return where a device is as lines of name and value; what the table does not say is left out."""
    known = {name: plain(str(value)) for name, value in row.items() if value is not None}
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in known.items())


def overview_as_json(table: RankTable) -> dict[str, object]:
    """Return the table as an object for JSON: counts, super pods, and every server in the order of rank."""
    return {
        "dialect": table.dialect,
        "status": table.status,
        "world_size": table.world_size,
        "super_pods": [{"super_pod_id": pod.super_pod_id, "servers": list(pod.server_ids)} for pod in table.super_pods],
        "servers": [
            {
                "server_id": server.server_id,
                **facts,
                "ranks": [device.rank_id for device in server.devices],
                "device_ids": [device.device_id for device in server.devices],
                "device_ips": [device.device_ip for device in server.devices],
            }
            for server, facts in _list_servers(table)
        ],
    }


def render_overview(table: RankTable) -> str:
    """Return the table as lines, one per server in the order of rank."""
    rows = [["server", "ranks", "devices", "super pod", "group", "device_ip"]]
    for server, facts in _list_servers(table):
        ids = fold_numbers((device.device_id for device in server.devices), ",")
        names = [plain(str(facts[key] or "-")) for key in ("super_pod_id", "group")]
        addresses = ", ".join(plain(device.device_ip or "-") for device in server.devices)
        rows.append([plain(server.server_id), fold_numbers(server.ranks, ",") or "-", ids or "-", *names, addresses])
    said = [place < 3 or any(row[place].strip("-, ") for row in rows[1:]) for place in range(len(rows[0]))]
    lines = _columns([list(compress(row, said)) for row in rows])
    return "\n".join([_head(table), *(["", *lines] if rows[1:] else [])])


def render_table(table: RankTable) -> str:
    """Return the table as plain columns, one line per rank in ascending order."""
    rows = [["rank", "server_id", "device_id", "device_ip"]]
    for row in list_ranks(table):
        address = plain(row["device_ip"] or "-")
        rows.append([str(row["rank_id"]), plain(row["server_id"]), str(row["device_id"]), address])
    return "\n".join([_head(table), *_columns(rows)])


def _head(table: RankTable) -> str:
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    return f"version {plain(table.dialect)}, status {plain(table.status)}, {size}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]


def describe_kind(source: str, found: Detection) -> dict[str, str]:
    """Return what is known of a file that is known by name only, as an object for JSON."""
    return {
        "file": source,
        "title": found.dialect.title,
        "dialect": found.dialect.name,
        "evidence": found.evidence,
        "consumer": found.dialect.consumer,
        "advice": found.dialect.instead,
    }


def render_kind(facts: Mapping[str, str]) -> str:
    """Return what the file is, and below it what is known of it."""
    lines = [f"    {key + ':':<10}{plain(facts[key])}" for key in ("dialect", "evidence", "consumer", "advice")]
    return "\n".join([f"{facts['file']}: {facts['title']}", *lines])


def render_rules(rules: Sequence[Rule]) -> str:
    """Return one line per rule, with the ids that findings carry."""
    rows = [["rule", "severity", "chips", "profiles", "asks that"]]
    for entry in rules:
        chips, readers = ",".join(entry.chips) or "all", ",".join(entry.readers) or "all"
        rows.append([entry.rule_id, entry.severity, chips, readers, entry.title])
    return "\n".join(_columns(rows)) + "\n"


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
    lines = ((entry.rule_id, source) for entry in rules for source in entry.sources or ("none: it only warns",))
    return "".join(f"{rule_id:<4}  {source}\n" for rule_id, source in lines)
