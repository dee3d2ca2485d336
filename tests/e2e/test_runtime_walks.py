"""A weight, from its module to its part, gradient and optimizer, and a batch pass through few rooms of the runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_runner import REPOSITORY

MOST_ROOMS = 8
ENVIRON = {"MSRUN_SIM_LEVEL": "3", "WORLD_SIZE": "4", "RANK": "1", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_weight_and_batch_enter_few_rooms_from_the_first_line_to_the_optimizer(workers: Path) -> None:
    done = subprocess.run(
        [sys.executable, workers / "runtime" / "walks.py"],
        env={"PYTHONPATH": str(REPOSITORY), **ENVIRON},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"nn", "capture", "parallel", "execute"} <= {*found["weight"]}
    assert {"capture", "parallel", "execute"} <= {*found["batch"]}
    assert {name: rooms for name, rooms in found.items() if len(rooms) > MOST_ROOMS} == {}
