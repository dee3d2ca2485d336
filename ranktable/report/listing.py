"""Lists for people and for programs: the ranks of a table, what a file is, the register of rules."""

from __future__ import annotations

from collections.abc import Sequence

from ranktable.model import RankTable
from ranktable.rules import Rule
from ranktable.tables import FileKind
from ranktable.text import count_noun, plain, render_json

_HEADER = ("rule", "severity", "chips", "profiles", "asks that")


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
