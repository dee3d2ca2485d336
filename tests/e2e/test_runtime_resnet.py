"""ResNet-50 on 8 ranks in the modes of MindSpore's distributed training example: the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asked_cases import asked
from job_runner import REPOSITORY, JobRunner

DEADLINE_S = 400.0
STEPS = 3
EXAMPLE = REPOSITORY / "examples" / "torch" / "distributed_training"
CAPTURED, WITHOUT_CAPTURE = ["semi_auto_parallel", "auto_parallel"], ["data_parallel", "hybrid_parallel"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 10)]


@pytest.fixture(scope="module")
def losses(
    msrun_of_module: JobRunner,
    workers: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("resnet")
    program = workers / "runtime" / "resnet.py"
    result = folder / "result.json"
    words = (program, EXAMPLE, result, str(STEPS))
    msrun_of_module.run_world(8, *words, cwd=folder, env=asked(request, "mode"), deadline_s=DEADLINE_S)
    found: dict[str, list[float]] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("mode", CAPTURED)
def test_captured_modes_have_the_batch_statistics_of_the_whole_batch(losses: dict[str, list[float]], mode: str) -> None:
    assert len(losses["alone"]) == STEPS
    assert losses[mode] == pytest.approx(losses["alone"], rel=1e-9)


@pytest.mark.parametrize("mode", WITHOUT_CAPTURE)
def test_modes_without_capture_have_those_of_each_ranks_part(losses: dict[str, list[float]], mode: str) -> None:
    assert losses[mode] == pytest.approx(losses["alone in parts"], rel=1e-9)
    assert losses[mode][0] != pytest.approx(losses["alone"][0], rel=1e-3), "else the test would tell nothing"
