"""The many ways in which people call a parallel network, each in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asked_cases import CaseTable
from call_patterns import PATTERNS, WORLD_SIZE
from job_runner import JobRunner

DEADLINE_S = 400.0
TABLE = CaseTable(
    PATTERNS,
    fast=[
        "second_backward_of_one_loss_is_refused_in_words",
        "weight_that_two_operators_want_cut_differently_gets_both_gradients",
        "gradients_of_arguments_are_those_of_this_ranks_part",
        "named_group_keeps_the_order_of_its_ranks",
        "error_on_one_rank_is_told_to_the_others",
    ],
    key=lambda name: name,
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What went wrong in which pattern; all of them in one process group."""
    folder = tmp_path_factory.mktemp("patterns")
    script, result = workers / "runtime" / "patterns.py", folder / "result.json"
    msrun_of_module.run_world(WORLD_SIZE, script, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S)
    return dict(json.loads(result.read_text()))


@TABLE.parametrize("name", [(name,) for name in PATTERNS])
def test_pattern_holds_on_every_rank(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == [], "\n".join(outcomes[name])
