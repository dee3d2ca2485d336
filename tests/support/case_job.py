"""One job that runs the asked cases of a module of tests/cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from job_runner import JobRunner
from only_cases import ONLY_CASES

Outcomes = dict[str, list[dict[str, Any]]]
"""Name of a case -> what each rank returned, or its traceback as "error"."""


def run_cases(
    msrun: JobRunner, request: pytest.FixtureRequest, workers: Path, folder: Path, module: str, table: CaseTable,
    deadline_s: float,
) -> Outcomes:  # fmt: skip
    """Run the cases of a module that the selected tests look at, on two ranks."""
    result = folder / "result.json"
    program, env = workers / "runtime" / "modes.py", table.asked(request)
    msrun.run_world(2, program, result, module, cwd=folder, env=env, deadline_s=deadline_s)
    found: Outcomes = json.loads(result.read_text())
    return found


def run_cases_of_sizes(
    msrun: JobRunner, request: pytest.FixtureRequest, workers: Path, folder: Path, module: str, table: CaseTable,
    deadline_s: float,
) -> Outcomes:  # fmt: skip
    """Run the cases of a module whose keys begin with the number of ranks, `2/case`: one job of each number."""
    env = table.asked(request)
    program, found = workers / "runtime" / "modes.py", Outcomes()
    for size in sorted({int(key.partition("/")[0]) for key in json.loads(env[ONLY_CASES])}):
        result = folder / f"{size}.json"
        msrun.run_world(size, program, result, module, cwd=folder, env=env, deadline_s=deadline_s)
        found |= json.loads(result.read_text())
    return found


def errors_of(outcomes: Outcomes, case: str) -> list[str]:
    """Return the tracebacks of a case, with their ranks."""
    return [f"rank {rank}: {found['error']}" for rank, found in enumerate(outcomes[case]) if "error" in found]
