"""`ranktable validate`: every file against every rule."""

from __future__ import annotations

import click

from ranktable.commands.outcome import Outcome
from ranktable.errors import EXIT_NOT_READY, EXIT_PROBLEMS, EXIT_USAGE, EXIT_VALID, RankTableError
from ranktable.profile import CHIPS, DEVICE_TARGETS, READERS
from ranktable.report.findings import render_report, render_reports_json, report_as_json
from ranktable.validate import validate_file

# The worst of several files decides: what could not be judged, then what is wrong, then what is not ready.
_BY_WEIGHT = (EXIT_USAGE, EXIT_PROBLEMS, EXIT_NOT_READY, EXIT_VALID)

_TARGET_HELP = "For which devices to check: cpu and gpu tables need no device_ip and follow none of Ascend's rules."


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option(
    "--device_target",
    type=click.Choice(DEVICE_TARGETS, case_sensitive=False),
    default="ascend",
    show_default=True,
    help=_TARGET_HELP,
)
@click.option(
    "--chip",
    type=click.Choice(CHIPS, case_sensitive=False),
    metavar=f"[{'|'.join(CHIPS)}]",
    help="Hold the table to the rules of this chip; without it they are warnings.",
)
@click.option(
    "--profile",
    type=click.Choice(READERS, case_sensitive=False),
    metavar=f"[{'|'.join(READERS)}]",
    help="Hold the table to what this reader demands beyond the rules that all share.",
)
@click.option(
    "--network_plan",
    type=click.IntRange(1, 128),
    metavar="BITS",
    help="Hold device addresses to the usual network plan (R23), with segments of this prefix length, such as 24.",
)
def validate(
    files: tuple[str, ...],
    form: str,
    strict: bool,
    device_target: str,
    chip: str | None,
    profile: str | None,
    network_plan: int | None,
) -> Outcome:
    """Check each FILE against every rule and list all problems; - is standard input."""
    texts: list[str] = []
    objects: list[dict[str, object]] = []
    codes: list[int] = []
    for name in files:
        try:
            report = validate_file(
                name, device_target=device_target, chip=chip, profile=profile, network_plan=network_plan
            )
            texts.append(render_report(report))
            objects.append(report_as_json(report))
            codes.append(report.exit_code(strict=strict))
        except RankTableError as error:
            if len(files) == 1 and form == "text":
                raise
            texts.append(f"ranktable: error: {error}")
            objects.append({"file": name, "error": error.message, "remedy": error.remedy})
            codes.append(error.exit_code)
    worst = next(code for code in _BY_WEIGHT if code in codes)
    text = render_reports_json(objects) if form == "json" else "\n".join(texts) + "\n"
    return Outcome(text, exit_code=worst)
