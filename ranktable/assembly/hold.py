"""Holds a table that was just built to the rules of its target and chip, so that `validate` finds no error in it."""

from __future__ import annotations

import re

from ranktable.codec import encode_document
from ranktable.codec.codec import codec_of
from ranktable.errors import BuildError
from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules import registered_rules

_ENSURED = frozenset({"R3", "R6", "R9", "R10", "R13", "R14", "R15", "R22", "R24", "R25", "R27"})
"""Rules that the generator keeps by its own checks, or whose keys it does not write.

To look again would double the time for large tables; the tests do, over tables of every kind."""
_SERVER = re.compile(r"server_list\[(\d+)\]")


def hold_to_rules(table: RankTable, profile: Profile) -> tuple[Problem, ...]:
    """Return the warnings that validation will give; raises BuildError with the rule for the first error."""
    problems = find_problems(table, profile)
    errors = [problem for problem in problems if problem.is_error]
    if errors:
        raise BuildError(_describe(errors, table, profile), errors[0].remedy)
    return problems


def find_problems(table: RankTable, profile: Profile) -> tuple[Problem, ...]:
    """Return what `validate` will say of a table that `assemble_table` made; raises BuildError without a codec."""
    value = encode_document(table)
    codec = codec_of(table.dialect)
    survey = codec.survey(value) if codec else None
    return tuple(
        problem
        for entry in registered_rules()
        if entry.check and not entry.readers and entry.rule_id not in _ENSURED
        if survey is not None and survey.dialect in entry.dialects
        for problem in entry.check(survey, profile)
    )


def _describe(errors: list[Problem], table: RankTable, profile: Profile) -> str:
    first = errors[0]
    match = _SERVER.match(first.path)
    where = f"server {table.servers[int(match.group(1))].server_id!r}" if match else "the table"
    rules = ", ".join(dict.fromkeys(problem.rule for problem in errors[1:]))
    more = f" (and {len(errors) - 1} more of {rules})" if len(errors) > 1 else ""
    target = profile.chip or profile.device_target
    return f"{where} breaks rule {first.rule} for {target}: {first.subject}: {first.message}{more}"
