"""The all-reduce, short and long: the sum, the same bits on every rank, and what was given left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_runner import JobRunner

OTHERS = ((2, "shm"), (4, "shm"), (2, "gloo"), (3, "gloo"), (4, "gloo"))


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (3, "shm"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in OTHERS),
    ],
)
def test_sums_are_right_and_bit_equal_on_all_ranks_also_where_a_message_takes_several_steps(
    msrun: JobRunner, workers: Path, tmp_path: Path, world_size: int, backend: str
) -> None:
    worker, settings = workers / "runtime" / "sums.py", {"MSRUN_CPU_BACKEND": backend}
    msrun.run_world(world_size, worker, tmp_path / "result.json", cwd=tmp_path, env=settings)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["wrong"] == []
    assert found["runs"] > 50
    assert set(found["results"].values()) == {1}, "digests of a sum that the order of adding changes"
