"""The plan's first lines agree with each other and with what happens; a pipeline's step is told by stage.

The cases stand in tests/cases/mode_plans.py; one job of two ranks runs them all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mode_plans
import pytest
from job_runner import JobRunner

DEADLINE_S = 200.0
Outcomes = dict[str, list[dict[str, Any]]]
PIPELINES = [name for name in mode_plans.cases(2) if name.startswith("pipeline/")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 10)]


@pytest.fixture(scope="module")
def outcomes(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("plans")
    script, result = workers / "runtime" / "modes.py", folder / "result.json"
    msrun_of_module.run_world(2, script, result, "mode_plans", cwd=folder, deadline_s=DEADLINE_S)
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize(
    ("case", "begin", "end"),
    [
        ("whole", "2 ranks as 2, semi_auto, hsdp is off; ", "; parameters whole on every rank, 8 KB"),
        (
            "below threshold",
            "2 ranks as 2, semi_auto, hsdp level1 cuts no parameter of this network; ",
            "; parameters whole on every rank, 8 KB",
        ),
        (
            "hsdp",
            "2 ranks as 2, semi_auto, hsdp level1: weights and optimizer state sharded; ",
            "; parameters 4 KB of 8 KB on this rank",
        ),
        ("operators", "2 ranks as 2, semi_auto, hsdp is off; ", "; parameters 5 KB of 8 KB on this rank"),
        (
            "hybrid",
            "2 ranks as 2, hybrid_parallel, hsdp is off; ",
            "; parameters 8 KB on this rank, 1 of 4 of them this rank's own parts",
        ),
    ],
)
def test_the_first_line_says_what_of_the_parameters_is_here(
    outcomes: Outcomes, case: str, begin: str, end: str
) -> None:
    for rank in outcomes[case]:
        assert "error" not in rank, rank["error"]
        assert rank["first"].startswith(begin) and rank["first"].endswith(end), rank["first"]


def test_a_part_cut_by_hand_is_not_called_whole(outcomes: Outcomes) -> None:
    line = next(line for line in outcomes["hybrid"][0]["text"].splitlines() if " layer1.weight " in line)
    assert "? -> 32x24" in line and line.endswith("this rank's own part")


@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipelines_plan_tells_the_traffic_of_a_step_for_every_stage(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes[case]:
        assert "error" not in rank, rank["error"]
        assert rank["predicted"] == rank["counted"]
        told = [line for line in rank["text"].splitlines() if line.startswith("one training step, on each rank of ")]
        assert len(told) == 2 and "not known" not in rank["text"]
        assert ("stages 0, 3: " if case.endswith("zbv") else "stage 0: ") in told[0]


@pytest.mark.parametrize("case", ["whole", "hsdp", "operators"])
def test_the_traffic_of_a_step_is_the_counted_one(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes[case]:
        assert rank["predicted"] == rank["counted"]
