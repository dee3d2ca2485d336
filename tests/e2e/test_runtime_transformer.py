"""A small GPT with dropout, trained in many ways on four ranks, has the losses of one process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asked_cases import CaseTable
from job_runner import JobRunner
from transformer_scenarios import RESUMED, SAVED_AFTER, SCENARIOS, STEPS, WORLD_SIZE, Scenario, build, train, wrap

from msrun.runtime import load_checkpoint

DEADLINE_S = 400.0
TABLE = CaseTable(
    (scenario.name for scenario in SCENARIOS),
    fast=[],
)
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the worker found; every scenario in one process group."""
    folder = tmp_path_factory.mktemp("transformer")
    msrun_of_module.run_world(
        WORLD_SIZE,
        workers / "runtime" / "transformer.py",
        folder / "result.json",
        folder / "checkpoint",
        cwd=folder,
        env=TABLE.asked(request),
        deadline_s=DEADLINE_S,
    )
    return {**json.loads((folder / "result.json").read_text()), "checkpoint": folder / "checkpoint"}


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def of_one_process(scenario: Scenario, steps: range, checkpoint: Path | None = None) -> list[float]:
    """Return the losses of this process alone; whatever the scenario says of ranks has no meaning here."""
    alone = dataclasses.replace(scenario, strategies={}, copies=1, hsdp=None, deferred=False)
    before = torch.get_default_dtype()
    network, optimizer = build(alone)
    if checkpoint is not None:
        load_checkpoint(checkpoint, network, optimizer)
    losses = train(wrap(network, alone), optimizer, steps, lambda tensor: tensor)
    torch.set_default_dtype(before)
    return losses


@pytest.fixture(scope="module")
def right() -> dict[tuple[float, str, str], list[float]]:
    """Losses of one process: by network and type, nothing else may matter."""
    return {kind(s): of_one_process(s, range(STEPS)) for s in {kind(s): s for s in SCENARIOS}.values()}


def kind(scenario: Scenario) -> tuple[float, str, str]:
    return scenario.drop, scenario.norm, scenario.dtype


@TABLE.parametrize("scenario", [(scenario,) for scenario in SCENARIOS])
def test_losses_are_those_of_one_process(
    results: dict[str, Any], right: dict[tuple[float, str, str], list[float]], scenario: Scenario
) -> None:
    expected = right[kind(scenario)]
    assert len(set(expected)) == STEPS
    for losses in results[scenario.name]["losses"]:
        assert losses == pytest.approx(expected[: scenario.steps], rel=TOLERANCE[scenario.dtype], abs=0)


@TABLE.looks_at(SCENARIOS[0].name)
@pytest.mark.parametrize("ranks", [WORLD_SIZE, 1])
def test_run_that_goes_on_from_a_checkpoint_has_the_masks_of_one_that_never_stopped(
    results: dict[str, Any], right: dict[tuple[float, str, str], list[float]], ranks: int
) -> None:
    """Optimizer parallel on four ranks, and one process, go on with what data parallel on four ranks has saved."""
    steps = range(SAVED_AFTER, RESUMED.steps)
    losses = results["resumed"] if ranks > 1 else of_one_process(RESUMED, steps, results["checkpoint"])
    assert losses == pytest.approx(right[kind(RESUMED)][SAVED_AFTER : RESUMED.steps], rel=1e-10, abs=0)


@TABLE.looks_at("megatron")
def test_vocabulary_that_is_cut_is_never_gathered(results: dict[str, Any]) -> None:
    lines = results["megatron"]["explain"].splitlines()
    (loss,) = [index for index, line in enumerate(lines) if "aten.cross_entropy_loss" in line]
    assert "(1, 4), (1,)" in lines[loss]
    collectives = [line.strip() for line in lines[loss + 1 : loss + 6] if line.startswith("      ")]
    of_scores = [text for text in collectives if "gather dim 0" not in text]  # dimension 0: labels
    assert [text.split(" over")[0] for text in of_scores] == ["gather dim 1", "all_reduce", "enter", "all_reduce"], (
        "one gather, of the largest score of every row and part"
    )


@TABLE.parametrize("name", [("data-parallel",), ("kinds-data-parallel",)])
def test_data_parallel_transformer_moves_nothing_but_gradients_and_the_loss(results: dict[str, Any], name: str) -> None:
    """Positions, masks and attention layers stay where they are: no redistribution anywhere."""
    moves = [line.split()[0] for line in results[name]["explain"].splitlines() if line.startswith("      ")]
    assert moves
    assert not {"gather", "gather_enter", "exchange", "reduce_scatter"} & set(moves)
    assert results[name]["notes"] == []
