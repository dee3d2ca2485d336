"""Several programs in one job, `msrun -n 1 a.py : -n 3 b.py`, as mpirun has it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msrun.cli.aliases import ALIASES
from msrun.cli.words import underscored
from msrun.errors import UsageError
from msrun.planning.program import DEFAULT_ROLE, Program, join_programs, parse_program

COLON = ":"
"""Begins another program where one of its options follows."""
_OPTIONS = {name: "worker_num" for name, own in ALIASES.items() if own == "--worker_num={}"}
_OPTIONS |= {"--worker_num": "worker_num", "--role": "role"}


@dataclass(frozen=True)
class OtherProgram:
    """A program after a colon."""

    words: tuple[str, ...]
    worker_num: int
    role: str = DEFAULT_ROLE
    is_module: bool = False


def take_programs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `others`, the programs after colons, and with the number of workers of all.

    Raises:
        UsageError: a program without a number of workers, or that cannot be read.
    """
    words = tuple(options["words"])
    ends = [index for index in range(len(words) - 1) if words[index] == COLON and _option(words[index + 1])]
    if not ends:
        return {**options, "others": ()}
    if not isinstance(options["worker_num"], int):
        raise UsageError(f"{words[0]}: one of several programs; give each its number of workers, as in -n 1 before it")
    bounds = [*ends, len(words)]
    others = [_read(words[start + 1 : end]) for start, end in itertools.pairwise(bounds)]
    total = options["worker_num"] + sum(one.worker_num for one in others)
    return {**options, "words": words[: ends[0]], "others": tuple(others), "worker_num": total}


def build_program(options: Mapping[str, Any], working_directory: Path) -> Program:
    """Return what the job runs (UsageError: a program that does not exist)."""
    first = parse_program(options["words"], is_module=options["module"], working_directory=working_directory)
    others: Sequence[OtherProgram] = options.get("others", ())
    found = [(first, options["role"], (options["worker_num"] or 1) - sum(one.worker_num for one in others))]
    for one in others:
        program = parse_program(one.words, is_module=one.is_module, working_directory=working_directory)
        found.append((program, one.role, one.worker_num))
    flags = {"has_rank_args": options["rank_args"], "passes_local_rank": options["pass_local_rank"]}
    return join_programs([(replace(program, role=role, **flags), count) for program, role, count in found])


def _option(word: str) -> str:
    name = underscored(word.partition("=")[0])
    return "module" if name in ("-m", "--module") else _OPTIONS.get(name, "")


def _read(words: Sequence[str]) -> OtherProgram:
    rest = list(words)
    given: dict[str, Any] = {}
    while rest and rest[0].startswith("-"):
        name, has_value, value = rest.pop(0).partition("=")
        kind = _option(name)
        if not kind:
            raise UsageError(
                f"{name} after a colon: only -n N, --role NAME and -m stand there; give it before the first"
            )
        if kind == "module":
            given["is_module"] = True
            continue
        if not has_value:
            value = rest.pop(0) if rest else ""
        if kind == "worker_num" and not (value.isascii() and value.isdigit() and int(value[:9]) > 0):
            raise UsageError(f"{name} {value}: give the number of workers of this program, 1 or more")
        given[kind] = int(value[:9]) if kind == "worker_num" else value
    if not rest or "worker_num" not in given:
        raise UsageError(f"{COLON} {' '.join(words)}: give a number of workers and a program, as in {COLON} -n 3 b.py")
    return OtherProgram(tuple(rest), **given)
