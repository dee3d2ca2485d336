"""`ranktable validate`: files against every rule; with --local also against this host; with --fix repaired first."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from ranktable.commands import FORMAT, Outcome, choice_option, target_option
from ranktable.errors import EXIT_NOT_READY, EXIT_PROBLEMS, EXIT_USAGE, EXIT_VALID, RankTableError, ReadError
from ranktable.fix import Repair
from ranktable.local import check_file
from ranktable.profile import CHIPS, READERS, build_profile
from ranktable.report import Verdict, render_report, render_verdicts_json
from ranktable.validate import Report, validate_document, validate_file

_STDIN = "-"
_SHOWN_REPEATS = 3


@click.command(short_help="Check tables against every rule, and list all problems; --fix repairs them.")
@click.argument("files", nargs=-1, metavar="FILE...")
@FORMAT
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option("--quiet", is_flag=True, help="Text only: leave out files that pass, and warnings unless --strict.")
@target_option("For which devices to check: cpu and gpu tables need no device_ip and follow none of Ascend's rules.")
@choice_option("--chip", CHIPS, "Hold the table to the rules of this chip; without it they are warnings.")
@choice_option("--profile", READERS, "Hold the table to what this reader demands beyond the rules that all share.")
@click.option("--local", is_flag=True, help="Rules L1 to L7 too: one table, or $RANK_TABLE_FILE, against this host.")
@click.option("--root", metavar="DIR", default="/", help="With --local: where the host's /dev and /etc are.")
@click.option("--fix", is_flag=True, help="Repair what is mechanical in one table; without -o and --in_place: a diff.")
@click.option("-o", "--output", metavar="OUT", help="With --fix: where the repaired table goes; - is standard output.")
@click.option("--in_place", is_flag=True, help="With --fix: write the repaired table to FILE itself.")
def validate(
    files: tuple[str, ...],
    form: str,
    strict: bool,
    quiet: bool,
    local: bool,
    root: str,
    fix: bool,
    output: str | None,
    in_place: bool,
    **options: Any,
) -> Outcome:
    """Check each FILE against every rule and list all problems; - is standard input.

    --fix repairs types, counts, comments, trailing commas, encodings, misspelt keys, blanks and keys that stand twice,
    lists each repair, and checks the result. Ids and addresses are never made up, and the status is never changed.
    """
    if not fix and (output is not None or in_place):
        raise click.UsageError("-o and --in_place go with --fix; leave them out")
    if not local and root != "/":
        raise click.UsageError("--root goes with --local; leave it out")
    if fix and local:
        raise click.UsageError("--fix and --local: repair the table first; give one of the two")
    if (fix or local) and len(files) > 1:
        raise click.UsageError(f"--{'fix' if fix else 'local'} takes one FILE, not {len(files)}")
    if local:
        return _check_local(files[0] if files else None, root, form, strict=strict, options=options)
    if not files:
        raise click.UsageError("Missing argument 'FILE...'")
    if fix:
        return _fix(files[0], _choose_target(files[0], output, in_place=in_place), options)
    build_profile(options["device_target"], options["chip"], options["profile"])  # a mistake in the options, not a file
    verdicts: list[tuple[str, Verdict]] = []
    for name in files:
        try:
            verdicts.append((name, validate_file(name, **options)))
        except RankTableError as error:
            if len(files) == 1 and form == "text":
                raise
            verdicts.append((name, error))
    codes = {_exit_code(verdict, strict=strict) for _, verdict in verdicts}
    worst = next(code for code in (EXIT_USAGE, EXIT_PROBLEMS, EXIT_NOT_READY, EXIT_VALID) if code in codes)
    if form == "json":
        return Outcome(render_verdicts_json(verdicts), exit_code=worst)
    loud = [verdict for _, verdict in verdicts if not quiet or _exit_code(verdict, strict=strict)]
    return Outcome("".join(f"{_render(each, shows_warnings=strict or not quiet)}\n" for each in loud), exit_code=worst)


def _exit_code(verdict: Verdict, *, strict: bool) -> int:
    return verdict.exit_code(strict=strict) if isinstance(verdict, Report) else verdict.exit_code


def _render(verdict: Verdict, *, shows_warnings: bool) -> str:
    if isinstance(verdict, Report):
        return render_report(verdict, shows_warnings=shows_warnings)
    return f"ranktable: error: {verdict}"


def _check_local(file: str | None, root: str, form: str, *, strict: bool, options: dict[str, Any]) -> Outcome:
    path = file or os.environ.get("RANK_TABLE_FILE")
    if path is None or path == _STDIN:
        raise click.UsageError("--local: name the file that the job reads, or set RANK_TABLE_FILE")
    try:
        found = check_file(path, root=root, **options)
    except ReadError as error:
        if file is None:
            error.remedy = "correct RANK_TABLE_FILE: torch_npu goes on without a table when it cannot read it"
        raise
    report = found.report
    text = render_verdicts_json([(path, report)]) if form == "json" else render_report(report) + "\n"
    rows = [f"ranks {s.ranks[0]} to {s.ranks[-1]}" if s.ranks else "no rank" for s in found.servers]
    named = [f"this host is server {server.server_id} of the table, with" for server in found.servers]
    return Outcome(text, tuple(map(" ".join, zip(named, rows, strict=True))), report.exit_code(strict=strict))


def _choose_target(file: str, output: str | None, *, in_place: bool) -> str | None:
    """Return where the result goes; None for a preview."""
    if not in_place:
        return output
    if output is not None:
        raise click.UsageError("-o names another file than --in_place; leave one of them out")
    if file == _STDIN:
        raise click.UsageError("--in_place needs a file, not standard input")
    return os.path.realpath(file)  # a link stays a link: what it points at is repaired


def _fix(file: str, target: str | None, options: dict[str, Any]) -> Outcome:
    """Repair a table. One in which nothing can be repaired is written only as a copy, when it is valid."""
    from ranktable.document import parse_document
    from ranktable.files import STDIN_NAME, read_source
    from ranktable.fix import fix_table
    from ranktable.values import render_json

    reader = options.pop("profile")
    profile = build_profile(reader=reader, **options)
    source, data = read_source(file)
    fixed = fix_table(data, source)
    text = render_json(fixed.value)
    is_printed = target in (_STDIN, None)
    result = parse_document(text.encode("utf-8"), STDIN_NAME if target is None or is_printed else target)
    report = validate_document(result, profile)
    report = replace(report, source="the result") if is_printed else report
    notes = _list_repairs(fixed.repairs)
    if not report.is_ready or any(problem.rule == "R3" for problem in report.problems):
        notes.append("the status is left as it is: only the producer of a table knows whether it is complete")
    if is_printed:
        if target is None:
            before, after = data.decode("utf-8", "replace").splitlines(keepends=True), text.splitlines(keepends=True)
            text = "".join(unified_diff(before, after, source, f"{source} (repaired)")) if fixed.repairs else ""
            notes.append("nothing is written; give --in_place, or -o OUT")
        findings = render_report(report)
        if text:  # the findings stand where the table does not
            return Outcome(text, (*notes, *findings.splitlines()), report.exit_code())
        return Outcome(findings + "\n", tuple(notes), report.exit_code())
    if not fixed.repairs and (report.exit_code() or target == os.path.realpath(file)):
        notes.append(f"{target} is not written: nothing in {file} can be repaired mechanically")
    else:
        notes.append(_write(file, str(target), text))
    return Outcome(render_report(report) + "\n", tuple(notes), report.exit_code())


def _list_repairs(repairs: Sequence[Repair]) -> list[str]:
    """Return a line for each repair; of many of one kind the first three and a count."""
    if not repairs:
        return ["nothing to repair"]
    lines: list[str] = []
    for _, group in groupby(sorted(repairs, key=_kind_of), key=_kind_of):
        alike = list(group)
        shown = alike if len(alike) <= _SHOWN_REPEATS + 1 else alike[:_SHOWN_REPEATS]
        lines += [f"repaired {repair}" for repair in shown]
        if len(shown) < len(alike):
            lines.append(f"repaired {alike[0].rule}: and {len(alike) - len(shown)} more like this")
    return lines


def _kind_of(repair: Repair) -> tuple[int, str]:
    """What makes repairs alike: the rule and the key."""
    return int(repair.rule[1:]), repair.path.rpartition(".")[2]


def _write(file: str, target: str, text: str) -> str:
    from ranktable.files import DEFAULT_MODE, write_bytes

    is_same = Path(target).exists() and Path(file).exists() and Path(target).samefile(file)
    mode = stat.S_IMODE(Path(target).stat().st_mode) if is_same else DEFAULT_MODE
    write_bytes(target, text.encode("ascii"), mode=mode)
    return f"wrote {target}"
