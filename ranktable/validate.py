"""Holds a table against every rule in one run and lists all that it breaks."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from operator import attrgetter

from ranktable.document import Document, locate_paths, read_document
from ranktable.errors import EXIT_NOT_READY, EXIT_PROBLEMS, EXIT_VALID, BuildError, JsonTextError, UnknownDialectError
from ranktable.files import STDIN_NAME
from ranktable.kinds import Detection, dialect_of
from ranktable.model import INITIALIZING, Entry, RankTable
from ranktable.problem import Position, Problem
from ranktable.profile import ANY_TARGET, Profile, build_profile
from ranktable.record import Record
from ranktable.rules import EVERYWHERE, registered_rules
from ranktable.tables import detect_table, encode_document

_MAX_BYTES = 40 * 1024 * 1024
"""Largest file that HCCL reads."""


class Report(Record):
    """What the validation of one file found."""

    source: str
    profile: Profile
    problems: tuple[Problem, ...]
    detection: Detection | None = None
    """The dialect and the keys that gave it away; None when the text is no table at all."""
    is_ready: bool = True
    """False when the status is "initializing": then only the status is reported."""
    num_servers: int = 0
    num_devices: int = 0

    @property
    def dialect(self) -> str | None:
        """Short name of the dialect, such as "1.0"; None when the text is no table at all."""
        return None if self.detection is None else self.detection.dialect.name

    @property
    def num_errors(self) -> int:
        """How many of the problems are errors."""
        return sum(problem.is_error for problem in self.problems)

    @property
    def num_warnings(self) -> int:
        """How many of the problems are warnings."""
        return len(self.problems) - self.num_errors

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 valid, 1 problems, 3 not ready. `strict` counts warnings as problems."""
        if not self.is_ready:
            return EXIT_NOT_READY
        return EXIT_PROBLEMS if self.num_errors or (strict and self.problems) else EXIT_VALID


def validate_table(
    table: RankTable, *, device_target: str = "ascend", chip: str | None = None, profile: str | None = None
) -> tuple[Problem, ...]:
    """Return every problem of `table`, structure first, then rule by rule; empty when there is not even a warning.

    `device_target` is "ascend", "gpu" or "cpu": the last two have no `device_ip` and none of Ascend's rules.
    `chip` is "910a", "a2", "a3", "a5", "300i-duo" or None: it turns the warnings of its own rules into errors.
    `profile` is "hccl", "mindspore" or None: it adds what that reader demands.
    Raises BuildError for other names and for a dialect that is only read (see `validate_file`).
    """
    return judge_table(table, build_profile(device_target, chip, profile))


def judge_table(table: RankTable, profile: Profile) -> tuple[Problem, ...]:
    """Return every problem of `table` as `validate_table` does, for a profile that is built already."""
    value, kind = encode_document(table), dialect_of(table.dialect)
    return (*kind.check_structure(value), *_apply_rules(kind.read(Entry(members=value), kind), profile))


def validate_file(
    path: str | os.PathLike[str], *, device_target: str = "ascend", chip: str | None = None, profile: str | None = None
) -> Report:
    """Return the report on the file at `path` (`-` is standard input); a text that is no JSON is a finding too.

    The options are those of `validate_table`.
    Raises BuildError, ReadError for a file that cannot be opened, UnsupportedDialectError for other known tables.
    """
    checked_for = build_profile(device_target, chip, profile)
    try:
        return validate_document(read_document(path), checked_for)
    except JsonTextError as error:
        return Report(error.source, checked_for, (error.problem,))
    except UnknownDialectError as error:
        message = "the object is no rank table of any known kind"
        problem = Problem("", "R2", "error", message, error.remedy, position=Position(1, 1))
        return Report(error.source, checked_for, (problem,))


def validate_document(document: Document, profile: Profile) -> Report:
    """Return the report on a JSON object, with the line of each problem; raises what `detect_table` does."""
    detection = detect_table(document)
    kind = detection.dialect
    table = kind.read(Entry(members=document.value), kind)
    found = [*kind.check_structure(document.value), *_apply_rules(table, profile)]
    is_ready = table.status != INITIALIZING
    problems = [*_check_text(document, profile), *(one for one in found if is_ready or one.rule == "R3")]
    return Report(
        document.source, profile, locate(problems, document), detection, is_ready, len(table.servers), table.world_size
    )


def _apply_rules(table: RankTable, profile: Profile) -> list[Problem]:
    rules = dialect_of(table.dialect).rules | EVERYWHERE
    return [
        problem
        for entry in registered_rules()
        if entry.check and entry.rule_id in rules and (not entry.readers or profile.reader in entry.readers)
        for part in ((table,) if entry.is_whole or not table.groups else table.groups)
        for problem in entry.check(part, profile)
    ]


def _check_text(document: Document, profile: Profile) -> list[Problem]:
    """Return the findings of R1 and R32 that do not keep the text from being read."""
    problems = []
    if document.has_bom:
        message = "the file starts with a byte order mark, which many JSON readers refuse"
        problems.append(Problem("", "R1", "warning", message, "save the file as UTF-8 without it"))
    if profile.is_ascend and document.size_bytes > _MAX_BYTES:
        message = f"the file is larger than {_MAX_BYTES // 1024**2} MiB, the most that HCCL reads"
        problems.append(Problem("", "R1", "error", message, "write it without indentation"))
    if profile.is_ascend and document.source != STDIN_NAME and not document.source.endswith(".json"):
        message = "the file name does not end in .json, which HCCL demands"
        problems.append(Problem("", "R1", "error", message, "rename the file"))
    if profile.is_ascend and profile.reader in (None, "hccl") and document.is_link:
        message = "the file is a symbolic link, as in a mounted ConfigMap; torch_npu refuses one in RANK_TABLE_FILE"
        problems.append(Problem("", "R1", "warning", message, "let the job copy the table to a plain file first"))
    return [*problems, *document.repeated_keys]


def locate(problems: Collection[Problem], document: Document) -> tuple[Problem, ...]:
    """Return the problems with their positions, in the order of the text."""
    if not problems:
        return ()
    places = locate_paths(document.text, {problem.path for problem in problems})
    located = [replace(problem, position=problem.position or places[problem.path]) for problem in problems]
    return tuple(sorted(located, key=attrgetter("position.line", "position.column")))


def hold_to_rules(table: RankTable, profile: Profile, *, only: Collection[str] | None = None) -> tuple[Problem, ...]:
    """Return the warnings that validation gives of a table that was just made; `only` names the rules that count.

    Raises BuildError with the rule for the first error, and the path that it has in the file of the table.
    """
    problems = tuple(problem for problem in judge_table(table, profile) if only is None or problem.rule in only)
    errors = [problem for problem in problems if problem.is_error]
    if not errors:
        return problems
    first = errors[0]
    rules = ", ".join(dict.fromkeys(problem.rule for problem in errors[1:]))
    more = f" and {len(errors) - 1} more of {rules}" if len(errors) > 1 else ""
    target = "" if profile is ANY_TARGET else f" for {profile.chip or profile.device_target}"
    raise BuildError(f"{first.subject}: {first.message} ({first.rule}{target}{more})", first.remedy)
