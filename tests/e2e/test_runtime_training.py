"""Networks, taken as users write them, train on several ranks as they do in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asked_cases import CaseTable
from job_runner import JobRunner
from training_cases import CASES, WORLD_SIZE

DEADLINE_S = 300.0
TABLE = CaseTable(
    (case.name for case in CASES),
    fast=[
        "bags-pipeline",
        "border-parts-read-far-apart-zbv",
        "unread-tied-beside-the-loss-accumulated-level3",
        "statistics-micro-batches-of-copies",
    ],
    key=lambda name: name,
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def differences(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What differs in which case; all of them in one process group."""
    folder = tmp_path_factory.mktemp("training")
    script, result = workers / "runtime" / "training.py", folder / "result.json"
    msrun_of_module.run_world(WORLD_SIZE, script, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S)
    return dict(json.loads(result.read_text()))


@TABLE.parametrize("name", [(case.name,) for case in CASES])
def test_losses_gradients_weights_and_buffers_are_those_of_one_process(
    differences: dict[str, list[str]], name: str
) -> None:
    assert differences[name] == [], "\n".join(differences[name])
