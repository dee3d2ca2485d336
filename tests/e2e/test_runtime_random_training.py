"""Networks that draw random numbers have one process' losses on two ranks, whatever the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from job_runner import JobRunner
from random_scenarios import NETWORKS, SCENARIOS, STEPS, WORLD_SIZE, Way, losses_of

DEADLINE_S = 300.0
STREAMS = "streams of a pipeline"
TABLE = CaseTable(
    [*(f"{name}/{way.name}" for name, way in SCENARIOS), STREAMS],
    fast=["diffusion/columns", STREAMS],
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the ranks found; every network and way in one process group."""
    folder = tmp_path_factory.mktemp("random")
    worker, result = workers / "runtime" / "random_draws.py", folder / "result.json"
    msrun_of_module.run_world(WORLD_SIZE, worker, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def right() -> dict[str, list[float]]:
    """Losses of one process, with torch's own autograd and no division of the batch."""
    return {name: losses_of(name, Way("one process"), lambda tensor: tensor) for name in NETWORKS}


@TABLE.parametrize("name, way", SCENARIOS)
def test_losses_are_those_of_one_process(
    results: dict[str, Any], right: dict[str, list[float]], name: str, way: Way
) -> None:
    assert len(set(right[name])) == STEPS
    for losses in results[f"{name}/{way.name}"]:
        assert losses == pytest.approx(right[name], rel=1e-10, abs=0), losses


def test_stream_is_a_step_further_on_every_rank_of_a_pipeline_also_where_nothing_is_drawn(
    results: dict[str, Any],
) -> None:
    assert results[STREAMS] == [[3, 3], [3, 3]]
