"""The strategy law for the operators of convolutional networks: however they are cut, the numbers stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner
from operator_cases import OperatorCase
from operator_cases_conv import BINARY, UNARY

WORLDS = (2, 4)
DEADLINE_S = 400.0


@pytest.fixture(scope="module")
def outcomes(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What the laws' worker found in every world; one job each."""
    found = {}
    for world_size in WORLDS:
        folder = tmp_path_factory.mktemp(f"laws-conv-{world_size}")
        msrun_of_module.run_world(
            world_size,
            workers / "runtime" / "laws.py",
            folder / "result.json",
            "operator_cases_conv",
            preload=["law_graphs"],
            env={"LAW_GRAPHS": f"operator_cases_conv {world_size}"},
            cwd=folder,
            deadline_s=DEADLINE_S,
        )
        found[world_size] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.timeout(2 * DEADLINE_S + 10)
@pytest.mark.parametrize("case", [*BINARY, *UNARY], ids=lambda case: case.name)
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_legal_strategy_gives_the_result_and_gradients_of_one_process(
    outcomes: dict[int, dict[str, Any]], world_size: int, case: OperatorCase
) -> None:
    for dtype, found in outcomes[world_size][case.name].items():
        assert found["wrong"] == [], dtype
        assert found["runs"] > 0


def test_cases_try_many_strategies() -> None:
    """Guards the guard: a mistake in the table of cases must not empty the law."""
    counts = {case.name: len(case.legal(4)) for case in BINARY}
    assert counts["batch-norm-2d"] == 13
    assert counts["conv2d"] == 19
    assert counts["conv2d-depthwise"] == 9
    assert counts["max-pool2d-overlapping"] == 9
    assert sum(counts.values()) > 330
