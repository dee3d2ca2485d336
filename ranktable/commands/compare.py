"""The commands diff and digest."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from ranktable.commands import FORMAT, Outcome
from ranktable.compare import DIGEST_KINDS, DigestKind, FileDigest, digest_file
from ranktable.errors import EXIT_PROBLEMS, EXIT_USAGE, EXIT_VALID, RankTableError
from ranktable.text import plain

_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})", re.IGNORECASE)
_SAME_HELP = "In what the files must be equal; HCCL compares the text, so only bytes are enough for it."


@click.command(short_help="Compare what two tables say.")
@click.argument("first", metavar="FIRST")
@click.argument("second", metavar="SECOND")
@FORMAT
def diff(first: str, second: str, form: str) -> Outcome:
    """Compare what FIRST and SECOND say; the order of servers, devices and keys does not count.

    Exit status: 0 they say the same, 1 they differ, 2 one of them cannot be read. One of them may be -.
    """
    from ranktable.codec import decode_table
    from ranktable.compare import diff_tables
    from ranktable.reading.document import read_document
    from ranktable.report.listing import changes_as_json, render_changes
    from ranktable.text import render_json

    if first == second == "-":
        raise click.UsageError("only one of the two can be standard input")
    try:
        tables = [decode_table(read_document(name)) for name in (first, second)]
    except RankTableError as error:
        return Outcome(notes=(f"error: {error}",), exit_code=EXIT_USAGE)
    changes = diff_tables(*tables)
    is_json = form == "json"
    text = render_json(changes_as_json(changes, first, second)) if is_json else render_changes(changes, first, second)
    return Outcome(text, exit_code=EXIT_PROBLEMS if changes else EXIT_VALID)


@click.command(short_help="Print sha256 of the bytes and of the meaning of tables.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--check", "expected", metavar="DIGEST", help="A sha256 that every FILE must have, of any of the kinds.")
@click.option("--same", type=click.Choice(DIGEST_KINDS), default="bytes", show_default=True, help=_SAME_HELP)
@FORMAT
def digest(files: tuple[str, ...], expected: str | None, same: DigestKind, form: str) -> Outcome:
    """Print sha256 of the bytes and of the meaning of each FILE; - is standard input.

    Every rank of a job must read the same text. Exit status: 0 all files are equal (and are what --check says),
    1 one is not, 2 one cannot be read.
    """
    from ranktable.text import render_json

    digests = [digest_file(name) for name in files]
    faults, notes = _check(digests, expected) if expected is not None else (_compare(digests, same), [])
    if form == "json":
        text = render_json({"files": [_as_json(found) for found in digests], "equal": not faults})
    else:
        text = "".join(_render(found) for found in digests)
    return Outcome(text, (*notes, *faults), EXIT_PROBLEMS if faults else EXIT_VALID)


def _check(digests: Sequence[FileDigest], expected: str) -> tuple[list[str], list[str]]:
    """Return a line for each file that does not have the digest, and one for each that has it."""
    match = _SHA256.fullmatch(expected.strip())
    if match is None:
        raise click.UsageError(f"--check {expected[:80]!r} is no sha256; write the 64 digits that digest prints")
    wanted = match.group(1).lower()
    kinds = [(found.source, found.kind_of(wanted)) for found in digests]
    faults = [f"{source}: none of its digests is {wanted}" for source, kind in kinds if kind is None]
    return faults, [f"{source}: {wanted} is the digest of its {kind}" for source, kind in kinds if kind is not None]


def _compare(digests: Sequence[FileDigest], same: DigestKind) -> list[str]:
    """Return a line for each file that is not equal to the first in the kind asked for."""
    first, *others = digests
    faults = []
    for other in others:
        if other.sha256_of[same] != first.sha256_of[same]:
            is_same = first.sha256_of["meaning"] == other.sha256_of["meaning"]
            what = "other text than, but the same meaning as" if is_same else "another table than"
            faults.append(f"{other.source}: {what} {first.source}")
    return faults


def _render(found: FileDigest) -> str:
    lines = [f"  {kind:<8} {found.sha256_of[kind]}\n" for kind in DIGEST_KINDS]
    return f"{plain(found.source)}\n{''.join(lines)}"


def _as_json(found: FileDigest) -> dict[str, object]:
    sizes = {"size_bytes": found.size_bytes, "servers": found.num_servers, "devices": found.num_devices}
    return {"file": found.source, **sizes, **{f"{kind}_sha256": found.sha256_of[kind] for kind in DIGEST_KINDS}}
