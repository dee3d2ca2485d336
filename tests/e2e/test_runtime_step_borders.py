"""The law of the border: whatever stands around steps, in every mode the numbers are those of one process, or it is
refused by name.

The cases stand in tests/cases/step_borders.py; one job of each size runs them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import step_borders
from asked_cases import CaseTable
from case_job import Outcomes, errors_of, run_cases_of_sizes
from job_runner import JobRunner

DEADLINE_S = 480.0
SIZES = (2, 4)
KEYS = [(size, case) for size in SIZES for case in step_borders.names()]
FAST_MODES = ("semi_auto", "hsdp3", "ddp", "fsdp2")
TABLE = CaseTable(
    [f"{size}/{case}" for size, case in KEYS],
    fast=[
        *(f"2/{habit}/{mode}" for habit in step_borders.FAST for mode in FAST_MODES),
        *(f"2/held_in_{kind}/{mode}" for kind in ("subclass", "record") for mode in ("semi_auto", "ddp")),
        "2/two_calls_then_their_passes_in_reverse/ddp",
        "2/gradients_asked_by_autograd/ddp",
        "2/part_is_unused_in_some_steps/ddp",
        "2/gradients_of_gradients/semi_auto",
        "2/network_that_trains_after_another/hsdp3",
        "2/detached_results/semi_auto",
        "2/loss_inside_and_another_outside/stages",
    ],
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    folder = tmp_path_factory.mktemp("borders")
    return run_cases_of_sizes(msrun_of_module, request, workers, folder, "step_borders", TABLE, DEADLINE_S)


@TABLE.parametrize("size, case", KEYS)
def test_what_stands_around_steps_has_the_numbers_of_one_process_or_is_refused(
    outcomes: Outcomes, size: int, case: str
) -> None:
    assert errors_of(outcomes, f"{size}/{case}") == []
