"""Training loops as strangers write them, in every layout: the numbers of one process, or one error that says why not.

The cases stand in tests/cases/training_loops.py; one job of each size runs them all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import training_loops
from asked_cases import CaseTable
from job_runner import JobRunner
from only_cases import ONLY_CASES

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
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    asked = TABLE.asked(request)
    for size in SIZES:
        if any(key.startswith(f"{size}/") for key in json.loads(asked[ONLY_CASES])):
            folder = tmp_path_factory.mktemp("training-loops")
            program, result = workers / "runtime" / "modes.py", folder / "result.json"
            msrun_of_module.run_world(
                size, program, result, "training_loops", cwd=folder, env=asked, deadline_s=DEADLINE_S
            )
            found |= json.loads(result.read_text())
    return found


@TABLE.parametrize("size, case", KEYS)
def test_loop_trains_to_the_numbers_of_one_process_or_is_refused(
    outcomes: dict[str, list[dict[str, Any]]], size: int, case: str
) -> None:
    of_ranks = enumerate(outcomes[f"{size}/{case}"])
    assert [f"rank {rank}: {found['error']}" for rank, found in of_ranks if "error" in found] == []
