"""The register of rules as plain columns and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ranktable.codec.layout import render_json
from ranktable.rules import Rule

_HEADER = ("rule", "severity", "chips", "profiles", "asks that")


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
            }
            for entry in rules
        ]
    )
