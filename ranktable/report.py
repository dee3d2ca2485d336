"""What the commands print: findings of a validation, the ranks and servers of a table, what a file is, the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ranktable.errors import RankNotFoundError
from ranktable.hosts.ranges import fold_numbers
from ranktable.model import Device, RankTable, Server
from ranktable.problem import Problem
from ranktable.rules import Rule
from ranktable.tables import FileKind
from ranktable.validate import Report
from ranktable.values import count_noun, plain, render_json

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
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in [*errors, *warnings]:
        groups.setdefault((problem.rule, problem.severity, problem.message), []).append(problem)
    lines = [line for group in groups.values() for line in _render_group(group, source)]
    if lines and report.dialect is not None:
        lines.append(f"{source}: taken for {report.dialect_title} because it has {report.evidence}")
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


def render_unjudged(verdict: Unjudged) -> str:
    """Return the line of a file that could not be judged."""
    return f"ranktable: error: {verdict.message}" + (f"; {verdict.remedy}" if verdict.remedy else "")


def render_verdicts_json(verdicts: Sequence[Verdict]) -> str:
    """Return what was found in several files as one JSON array, every problem in the order of the text."""
    return render_json([_verdict_as_json(verdict) for verdict in verdicts])


def _verdict_as_json(verdict: Verdict) -> dict[str, object]:
    if isinstance(verdict, Unjudged):
        return {"file": verdict.source, "error": verdict.message, "remedy": verdict.remedy}
    return {
        "file": verdict.source,
        "dialect": verdict.dialect,
        "evidence": verdict.evidence or None,
        "device_target": verdict.profile.device_target,
        "chip": verdict.profile.chip,
        "profile": verdict.profile.reader,
        "ready": verdict.is_ready,
        "servers": verdict.num_servers,
        "devices": verdict.num_devices,
        "errors": verdict.num_errors,
        "warnings": verdict.num_warnings,
        "problems": [
            {
                "path": problem.path,
                "line": problem.position.line if problem.position else None,
                "column": problem.position.column if problem.position else None,
                "rule": problem.rule,
                "severity": problem.severity,
                "value": problem.value,
                "message": problem.message,
                "remedy": problem.remedy,
            }
            for problem in verdict.problems
        ],
    }


@dataclass(frozen=True, slots=True)
class Place:
    """A server, its place among the servers ordered by lowest rank, and the super pod that it is in."""

    server: Server
    node_rank: int
    super_pod_id: str | None

    @property
    def members(self) -> dict[str, object]:
        """What the table says of the server beside its devices; None for what it does not say."""
        server = self.server
        named = {"host_ip": server.host_ip, "pod_ip": server.pod_ip, "group": server.group}
        return {**named, "super_pod_id": self.super_pod_id}

    def describe(self, device: Device) -> dict[str, object]:
        """Return where a device of the server is, as an object for JSON; null for what the table does not say."""
        return {
            "rank_id": device.rank_id,
            "server_id": self.server.server_id,
            "node_rank": self.node_rank,
            "local_rank": sum(other.rank_id < device.rank_id for other in self.server.devices),
            "device_id": device.device_id,
            "device_ip": device.device_ip,
            "super_device_id": device.super_device_id,
            **self.members,
        }


def list_servers(table: RankTable) -> tuple[Place, ...]:
    """Return the servers in the order of their ranks; in the order of the file where ranks start again in groups."""
    ranks = [device.rank_id for _, device in table.placements]
    servers = table.servers_by_rank if len(set(ranks)) == len(ranks) else table.servers
    pods = {server_id: pod.super_pod_id for pod in table.super_pods for server_id in pod.server_ids}
    return tuple(Place(server, place, pods.get(server.server_id)) for place, server in enumerate(servers))


def list_ranks(table: RankTable, global_rank: int | None = None) -> list[tuple[Place, Device]]:
    """Return every device with its server by rank, or those of one rank: several where each group has ranks from 0.

    Raises RankNotFoundError.
    """
    placed = [(place, device) for place in list_servers(table) for device in place.server.devices]
    placed.sort(key=lambda found: found[1].rank_id)
    found = [(place, device) for place, device in placed if global_rank in (None, device.rank_id)]
    if not found and global_rank is not None:
        raise RankNotFoundError(f"no device of the table has rank {global_rank}", f"it has {table.world_size} devices")
    return found


def render_rank(place: Place, device: Device) -> str:
    """Return where a device is as lines of name and value; what the table does not say is left out."""
    rows = {name: plain(str(value)) for name, value in place.describe(device).items() if value is not None}
    for noun, extra in (("server", place.server.extra), ("device", device.extra)):
        plain_values = {key: value for key, value in extra.items() if not isinstance(value, dict | list)}
        rows |= {f"{noun} {plain(key)}": plain(str(value)) for key, value in plain_values.items()}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def overview_as_json(table: RankTable) -> dict[str, object]:
    """Return the table as an object for JSON: counts, super pods, and every server in the order of rank."""
    return {
        "dialect": table.dialect,
        "status": table.status,
        "world_size": table.world_size,
        "super_pods": [{"super_pod_id": pod.super_pod_id, "servers": list(pod.server_ids)} for pod in table.super_pods],
        "servers": [
            {
                "server_id": place.server.server_id,
                "node_rank": place.node_rank,
                "ranks": [device.rank_id for device in place.server.devices],
                "device_ids": [device.device_id for device in place.server.devices],
                "device_ips": [device.device_ip for device in place.server.devices],
                **place.members,
            }
            for place in list_servers(table)
        ],
    }


def render_overview(table: RankTable) -> str:
    """Return the table as lines, one per server in the order of rank."""
    has = {
        "super pod": bool(table.super_pods),
        "group": any(server.group for server in table.servers),
        "device_ip": any(device.device_ip for _, device in table.placements),
    }
    headings = ["server", "ranks", "devices", *(heading for heading, is_there in has.items() if is_there)]
    rows = [headings]
    for place in list_servers(table):
        cells = {
            "server": plain(place.server.server_id),
            "ranks": fold_numbers(place.server.ranks, ",") or "-",
            "devices": fold_numbers((device.device_id for device in place.server.devices), ",") or "-",
            "super pod": plain(place.super_pod_id or "-"),
            "group": plain(place.server.group or "-"),
            "device_ip": ", ".join(plain(device.device_ip or "-") for device in place.server.devices),
        }
        rows.append([cells[heading] for heading in headings])
    return "\n".join([_head(table), *(["", *_columns(rows)] if rows[1:] else [])])


def render_table(table: RankTable) -> str:
    """Return the table as plain columns, one line per rank in ascending order."""
    rows = [["rank", "server_id", "device_id", "device_ip"]]
    for place, device in list_ranks(table):
        number, address = str(device.device_id), plain(device.device_ip or "-")
        rows.append([str(device.rank_id), plain(place.server.server_id), number, address])
    return "\n".join([_head(table), *_columns(rows)])


def _head(table: RankTable) -> str:
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    return f"version {plain(table.dialect)}, status {plain(table.status)}, {size}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]


def render_kind(kind: FileKind) -> str:
    """Return what the file is, and below it what is known of it."""
    facts = kind.facts
    lines = [f"    {key + ':':<10}{plain(facts[key])}" for key in ("dialect", "evidence", "consumer", "advice")]
    return "\n".join([f"{kind.source}: {kind.dialect.title}", *lines])


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
    lines: Iterator[tuple[str, str]] = (
        (entry.rule_id, source) for entry in rules for source in entry.sources or ("none: it only warns",)
    )
    return "".join(f"{rule_id:<4}  {source}\n" for rule_id, source in lines)
