"""`ranktable check --local`: the table against the host that it is read on."""

from __future__ import annotations

import os

import click

from ranktable.commands.outcome import Outcome
from ranktable.errors import ReadError
from ranktable.local import LocalServer, check_file
from ranktable.profile import CHIPS, DEVICE_TARGETS
from ranktable.rules.declared import LOCAL_RULES

_RULES = "\n".join(f"{rule}  {title}" for rule, title in LOCAL_RULES.items())


@click.command(epilog=f"\b\nBeside the rules of validate:\n{_RULES}")
@click.argument("file", required=False, metavar="[FILE]")
@click.option("--local", is_flag=True, help="Hold the table against this host.")
@click.option("--root", metavar="DIR", default="/", help="Where the host's /dev, /etc and /proc are.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option(
    "--device_target",
    type=click.Choice(DEVICE_TARGETS, case_sensitive=False),
    default="ascend",
    show_default=True,
    help="Which devices the host is to have; only ascend has device addresses to compare.",
)
@click.option(
    "--chip", type=click.Choice(CHIPS, case_sensitive=False), metavar=f"[{'|'.join(CHIPS)}]", help="As for validate."
)
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
