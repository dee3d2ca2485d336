"""Model in every mode: what one process evaluates, predicts and trains.

The cases stand in tests/cases/model_modes.py; one job of two ranks runs them all.
"""

from __future__ import annotations

from pathlib import Path

import model_modes
import pytest
from asked_cases import CaseTable
from case_job import Outcomes, errors_of, run_cases
from job_runner import JobRunner

DEADLINE_S = 240.0
CASES = list(model_modes.cases(2))
TABLE = CaseTable(CASES, fast=CASES[:1], key=lambda case: case)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    folder = tmp_path_factory.mktemp("model-modes")
    return run_cases(msrun_of_module, request, workers, folder, "model_modes", TABLE, DEADLINE_S)


@TABLE.parametrize("case", [(case,) for case in CASES])
def test_model_in_a_mode(outcomes: Outcomes, case: str) -> None:
    assert errors_of(outcomes, case) == []
