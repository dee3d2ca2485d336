"""The tables of docs/architecture.md that draw how a value passes through the launcher, and jobs that are followed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from job_runner import REPOSITORY

RECORDER = REPOSITORY / "tests" / "support" / "call_record"
PAGE = REPOSITORY / "docs" / "architecture.md"
WAYS = ("one host", "several hosts")


@dataclass(frozen=True)
class Step:
    """A row of such a table."""

    shared: tuple[str, ...]
    """Functions that the row names for all its ways."""
    by_way: tuple[tuple[str, ...], ...]
    """Functions of each way, in the order of WAYS; empty where the way leaves the step out."""


def read_walk(heading: str) -> list[Step]:
    """Return the steps of the table below a heading."""
    text = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert tuple(rows[0][2:]) == WAYS, rows[0]
    steps = []
    for _, what, *cells in rows[2:]:
        shared = _names(what)
        steps.append(Step(shared, tuple((*shared, *_names(cell)) if cell else () for cell in cells)))
    return steps


def _names(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([\w.]+)`", cell))


class FollowedJob:
    """Records which functions of a walk are given a value, in all processes of a job."""

    def __init__(self, folder: Path, steps: list[Step], value: str) -> None:
        """`value`: a pattern of its text."""
        self.path = folder / "calls.jsonl"
        names = sorted({name for step in steps for way in (step.shared, *step.by_way) for name in way})
        self.variables = {
            "PYTHONPATH": os.pathsep.join([str(RECORDER), str(REPOSITORY)]),
            "CALL_RECORD_FILE": str(self.path),
            "CALL_RECORD_NAMES": " ".join(names),
            "CALL_RECORD_VALUE": value,
        }

    def interpreter(self) -> Path:
        """Return an interpreter for hosts to which no variable of the launcher goes."""
        path = self.path.with_name("python")
        words = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        path.write_text("\n".join(["#!/bin/sh", *words, f'exec {sys.executable} "$@"', ""]))
        path.chmod(0o755)
        return path

    def first_moments(self) -> dict[str, int]:
        """Return for each function that had the value when it was called first with it."""
        calls: dict[str, int] = {}
        for line in self.path.read_text().splitlines():
            call = json.loads(line)
            if call["holds"]:
                calls[call["name"]] = min(call["at"], calls.get(call["name"], call["at"]))
        return calls
