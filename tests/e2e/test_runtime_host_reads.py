"""A training step reads no value of its tensors in Python: on a device it would wait there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_runner import REPOSITORY

ENVIRON = {"MSRUN_SIM_LEVEL": "3", "WORLD_SIZE": "4", "RANK": "1", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_no_value_of_a_step_is_read_on_the_host_in_any_layout(workers: Path) -> None:
    done = subprocess.run(
        [sys.executable, workers / "runtime" / "host_reads.py"],
        env={"PYTHONPATH": str(REPOSITORY), **ENVIRON},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("a loss that is logged") == ["item of torch", "_local_scalar_dense of torch"]
    assert len(found) == 8
    assert {name: reads for name, reads in found.items() if reads} == {}
