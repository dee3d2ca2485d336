"""Convolutional networks with batch norm train as in one process, running statistics included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from conv_networks import ALL_ROWS, MIXED, SCENARIOS, WORLD_SIZE, Scenario
from job_runner import JobRunner

DEADLINE_S = 400.0
TABLE = CaseTable([*(scenario.name for scenario in SCENARIOS), "rounding"], fast=["lenet-cut"])
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the worker found, per scenario and rank; every scenario in one process group."""
    folder = tmp_path_factory.mktemp("conv-training")
    script, result = workers / "runtime" / "conv_training.py", folder / "result.json"
    msrun_of_module.run_world(WORLD_SIZE, script, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S)
    return dict(json.loads(result.read_text()))


every_scenario = TABLE.parametrize("scenario", [(scenario,) for scenario in SCENARIOS])


@every_scenario
def test_losses_of_training_and_evaluation_are_those_of_one_process(
    results: dict[str, Any], scenario: Scenario
) -> None:
    for rank in results[scenario.name]:
        assert len(rank["losses"]) == scenario.steps + 1
        assert rank["losses"] == pytest.approx(rank["right"], rel=TOLERANCE[scenario.dtype], abs=0)
        assert rank["right"][scenario.steps - 1] != rank["right"][0]


@TABLE.looks_at("rounding")
def test_gradients_in_float32_are_as_near_to_float64_as_those_of_one_process(results: dict[str, Any]) -> None:
    rounding = results["rounding"]
    assert 0 < rounding["all"] < 1.5 * rounding["one"] < 1e-5


@every_scenario
def test_weights_after_training_are_those_of_one_process(results: dict[str, Any], scenario: Scenario) -> None:
    for rank in results[scenario.name]:
        assert rank["weights"] <= TOLERANCE[scenario.dtype]


@every_scenario
def test_every_rank_has_the_running_statistics_of_one_process(results: dict[str, Any], scenario: Scenario) -> None:
    has_statistics = scenario.network != "lenet"
    for rank in results[scenario.name]:
        assert bool(rank["buffers"]) == has_statistics
        assert all(difference <= TOLERANCE[scenario.dtype] for difference in rank["buffers"].values())
        assert set(rank["counted"]) == ({scenario.steps * scenario.copies} if has_statistics else set())


@TABLE.looks_at("rows")
def test_cut_space_goes_through_the_whole_network(results: dict[str, Any]) -> None:
    operators = results["rows"][0]["operators"]
    of_space = [numbers[0] for _, _, _, numbers in operators if numbers and len(numbers[0]) == 4]
    assert of_space == [[1, 1, 4, 1]] * (len(of_space) - 1) + [[4, 1, 1, 1]], "flatten comes after the average"
    users = {path.removeprefix("network.") for _, path, origin, _ in operators if origin == "user"}
    assert users == set(ALL_ROWS)


@TABLE.parametrize("scenario", [(s,) for s in SCENARIOS if s.strategies is MIXED])
def test_every_strategy_of_a_module_is_used(results: dict[str, Any], scenario: Scenario) -> None:
    plan = results[scenario.name][0]
    assert {path for _, path, origin, _ in plan["operators"] if origin == "user"} == set(MIXED)
    assert plan["notes"] == []
