"""The strategy law and the redistribution law: however an operator is cut, its result and gradients are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner
from operator_cases import BINARY, UNARY, OperatorCase

CASES = [*BINARY, *UNARY]
WORLDS = (2, 4, 8)
DEADLINE_S = 400.0


@pytest.fixture(scope="module")
def outcomes(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What the laws' worker found in every world; one job each, started when first asked for."""

    class Outcomes(dict[int, dict[str, Any]]):
        def __missing__(self, world_size: int) -> dict[str, Any]:
            folder = tmp_path_factory.mktemp(f"laws-{world_size}")
            result = folder / "result.json"
            msrun_of_module.run_world(
                world_size,
                workers / "runtime" / "laws.py",
                result,
                cwd=folder,
                preload=["law_graphs"],
                env={"LAW_GRAPHS": f"operator_cases {world_size}"},
                deadline_s=DEADLINE_S,
            )
            self[world_size] = json.loads(result.read_text())
            return self[world_size]

    return Outcomes()


def cases_of(world_size: int) -> list[OperatorCase]:
    return [case for case in CASES if world_size < 8 or case.on_eight]


@pytest.mark.timeout(DEADLINE_S + 10)
@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(size, case, id=f"{size}-{case.name}") for size in WORLDS for case in cases_of(size)],
)
def test_every_legal_strategy_gives_the_result_and_gradients_of_one_process(
    outcomes: dict[int, dict[str, Any]], world_size: int, case: OperatorCase
) -> None:
    for dtype, found in outcomes[world_size][case.name].items():
        assert found["wrong"] == [], dtype
        assert found["runs"] > 0


@pytest.mark.timeout(DEADLINE_S + 10)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_can_be_moved_to_every_other_and_its_gradient_back(
    outcomes: dict[int, dict[str, Any]], world_size: int
) -> None:
    found = outcomes[world_size]["redistribution"]["float64"]
    assert found["wrong"] == []
    assert found["runs"] == {2: 16, 4: 361}[world_size]


def test_cases_try_many_strategies() -> None:
    """Guards the guard: a mistake in the table of cases must not empty the law."""
    counts = {case.name: len(case.legal(4)) for case in BINARY}
    assert counts["linear"] == 10
    assert counts["linear-3d-bias"] == 14
    assert counts["no-rule"] == 1
    assert sum(counts.values()) > 350
