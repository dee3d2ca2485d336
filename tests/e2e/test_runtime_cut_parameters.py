"""torch's own habits on cut parameters: the numbers of one process, or one line that says what to use instead.

The cases stand in tests/cases/cut_parameters.py; one job of two ranks runs them all.
"""

from __future__ import annotations

from pathlib import Path

import cut_parameters
import pytest
from asked_cases import CaseTable
from case_job import Outcomes, errors_of, run_cases
from job_runner import JobRunner

DEADLINE_S = 240.0
CASES = list(cut_parameters.cases(2))
TABLE = CaseTable(CASES, fast=["torchs_clipping_is_global"], key=lambda case: case)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    folder = tmp_path_factory.mktemp("cut-parameters")
    return run_cases(msrun_of_module, request, workers, folder, "cut_parameters", TABLE, DEADLINE_S)


@TABLE.parametrize("case", [(case,) for case in CASES])
def test_cut_parameters(outcomes: Outcomes, case: str) -> None:
    assert errors_of(outcomes, case) == []
