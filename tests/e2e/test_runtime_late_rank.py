"""A training step does not stop between its forward and its backward pass for the loss of the other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found. That the job ends well says that no call of rank 0 has waited for rank 1."""
    folder = tmp_path_factory.mktemp("late-rank")
    msrun_of_module.run_world(2, workers / "runtime" / "late_rank.py", folder / "result.json", cwd=folder)
    return list(json.loads((folder / "result.json").read_text()))


@pytest.mark.parametrize("parts", ["alone", "copies"])
@pytest.mark.parametrize("loss", ["mean squares", "cross-entropy"])
def test_call_returns_before_the_other_rank_has_computed_its_loss_and_its_number_is_the_global_one(
    ranks: list[dict[str, Any]], loss: str, parts: str
) -> None:
    for rank, found in enumerate(ranks):
        case = found[f"{loss}, {parts}"]
        assert case["kinds"] == ["LateLoss", "Tensor"], "a plain tensor after the backward pass"
        assert len(case["losses"]) == (3 if rank == 0 else 2)
        assert case["losses"] == pytest.approx([case["right"]] * len(case["losses"]), rel=1e-6)
