"""Training loops as strangers write them, in every layout: the numbers of one process, or one error that says why not.

The cases stand in tests/cases/training_loops.py; one job of each size runs them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import training_loops
from asked_cases import CaseTable
from case_job import Outcomes, errors_of, run_cases_of_sizes
from job_runner import JobRunner

DEADLINE_S = 480.0
SIZES = (2, 4)
KEYS = [(size, case) for size in SIZES for case in training_loops.names()]
TABLE = CaseTable(
    [f"{size}/{case}" for size, case in KEYS],
    fast=[f"2/{case}" for case in training_loops.names() if case.endswith("/fsdp2")][:8],
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    folder = tmp_path_factory.mktemp("training-loops")
    return run_cases_of_sizes(msrun_of_module, request, workers, folder, "training_loops", TABLE, DEADLINE_S)


@TABLE.parametrize("size, case", KEYS)
def test_loop_trains_to_the_numbers_of_one_process_or_is_refused(outcomes: Outcomes, size: int, case: str) -> None:
    assert errors_of(outcomes, f"{size}/{case}") == []
