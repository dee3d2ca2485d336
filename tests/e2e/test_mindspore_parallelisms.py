"""Kinds of parallelism in MindSpore's words compute on 4 ranks what one process computes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from job_runner import REPOSITORY, JobRunner

PROGRAM = REPOSITORY / "tests" / "workers" / "mindspore_parallelisms.py"
CASES = re.findall(r'^    "(.+)": ', PROGRAM.read_text(), re.MULTILINE)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """Number of ranks -> what each has found."""
    folder = tmp_path_factory.mktemp("parallelisms")
    with JobRunner() as msrun:
        for size in (1, 4):
            msrun.run_world(size, PROGRAM, folder / f"of_{size}", cwd=folder)
    return {size: [json.loads((folder / f"of_{size}.{rank}").read_text()) for rank in range(size)] for size in (1, 4)}


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_compute_what_one_process_computes(found: Any, case: str) -> None:
    (one,) = found[1]
    for rank in found[4]:
        for values, right in zip(rank[case], one[case], strict=True):
            np.testing.assert_allclose(values, right, rtol=2e-5, atol=2e-6)
