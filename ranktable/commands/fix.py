"""`ranktable fix`: the mechanical faults of a table repaired, and what is left for a person."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranktable.commands import Outcome, profile_options

if TYPE_CHECKING:
    from ranktable.edit.repair import Repair
    from ranktable.validate import Report

_STDIN = "-"
_SHOWN_REPEATS = 3


@click.command(short_help="Repair what is mechanical, and list each repair.")
@click.argument("file", metavar="FILE")
@click.option("-o", "--output", metavar="OUT", help="Where to write the repaired table; - is standard output.")
@click.option("--in_place", is_flag=True, help="Write the repaired table to FILE itself.")
@click.option("--backup", is_flag=True, help="With --in_place: keep FILE as it was in FILE.orig.")
@click.option("--reorder", is_flag=True, help="Number the ranks anew in the string order of the server ids.")
@click.option("--all", "list_all", is_flag=True, help="List every repair; without it, repeats are counted.")
@profile_options
def fix(
    file: str,
    output: str | None,
    in_place: bool,
    backup: bool,
    reorder: bool,
    list_all: bool,
    device_target: str,
    chip: str | None,
) -> Outcome:
    """Repair what is mechanical in FILE, list each repair, and check the result.

    Without -o and --in_place nothing is written: what would change is shown as a diff. A table in which nothing can be
    repaired is not written either, unless it is valid: then OUT is a copy.

    Repaired are types, counts, comments, trailing commas, encodings, misspelt keys, blanks and keys that stand twice.
    Ids and addresses are never made up, and the status is never changed. Exits with 0 when the result is valid, with
    1 when problems are left for a person, which are listed.
    """
    from ranktable.edit.fix import fix_table
    from ranktable.files import STDIN_NAME, read_source
    from ranktable.profile import build_profile
    from ranktable.reading.document import parse_document
    from ranktable.text import render_json
    from ranktable.validate import validate_document

    target = _choose_target(file, output, in_place=in_place, backup=backup)
    profile = build_profile(device_target, chip)
    source, data = read_source(file)
    fixed = fix_table(data, source, reorder=reorder)
    text = render_json(fixed.value)
    is_printed = target in (_STDIN, None)
    result = parse_document(text.encode("utf-8"), STDIN_NAME if target is None or is_printed else target)
    report = validate_document(result, profile)
    report = replace(report, source="the result") if is_printed else report
    notes = [*_list_repairs(fixed.repairs, list_all=list_all), *fixed.notes, *_explain_status(report)]
    if target is None:
        shown = _show_changes(data, text, source) if fixed.repairs else ""
        notes.append("nothing is written; give --in_place, or -o OUT")
        return _print(shown, notes, report)
    if is_printed:
        return _print(text, notes, report)
    if in_place and not fixed.repairs:
        notes.append(f"{file} is left as it is: nothing in it can be repaired mechanically")
    elif not fixed.repairs and report.exit_code():
        notes.append(f"{target} is not written: nothing in {file} can be repaired mechanically")
    else:
        notes += _write(file, target, text, data if backup else None)
    return _print("", notes, report)


def _choose_target(file: str, output: str | None, *, in_place: bool, backup: bool) -> str | None:
    """Return where the result goes; None for a preview."""
    if output is not None and in_place:
        raise click.UsageError("-o names another file than --in_place; leave one of them out")
    if backup and not in_place:
        raise click.UsageError("--backup goes with --in_place; leave it out")
    if not in_place:
        return output
    if file == _STDIN:
        raise click.UsageError("--in_place needs a file, not standard input")
    # A link stays a link: what it points at is repaired.
    return os.path.realpath(file)


def _show_changes(data: bytes, text: str, source: str) -> str:
    """Return the difference between the file and its repaired form, as `diff -u` shows it."""
    before, after = data.decode("utf-8", "replace").splitlines(keepends=True), text.splitlines(keepends=True)
    return "".join(unified_diff(before, after, source, f"{source} (repaired)"))


def _list_repairs(repairs: Sequence[Repair], *, list_all: bool) -> list[str]:
    """Return a line for each repair; of many of one kind the first three and a count."""
    if not repairs:
        return ["nothing to repair"]
    lines: list[str] = []
    for _, group in groupby(sorted(repairs, key=_kind_of), key=_kind_of):
        alike = list(group)
        shown = alike if list_all or len(alike) <= _SHOWN_REPEATS + 1 else alike[:_SHOWN_REPEATS]
        lines += [f"repaired {repair}" for repair in shown]
        if len(shown) < len(alike):
            lines.append(f"repaired {alike[0].rule}: and {len(alike) - len(shown)} more like this (--all lists them)")
    return lines


def _kind_of(repair: Repair) -> tuple[int, str]:
    """What makes repairs alike: the rule and the key."""
    return int(repair.rule[1:]), repair.path.rpartition(".")[2]


def _explain_status(report: Report) -> list[str]:
    if report.is_ready and not any(problem.rule == "R3" for problem in report.problems):
        return []
    return ["the status is left as it is: only the producer of a table knows whether it is complete"]


def _write(file: str, target: str, text: str, original: bytes | None) -> list[str]:
    from ranktable.files import DEFAULT_MODE, write_bytes

    is_same = Path(target).exists() and Path(file).exists() and Path(target).samefile(file)
    mode = stat.S_IMODE(Path(target).stat().st_mode) if is_same else DEFAULT_MODE
    notes = []
    if original is not None:
        kept = f"{target}.orig"
        if os.path.lexists(kept):
            raise click.UsageError(f"{kept} is there already; move it away, or leave --backup out")
        write_bytes(kept, original, mode=mode)
        notes.append(f"kept the original as {kept}")
    write_bytes(target, text.encode("ascii"), mode=mode)
    return [*notes, f"wrote {target}"]


def _print(text: str, notes: list[str], report: Report) -> Outcome:
    """Put the findings where the table is not."""
    from ranktable.report.findings import render_report

    findings = render_report(report)
    if text:
        return Outcome(text, (*notes, *findings.splitlines()), report.exit_code())
    return Outcome(findings + "\n", tuple(notes), report.exit_code())
