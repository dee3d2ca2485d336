"""`ranktable validate`: every file against every rule. `ranktable check --local`: and against this host."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from ranktable.commands import FORMAT, Outcome, chip_option, judge_each, reader_option, target_option, worst_of
from ranktable.errors import (
    EXIT_VALID,
    ReadError,
)
from ranktable.local import LocalServer, check_file
from ranktable.report.findings import Unjudged, Verdict, render_report, render_unjudged, render_verdicts_json
from ranktable.rules.registry import LOCAL_RULES
from ranktable.validate import Report, validate_file

_RULES = "\n".join(f"{rule}  {title}" for rule, title in LOCAL_RULES.items())


@click.command(short_help="Check tables against every rule and list all problems.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--format", "form", type=click.Choice(["text", "json", "sarif"]), default="text", show_default=True)
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option("--quiet", is_flag=True, help="Text only: leave out files that pass, and warnings unless --strict.")
@target_option("For which devices to check: cpu and gpu tables need no device_ip and follow none of Ascend's rules.")
@chip_option("Hold the table to the rules of this chip; without it they are warnings.")
@reader_option("Hold the table to what this reader demands beyond the rules that all share.")
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
    quiet: bool,
    device_target: str,
    chip: str | None,
    profile: str | None,
    network_plan: int | None,
) -> Outcome:
    """Check each FILE against every rule and list all problems; - is standard input."""

    def judge(name: str) -> Report:
        return validate_file(name, device_target=device_target, chip=chip, profile=profile, network_plan=network_plan)

    verdicts: list[Verdict] = []
    codes: list[int] = []
    for name, found in judge_each(files, form, judge):
        verdicts.append(found if isinstance(found, Report) else Unjudged(name, found.message, found.remedy))
        codes.append(found.exit_code(strict=strict) if isinstance(found, Report) else found.exit_code)
    worst = worst_of(codes)
    return Outcome(_render(verdicts, form, worst, strict=strict, quiet=quiet), exit_code=worst)


def _render(verdicts: Sequence[Verdict], form: str, exit_code: int, *, strict: bool, quiet: bool) -> str:
    if form == "sarif":
        from ranktable.report.findings import render_sarif

        return render_sarif(verdicts, exit_code)
    if form == "json":
        return render_verdicts_json(verdicts)
    loud = [verdict for verdict in verdicts if not quiet or _has_to_be_said(verdict, strict=strict)]
    return "".join(f"{_render_text(verdict, shows_warnings=strict or not quiet)}\n" for verdict in loud)


def _has_to_be_said(verdict: Verdict, *, strict: bool) -> bool:
    return isinstance(verdict, Unjudged) or verdict.exit_code(strict=strict) != EXIT_VALID


def _render_text(verdict: Verdict, *, shows_warnings: bool) -> str:
    if isinstance(verdict, Unjudged):
        return render_unjudged(verdict)
    return render_report(verdict, shows_warnings=shows_warnings)


@click.command(
    short_help="Check a table as validate does, and against this host.",
    epilog=f"\b\nBeside the rules of validate:\n{_RULES}",
)
@click.argument("file", required=False, metavar="[FILE]")
@click.option("--local", is_flag=True, help="Hold the table against this host.")
@click.option("--root", metavar="DIR", default="/", help="Where the host's /dev, /etc and /proc are.")
@FORMAT
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@target_option("Which devices the host is to have; only ascend has device addresses to compare.")
@chip_option("As for validate.")
def check(
    file: str | None, local: bool, root: str, form: str, strict: bool, device_target: str, chip: str | None
) -> Outcome:
    """Check FILE (by default $RANK_TABLE_FILE) as validate does, and against this host.

    Run it on each host before the job: is the host in the table, are its devices here, are their addresses right.
    """
    if not local:
        raise click.UsageError("say what to check against: --local is this host")
    path = file or os.environ.get("RANK_TABLE_FILE")
    if path is None or path == "-":
        raise click.UsageError("name the file that the job reads, or set RANK_TABLE_FILE")
    from ranktable.report.findings import render_report, render_verdicts_json

    try:
        found = check_file(path, device_target=device_target, chip=chip, root=root)
    except ReadError as error:
        if file is not None:
            raise
        remedy = "correct RANK_TABLE_FILE: torch_npu goes on without a table when it cannot read it"
        raise ReadError(error.source, error.reason, remedy) from error
    report = found.report
    text = render_verdicts_json([report]) if form == "json" else render_report(report) + "\n"
    return Outcome(text, tuple(map(_describe, found.servers)), report.exit_code(strict=strict))


def _describe(server: LocalServer) -> str:
    ranks = server.ranks
    row = f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
    return f"this host is server {server.server_id} of the table, with {row}"
