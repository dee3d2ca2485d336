"""torch's own tools in every layout: what one process gets.

The cases stand in tests/cases/torch_tools.py; one job of each size runs them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch_tools
from asked_cases import CaseTable
from case_job import Outcomes, errors_of, run_cases_of_sizes
from job_runner import JobRunner

DEADLINE_S = 240.0
SIZES = (2, 4)
KEYS = [(size, case) for size in SIZES for case in torch_tools.names()]
TABLE = CaseTable([f"{size}/{case}" for size, case in KEYS], fast=[f"2/{case}" for case in torch_tools.names()[::18]])

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    folder = tmp_path_factory.mktemp("torch-tools")
    return run_cases_of_sizes(msrun_of_module, request, workers, folder, "torch_tools", TABLE, DEADLINE_S)


@TABLE.parametrize("size, case", KEYS)
def test_networks_meet_torchs_tools(outcomes: Outcomes, size: int, case: str) -> None:
    assert errors_of(outcomes, f"{size}/{case}") == []
