"""What people write into training scripts, in every mode on two ranks: the numbers of one process, or a refusal.

`python tests/workers/runtime/habits.py MODE --only NAME` repeats one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked_cases import asked, slow_but
from job_runner import JobRunner
from training_habits import HABITS, MODES
from training_habits.expected import DOCUMENTED, OWN_ROWS, REFUSALS, WARNED, expected

DEADLINE_S = 3600.0
ROWS = [(mode, name) for mode in MODES for name, habit in HABITS.items() if mode in habit.modes]
FAST = {
    "hsdp level3": ("a row set through .data",),
    "data_parallel": ("results in a dataclass, loss outside", "mask of uneven rows, mean over what is left"),
}
"""mode -> what `make test` runs: some of every kind."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The verdict on each asked habit in each mode."""
    folder = tmp_path_factory.mktemp("habits")
    result = folder / "result.json"
    program, env = workers / "runtime" / "habits.py", asked(request, "mode", "name")
    msrun_of_module.run_world(1, program, "all", result, cwd=folder, env=env, deadline_s=DEADLINE_S)
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize(
    ("mode", "name"), slow_but([f"{mode}/{name}" for mode, names in FAST.items() for name in names], ROWS)
)
def test_habit_has_the_numbers_of_one_process_or_is_refused_as_the_table_says(
    verdicts: dict[str, Any], mode: str, name: str
) -> None:
    found = verdicts[f"{mode}/{name}"]
    told = f"{found['kind']}: {found['message']}\n{found['trace']}"
    refusal = REFUSALS.get((mode, name))
    if refusal is None:
        assert found["kind"] in expected(mode, name), told
    else:
        assert found["kind"] == "refused", f"no longer refused; the table says: {refusal}\n{told}"
        assert found["message"].startswith(f"{refusal.error}: "), told
        assert refusal.text in found["message"], told


def test_tables_name_habits_that_there_are() -> None:
    assert ({name for _, name in REFUSALS} | OWN_ROWS.keys() | DOCUMENTED | WARNED) - HABITS.keys() == set()
