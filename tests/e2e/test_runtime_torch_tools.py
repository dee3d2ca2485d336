"""torch's own tools in every layout: what one process gets.

The cases stand in tests/cases/torch_tools.py; one job of each size runs them all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch_tools
from asked_cases import CaseTable
from job_runner import JobRunner
from only_cases import ONLY_CASES

DEADLINE_S = 240.0
SIZES = (2, 4)
KEYS = [(size, case) for size in SIZES for case in torch_tools.names()]
TABLE = CaseTable([f"{size}/{case}" for size, case in KEYS], fast=[f"2/{case}" for case in torch_tools.names()[::18]])

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    asked = TABLE.asked(request)
    for size in SIZES:
        if any(key.startswith(f"{size}/") for key in json.loads(asked[ONLY_CASES])):
            folder = tmp_path_factory.mktemp("torch-tools")
            program, result = workers / "runtime" / "modes.py", folder / "result.json"
            msrun_of_module.run_world(
                size, program, result, "torch_tools", cwd=folder, env=asked, deadline_s=DEADLINE_S
            )
            found |= json.loads(result.read_text())
    return found


@TABLE.parametrize("size, case", KEYS)
def test_networks_meet_torchs_tools(outcomes: dict[str, list[dict[str, Any]]], size: int, case: str) -> None:
    of_ranks = enumerate(outcomes[f"{size}/{case}"])
    assert [f"rank {rank}: {found['error']}" for rank, found in of_ranks if "error" in found] == []
