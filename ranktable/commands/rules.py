"""`ranktable rules`: every rule of the register, for people and for programs."""

from __future__ import annotations

import click

from ranktable.codec.detect import DIALECT_NAMES
from ranktable.commands.outcome import Outcome
from ranktable.profile import CHIPS, READERS
from ranktable.report.listing import render_rules, rules_as_json
from ranktable.rules import registered_rules


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
