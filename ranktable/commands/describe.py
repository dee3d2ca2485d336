"""The commands detect and rules."""

from __future__ import annotations

import click

from ranktable.codec.detect import DIALECT_NAMES
from ranktable.commands.outcome import Outcome
from ranktable.errors import RankTableError
from ranktable.profile import CHIPS, READERS
from ranktable.report.listing import render_rules, rules_as_json
from ranktable.rules import registered_rules

_FORMATS = click.Choice(["text", "json"])


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--format", "form", type=_FORMATS, default="text", show_default=True)
def detect(files: tuple[str, ...], form: str) -> Outcome:
    """Say what each FILE is, why, who reads it, and whether it can be read here; - is standard input.

    The exit status is 0 when every file is of a known kind (also one that is no rank table), 1 when one is not or is
    no JSON, 2 when one cannot be opened.
    """
    from ranktable.codec.layout import render_json
    from ranktable.detection import detect_file
    from ranktable.report.listing import kind_as_json, render_kind

    texts: list[str] = []
    objects: list[dict[str, object]] = []
    worst = 0
    for name in files:
        try:
            kind = detect_file(name)
            texts.append(render_kind(kind))
            objects.append(kind_as_json(kind))
            worst = max(worst, kind.exit_code)
        except RankTableError as error:
            if len(files) == 1 and form == "text":
                raise
            texts.append(f"ranktable: error: {error}")
            objects.append({"file": name, "error": error.message, "remedy": error.remedy})
            worst = max(worst, error.exit_code)
    return Outcome(render_json(objects) if form == "json" else "\n".join(texts) + "\n", exit_code=worst)


@click.command()
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--dialect", type=click.Choice(DIALECT_NAMES), metavar="NAME", help="Only the rules of this dialect.")
@click.option(
    "--chip",
    type=click.Choice(CHIPS, case_sensitive=False),
    metavar=f"[{'|'.join(CHIPS)}]",
    help="Only the rules that hold for this chip.",
)
@click.option(
    "--profile",
    type=click.Choice(READERS, case_sensitive=False),
    metavar=f"[{'|'.join(READERS)}]",
    help="Only the rules that this reader's tables are held to.",
)
def rules(form: str, dialect: str | None, chip: str | None, profile: str | None) -> Outcome:
    """List the rules that `validate` holds tables to: id, severity, chips, profiles, and what each asks for."""
    chosen = [
        entry
        for entry in registered_rules()
        if (dialect is None or dialect in entry.dialects)
        and (chip is None or not entry.chips or chip in entry.chips)
        and (profile is None or not entry.readers or profile in entry.readers)
    ]
    return Outcome(rules_as_json(chosen) if form == "json" else render_rules(chosen))
