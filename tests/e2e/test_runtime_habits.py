"""What people write into networks, on two ranks: the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from job_runner import JobRunner
from runtime_habits import HABITS, WORLD_SIZE

DEADLINE_S = 300.0
TABLE = CaseTable(
    HABITS,
    fast=[name for name in HABITS if not name.endswith((" copies", " micro batches", " pipeline"))][::8],
    key=lambda name: name,
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Differences of losses and buffers per rank; all habits in one process group."""
    folder = tmp_path_factory.mktemp("habits")
    script, result = workers / "runtime" / "habits.py", folder / "result.json"
    msrun_of_module.run_world(WORLD_SIZE, script, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S)
    return dict(json.loads(result.read_text()))


@TABLE.parametrize("name", [(name,) for name in HABITS])
def test_habit_trains_to_the_numbers_of_one_process_or_is_refused(outcomes: dict[str, Any], name: str) -> None:
    refused = HABITS[name].refused
    for of_rank in outcomes[name]:
        if refused:
            assert isinstance(of_rank, str), of_rank
            assert refused in of_rank.splitlines()[-1]
            continue
        assert isinstance(of_rank, list), of_rank
        assert max(of_rank) < 1e-12, of_rank
