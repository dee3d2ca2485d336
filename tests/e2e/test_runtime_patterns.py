"""The many ways in which people call a parallel network, each in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from call_patterns import PATTERNS, WORLD_SIZE
from job_runner import JobRunner

DEADLINE_S = 400.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What went wrong in which pattern; all of them in one process group."""
    folder = tmp_path_factory.mktemp("patterns")
    msrun_of_module.run_world(
        WORLD_SIZE, workers / "runtime" / "patterns.py", folder / "result.json", cwd=folder, deadline_s=DEADLINE_S
    )
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_holds_on_every_rank(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == [], "\n".join(outcomes[name])
