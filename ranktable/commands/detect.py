"""`ranktable detect`: what each file is."""

from __future__ import annotations

import click

from ranktable.commands.outcome import Outcome
from ranktable.errors import RankTableError

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
