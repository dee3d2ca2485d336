"""Networks, taken as users write them, train on several ranks as they do in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_runner import JobRunner
from training_cases import CASES, WORLD_SIZE

DEADLINE_S = 300.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def differences(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What differs in which case; all of them in one process group."""
    folder = tmp_path_factory.mktemp("training")
    msrun_of_module.run_world(
        WORLD_SIZE, workers / "runtime" / "training.py", folder / "result.json", cwd=folder, deadline_s=DEADLINE_S
    )
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_losses_gradients_weights_and_buffers_are_those_of_one_process(
    differences: dict[str, list[str]], name: str
) -> None:
    assert differences[name] == [], "\n".join(differences[name])
