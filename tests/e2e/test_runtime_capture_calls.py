"""Calls around a capture, on two ranks: torch.compile outside, dataclasses as batches, mistakes of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner

DEADLINE_S = 100.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 10)]


@pytest.fixture(scope="module")
def ranks(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("capture-calls")
    script, result = workers / "runtime" / "capture_calls.py", folder / "result.json"
    msrun_of_module.run_world(2, script, result, cwd=folder, deadline_s=DEADLINE_S)
    return list(json.loads(result.read_text()))


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel"])
@pytest.mark.parametrize("case", ["compiled", "of_compiled", "of_dataclass"])
def test_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], case: str, mode: str) -> None:
    for rank in ranks:
        assert rank[f"{case} {mode}"] < 1e-12


def test_exception_of_the_network_keeps_its_type_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["wrong columns"] == "ValueError: 5 columns"


def test_batches_of_other_lengths_are_told_with_both_shapes_and_what_to_do(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["other lengths"] == (
            "CaptureError: rank 1 got a batch of 4x8, rank 0 a batch of 3x8, so that their networks are not the same: "
            "give every rank batches of one shape (pad to one length, drop the last, smaller one)"
        )
