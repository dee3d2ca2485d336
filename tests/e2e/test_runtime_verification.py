"""`AutoParallel.verify` and MSRUN_VERIFY: the step of one process, and what differs from it is found.

The cases stand in tests/cases/mode_verification.py; one job of two ranks runs them all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mode_verification
import pytest
from asked_cases import CaseTable
from job_runner import JobRunner

DEADLINE_S = 200.0
EQUAL = [name for name in mode_verification.cases(2) if name.startswith("equal/")]
TRACES = [name for name in mode_verification.cases(2) if name.startswith("traces/")]
PLANTED = [name for name in mode_verification.cases(2) if name.startswith("planted/")]
Outcomes = dict[str, list[dict[str, Any]]]
GRADIENTS = [f"gradient of {name}" for name in ("fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight")]

TABLE = CaseTable(
    mode_verification.cases(2),
    fast=[EQUAL[0], EQUAL[-1], TRACES[0], "wrong rule", "stale capture", "own rows", "no trace", *PLANTED],
    key=lambda case: case,
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    folder = tmp_path_factory.mktemp("verification")
    script, result = workers / "runtime" / "modes.py", folder / "result.json"
    msrun_of_module.run_world(
        2, script, result, "mode_verification", cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S
    )
    return dict(json.loads(result.read_text()))


def ranks_of(outcomes: Outcomes, case: str) -> list[dict[str, Any]]:
    for rank in outcomes[case]:
        assert "Traceback" not in str(rank.get("error", "")), rank["error"]
    return outcomes[case]


@TABLE.parametrize("case", [(case,) for case in EQUAL])
def test_a_right_step_is_verified_with_every_gradient(outcomes: Outcomes, case: str) -> None:
    for rank in ranks_of(outcomes, case):
        assert rank["is_equal"], rank["text"]
        assert set(GRADIENTS) | {"result 0" if "outside" in case else "loss"} <= set(rank["names"])
        assert rank.get("heard", []) == rank.get("calls", []) == []  # a step function is stopped before it trains


@TABLE.looks_at("equal/operators", "equal/input", "equal/input ddp")
def test_buffers_and_gradients_of_inputs_are_compared_too(outcomes: Outcomes) -> None:
    assert {f"buffer norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")} <= set(
        ranks_of(outcomes, "equal/operators")[0]["names"]
    )
    for case in ("equal/input", "equal/input ddp"):
        assert "gradient of input 0" in ranks_of(outcomes, case)[0]["names"]


def test_a_planted_wrong_operator_rule_is_found_on_every_rank(outcomes: Outcomes) -> None:
    for rank in ranks_of(outcomes, "wrong rule"):
        assert rank["right"]
        assert rank["failed"] == ["gradient of fc.bias", "gradient of fc.weight", "loss"]
        assert rank["error"].startswith("VerificationError: 3 of 3 values differ from one process, first ")
        assert "DIFFERS on rank" in rank["text"]
        for error in (rank["error"], rank["first"]):
            assert "the first operator that differs is aten.log_softmax.int (" in error


def test_a_capture_that_has_become_stale_is_found(outcomes: Outcomes) -> None:
    for rank in ranks_of(outcomes, "stale capture"):
        assert rank["fresh"] and not rank["is_equal"]


@TABLE.parametrize("case", [(case,) for case in TRACES])
def test_training_goes_on_as_if_nothing_had_been_verified(outcomes: Outcomes, case: str) -> None:
    assert all(rank["is_same"] for rank in ranks_of(outcomes, case))


@TABLE.looks_at("whole")
def test_a_network_holds_whole_parameters_for_a_while(outcomes: Outcomes) -> None:
    assert all(rank["is_same"] and rank["is_cut"] for rank in ranks_of(outcomes, "whole"))


@TABLE.looks_at("refusals")
def test_what_cannot_be_verified_says_so_in_one_line_on_every_rank(outcomes: Outcomes) -> None:
    for rank in ranks_of(outcomes, "refusals"):
        assert "norm normalises the rows of each rank apart" in rank["batch norm"]
        assert "cut by hand" in rank["hybrid"]
        assert "none of whose results has a gradient" in rank["no gradient"]
        assert "does not run in one process: rank 1: ValueError: only of one rank" in rank["fails"]
        assert rank["stand_alone"] == "verify: stand_alone ranks exchange nothing: there is nothing to compare"
        assert "called no function of value_and_grad" in rank["no gradients"]
        assert not [text for text in rank.values() if "\n" in text]
        assert {text.partition(":")[0] for text in rank.values()} == {"UnverifiableError", "CaptureError", "verify"}


@TABLE.looks_at("variable")
def test_msrun_verify_looks_at_the_first_training_step_and_raises(outcomes: Outcomes) -> None:
    for rank in ranks_of(outcomes, "variable"):
        assert rank["losses"] == rank["plain"]
        assert "values differ from one process, first " in rank["error"]
        assert 'parallel_mode="semi_auto" computes loss and buffers over the rows of all ranks' in rank["error"]


FIRST_TO_DIFFER = {
    "planted/lost write": "the first operator that differs is aten.linear of head (",
    "planted/lost write in 16 bits": "the first operator that differs is aten.",
    "planted/gradient": "the results are right, and the gradients 2 times as large as they should be",
}


@TABLE.parametrize("case", [(case,) for case in PLANTED])
def test_the_first_step_finds_what_is_wrong_before_anything_is_trained(outcomes: Outcomes, case: str) -> None:
    for rank in ranks_of(outcomes, case):
        assert rank["error"].startswith("VerificationError: ") and FIRST_TO_DIFFER[case] in rank["error"]
        assert rank["stayed"]


SAID_OF_OWN_ROWS = {
    "sum": 'the loss is a sum over rows (reduction="sum")',
    "ignored": "masked, padded or ignored count unevenly",
    "empty": "none of its rows or labels is valid",
    "uneven": "the ranks have different numbers of rows",
    "contrastive": "rows are compared with each other",
    "buffer": "each rank writes buffers from its own rows",
    "counted": "these numbers are each rank's own",
}


def test_data_parallel_says_once_where_it_is_not_one_process(outcomes: Outcomes) -> None:
    first, *others = ranks_of(outcomes, "own rows")
    assert first["mean"] == first["batch norm"] == []
    for case, reason in SAID_OF_OWN_ROWS.items():
        (line,) = first[case]
        assert line.startswith("data_parallel is not one process here: ") and reason in line and "\n" not in line
        assert 'parallel_mode="semi_auto"' in line
    assert all(not said for rank in others for said in rank.values())


def test_the_check_of_the_first_step_leaves_no_trace(outcomes: Outcomes) -> None:
    for rank in outcomes["no trace"]:
        checked, unchecked, asked = rank
        assert checked == unchecked == asked


@TABLE.looks_at("switch")
def test_the_variable_decides_over_the_setting_and_large_networks_are_left_alone(outcomes: Outcomes) -> None:
    for rank in ranks_of(outcomes, "switch"):
        assert rank == {" None": True, " False": False, "0 True": False, "1 False": True, "large": False}
