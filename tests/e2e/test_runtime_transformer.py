"""A small GPT with dropout, trained in many ways on four ranks, has the losses of one process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asked_cases import slow_but
from on_ranks import on_ranks
from transformer_scenarios import RESUMED, SAVED_AFTER, SCENARIOS, STEPS, WORLD_SIZE, Scenario, build, train, wrap

from msrun.runtime import get_rank, load_checkpoint, save_checkpoint


def part_of(scenario, rank):
    if scenario.dataset == "full_batch":
        return lambda tensor: tensor
    parts = WORLD_SIZE if scenario.dataset == "data_parallel" else scenario.dataset[0][0]
    return lambda tensor: tensor.chunk(parts)[rank * parts // WORLD_SIZE]


BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
on_four = on_ranks(WORLD_SIZE)
pytestmark = pytest.mark.slow
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


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


def kind(scenario: Scenario) -> tuple[float, str, str]:
    return scenario.drop, scenario.norm, scenario.dtype


@functools.cache
def trained(name: str, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train in one way; the first one's checkpoint is written where it is given."""
    scenario, rank = BY_NAME[name], get_rank()
    network, optimizer = build(scenario)
    step, take, begin, losses = wrap(network, scenario), part_of(scenario, rank), 0, []
    if checkpoint is not None:
        losses, begin = train(step, optimizer, range(SAVED_AFTER), take), SAVED_AFTER
        save_checkpoint(network, checkpoint, optimizer)
    losses += train(step, optimizer, range(begin, scenario.steps), take)
    return {"losses": losses, "plan": step.plan}


@functools.cache
def losses_alone(drop: float, norm: str, dtype: str) -> list[float]:
    return of_one_process(Scenario("alone", drop=drop, norm=norm, dtype=dtype), range(STEPS))


@pytest.fixture
def right(scenario: Scenario) -> list[float]:
    """Losses of one process: by network and type, nothing else may matter."""
    return losses_alone(*kind(scenario))


@on_four
@pytest.mark.parametrize("scenario", slow_but([], SCENARIOS))
def test_losses_are_those_of_one_process(right: list[float], scenario: Scenario) -> None:
    assert len(set(right)) == STEPS
    losses = trained(scenario.name)["losses"]
    assert losses == pytest.approx(right[: scenario.steps], rel=TOLERANCE[scenario.dtype], abs=0)


@pytest.fixture
def saved(tmp_path: Path, right: list[float]) -> Iterator[Path]:
    """Where ranks save; one process goes on from there afterwards."""
    yield tmp_path / "checkpoint"
    losses = of_one_process(RESUMED, range(SAVED_AFTER, RESUMED.steps), tmp_path / "checkpoint")
    assert losses == pytest.approx(right[SAVED_AFTER : RESUMED.steps], rel=1e-10, abs=0)


@on_four
@pytest.mark.parametrize("scenario", [RESUMED], ids=["resumed"])
def test_run_that_goes_on_from_a_checkpoint_has_the_masks_of_one_that_never_stopped(
    right: list[float], saved: Path, scenario: Scenario
) -> None:
    """Optimizer parallel on four ranks, and one process, go on with what data parallel on four ranks has saved."""
    assert trained(SCENARIOS[0].name, saved)["losses"] == pytest.approx(right, rel=1e-10, abs=0)
    network, optimizer = build(scenario)
    step = wrap(network, scenario)
    torch.manual_seed(1234)
    load_checkpoint(saved, network, optimizer)
    losses = train(step, optimizer, range(SAVED_AFTER, RESUMED.steps), part_of(scenario, get_rank()))
    assert losses == pytest.approx(right[SAVED_AFTER : RESUMED.steps], rel=1e-10, abs=0)


@on_four
def test_vocabulary_that_is_cut_is_never_gathered() -> None:
    lines = trained("megatron")["plan"].explain().splitlines()
    (loss,) = [index for index, line in enumerate(lines) if "aten.cross_entropy_loss" in line]
    assert "(1, 4), (1,)" in lines[loss]
    collectives = [line.strip() for line in lines[loss + 1 : loss + 6] if line.startswith("      ")]
    of_scores = [text for text in collectives if "gather dim 0" not in text]  # dimension 0: labels
    assert [text.split(" over")[0] for text in of_scores] == ["gather dim 1", "all_reduce", "enter", "all_reduce"], (
        "one gather, of the largest score of every row and part"
    )


@on_four
@pytest.mark.parametrize("name", ["data-parallel", "kinds-data-parallel"])
def test_data_parallel_transformer_moves_nothing_but_gradients_and_the_loss(name: str) -> None:
    """Positions, masks and attention layers stay where they are: no redistribution anywhere."""
    moves = [line.split()[0] for line in trained(name)["plan"].explain().splitlines() if line.startswith("      ")]
    assert moves
    assert not {"gather", "gather_enter", "exchange", "reduce_scatter"} & set(moves)
    assert not trained(name)["plan"].notes
