"""What people write into networks, on two ranks: the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner
from runtime_habits import HABITS, WORLD_SIZE

DEADLINE_S = 300.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Differences of losses and buffers per rank; all habits in one process group."""
    folder = tmp_path_factory.mktemp("habits")
    msrun_of_module.run_world(
        WORLD_SIZE, workers / "runtime" / "habits.py", folder / "result.json", cwd=folder, deadline_s=DEADLINE_S
    )
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.parametrize("name", HABITS)
def test_habit_trains_to_the_numbers_of_one_process_or_is_refused(outcomes: dict[str, Any], name: str) -> None:
    refused = HABITS[name].refused
    for of_rank in outcomes[name]:
        if refused:
            assert isinstance(of_rank, str), of_rank
            assert refused in of_rank.splitlines()[-1]
            continue
        assert isinstance(of_rank, list), of_rank
        assert max(of_rank) < 1e-12, of_rank
