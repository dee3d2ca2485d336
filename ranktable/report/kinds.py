"""What files are, as lines for people and as JSON for programs."""

from __future__ import annotations

from ranktable.detection import FileKind
from ranktable.report.words import plain


def render_kind(kind: FileKind) -> str:
    """Return the name of the kind after that of the file, and below it what is known of it."""
    here = "read, validated and converted" if kind.is_supported else "known by name only"
    facts = {
        "dialect": kind.dialect,
        "evidence": kind.evidence,
        "read by": kind.consumer,
        "here": here if kind.dialect else "",
        "advice": kind.advice,
    }
    lines = [f"    {name + ':':<10}{plain(text)}" for name, text in facts.items() if text]
    return "\n".join([f"{kind.source}: {kind.title}", *lines])


def kind_as_json(kind: FileKind) -> dict[str, object]:
    """Return the kind as an object for JSON."""
    return {
        "file": kind.source,
        "dialect": kind.dialect,
        "title": kind.title,
        "evidence": kind.evidence,
        "consumer": kind.consumer,
        "supported": kind.is_supported,
        "advice": kind.advice,
    }
