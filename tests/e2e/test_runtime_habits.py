"""What people write into training scripts, in every mode on two ranks: the numbers of one process, or a refusal.

`python tests/workers/runtime/habits.py MODE --only NAME --trace` repeats one.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from asked_cases import asked, slow_but
from job_runner import WORKER_PATH, JobRunner
from training_habits import HABITS, MODES
from training_habits.fast import FAST
from training_habits.refusals import DOCUMENTED, OWN_ROWS, REFUSALS, WARNED, WRONG, refusal_of

DEADLINE_S = 3600.0
UNCAPTURED = ("data_parallel", "data_parallel hsdp")
ROWS = [(mode, name) for mode in MODES for name, habit in HABITS.items() if mode in habit.modes]

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The verdict on each asked habit in each mode."""
    folder = tmp_path_factory.mktemp("habits")
    result = folder / "result.json"
    words = [str(workers / "runtime" / "habits.py"), "all", str(result)]
    env = {"PYTHONPATH": WORKER_PATH, "OMP_NUM_THREADS": "1", **asked(request, "mode", "name")}
    finished = msrun_of_module.run(*words, cwd=folder, command=[sys.executable], env=env, deadline_s=DEADLINE_S)
    assert finished.code == 0, finished.stderr
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize(("mode", "name"), slow_but(FAST, ROWS))
def test_habit_has_the_numbers_of_one_process_or_is_refused_as_the_table_says(
    request: pytest.FixtureRequest, verdicts: dict[str, Any], mode: str, name: str
) -> None:
    if (mode, name) in WRONG:
        request.applymarker(pytest.mark.xfail(strict=True, reason=WRONG[mode, name]))
    found = verdicts[f"{mode}/{name}"]
    told = f"{found['kind']}: {found['message']}\n{found['trace']}"
    refusal = refusal_of(mode, name)
    if refusal is not None:
        assert found["kind"] == "refused", f"no longer refused; the table says: {refusal.reason}\n{told}"
        assert found["message"].startswith(f"{refusal.error}: "), told
        assert refusal.text in found["message"], told
    elif mode in OWN_ROWS.get(name, ()):
        assert found["kind"] == "own rows", told
    elif mode in WARNED.get(name, ()):
        assert found["kind"] == "WRONG", told
    elif mode in UNCAPTURED and name in DOCUMENTED:
        assert found["kind"] in ("WRONG", "refused"), told
    else:
        assert found["kind"] == "equal", told


# -- the tables themselves ---------------------------------------------------------------------------------------------


def test_at_least_150_habits_run_in_every_mode() -> None:
    modes = Counter(mode for mode, _ in ROWS)
    assert len(HABITS) >= 150
    assert {mode: count for mode, count in modes.items() if count < 150} == {}


def test_tables_name_habits_that_there_are() -> None:
    refused = {name for refusal in REFUSALS for name in refusal.habits}
    assert (
        refused | OWN_ROWS.keys() | DOCUMENTED.keys() | WARNED.keys() | {name for _, name in WRONG}
    ) - HABITS.keys() == set()


def test_every_refusal_has_a_reason_and_every_habit_one_refusal_in_a_mode() -> None:
    assert [refusal for refusal in REFUSALS if not refusal.reason or not refusal.text] == []
    cells = Counter((mode, name) for refusal in REFUSALS for name, modes in refusal.habits.items() for mode in modes)
    assert [cell for cell, count in cells.items() if count > 1] == []
