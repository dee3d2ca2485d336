"""A small GPT with dropout, trained in many ways on four ranks, has the losses of one process."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from job_runner import REPOSITORY, JobRunner
from transformer_scenarios import SCENARIOS, STEPS, WORLD_SIZE, Scenario, build, train

DEADLINE_S = 200.0
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def results(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the worker found; every scenario in one process group."""
    folder = tmp_path_factory.mktemp("transformer")
    finished = msrun_of_module.run(
        f"--worker_num={WORLD_SIZE}",
        "--quiet",
        workers / "runtime" / "transformer.py",
        folder / "result.json",
        cwd=folder,
        env={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])},
        deadline_s=DEADLINE_S,
    )
    assert finished.code == 0, finished.stderr
    return dict(json.loads((folder / "result.json").read_text()))


def of_one_process(scenario: Scenario) -> list[float]:
    """Return the losses of this process alone; whatever the scenario says of ranks has no meaning here."""
    before = torch.get_default_dtype()
    alone = dataclasses.replace(scenario, strategies={}, copies=1, hsdp=None, deferred=False, steps=STEPS)
    try:
        network, optimizer = build(alone)
        return train(network, optimizer, alone, lambda tensor: tensor)[0]
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def right() -> dict[tuple[float, str, str], list[float]]:
    """Losses of one process: by network and type, nothing else may matter."""
    return {kind(s): of_one_process(s) for s in {kind(s): s for s in SCENARIOS}.values()}


def kind(scenario: Scenario) -> tuple[float, str, str]:
    return scenario.drop, scenario.norm, scenario.dtype


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in SCENARIOS])
def test_losses_are_those_of_one_process(
    results: dict[str, Any], right: dict[tuple[float, str, str], list[float]], scenario: Scenario
) -> None:
    expected = right[kind(scenario)]
    assert len(set(expected)) == STEPS
    for losses in results[scenario.name]["losses"]:
        assert losses == pytest.approx(expected[: scenario.steps], rel=TOLERANCE[scenario.dtype], abs=0)
