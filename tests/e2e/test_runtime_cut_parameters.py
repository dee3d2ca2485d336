"""torch's own habits on cut parameters: the numbers of one process, or one line that says what to use instead.

The cases stand in tests/cases/cut_parameters.py; one job of two ranks runs them all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cut_parameters
import pytest
from asked_cases import CaseTable
from job_runner import JobRunner

DEADLINE_S = 240.0
CASES = list(cut_parameters.cases(2))
TABLE = CaseTable(
    CASES, fast=[case for case in CASES[::3] if not case.startswith("element_wise")], key=lambda case: case
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("cut-parameters")
    msrun_of_module.run_world(
        2,
        workers / "runtime" / "modes.py",
        folder / "result.json",
        "cut_parameters",
        cwd=folder,
        env=TABLE.asked(request),
        deadline_s=DEADLINE_S,
    )
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "result.json").read_text())
    return found


@TABLE.parametrize("case", [(case,) for case in CASES])
def test_cut_parameters(outcomes: dict[str, list[dict[str, Any]]], case: str) -> None:
    errors = [f"rank {rank}: {found['error']}" for rank, found in enumerate(outcomes[case]) if "error" in found]
    assert errors == []
