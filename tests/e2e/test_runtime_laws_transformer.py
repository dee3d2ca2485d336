"""The strategy law for the operators of transformers: however they are cut, results and gradients are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner
from operator_cases_transformer import BINARY, EVERY_CASE_UP_TO, ON_FOUR, UNARY, OperatorCase

WORLDS = (2, 4)
DEADLINE_S = 400.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What the laws' worker found in every world; one job each, started when first asked for."""

    class Outcomes(dict[int, dict[str, Any]]):
        def __missing__(self, world_size: int) -> dict[str, Any]:
            folder = tmp_path_factory.mktemp(f"laws-transformer-{world_size}")
            result = folder / "result.json"
            msrun_of_module.run_world(
                world_size,
                workers / "runtime" / "laws.py",
                result,
                "operator_cases_transformer",
                preload=["law_graphs"],
                env={"LAW_GRAPHS": f"operator_cases_transformer {world_size}"},
                cwd=folder,
                deadline_s=DEADLINE_S,
            )
            self[world_size] = json.loads(result.read_text())
            return self[world_size]

    return Outcomes()


def cases_of(world_size: int) -> list[OperatorCase]:
    return [case for case in [*BINARY, *UNARY] if world_size <= EVERY_CASE_UP_TO or case.on_eight]


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


def test_cases_try_many_strategies() -> None:
    """Guards the guard: a mistake in the table of cases must not empty the law."""
    counts = {case.name: len(case.legal(4)) for case in BINARY}
    assert len(cases_of(4)) == len(ON_FOUR)
    assert counts["embedding"] == 10
    assert counts["attention"] == 14
    assert counts["attention-causal"] == 8
    assert counts["embedding-by-frequency"] == 3
    assert sum(counts.values()) > 350
