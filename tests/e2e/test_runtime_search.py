"""Searched strategies on real ranks: the losses of one process, the traffic that was priced, limits of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import searched_training
from asked_cases import CaseTable
from case_job import Outcomes, errors_of
from job_runner import JobRunner
from only_cases import ONLY_CASES

DEADLINE_S = 300.0
KEYS = [f"{ranks}/{case}" for ranks in (2, 4) for case in searched_training.cases(ranks)]
TABLE = CaseTable(
    KEYS,
    fast=[
        *("2/mlp/dynamic_programming", "2/honoured", "2/limit/0.01"),
        *("2/cut_short", "2/captured_by_some"),
    ],
    key=lambda key: key,
)
TRAINED = [key for key in KEYS if key.count("/") == 2 and "limit" not in key and "divided" not in key]

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    """What the cases returned, one job for each number of ranks that a chosen test asks for."""
    asked = json.loads(TABLE.asked(request)[ONLY_CASES])
    found: Outcomes = {}
    for ranks in (2, 4):
        cases = [key.partition("/")[2] for key in asked if key.startswith(f"{ranks}/")]
        if not cases:
            continue
        folder = tmp_path_factory.mktemp(f"search-{ranks}")
        result, env = folder / "result.json", {ONLY_CASES: json.dumps(cases)}
        program = workers / "runtime" / "modes.py"
        msrun_of_module.run_world(
            ranks, program, result, "searched_training", cwd=folder, env=env, deadline_s=DEADLINE_S
        )
        found |= {f"{ranks}/{case}": value for case, value in json.loads(result.read_text()).items()}
    return found


@TABLE.parametrize("key", [(key,) for key in TRAINED])
def test_searched_strategies_train_as_one_process(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    for found in outcomes[key]:
        assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
        assert found["strategies"] == outcomes[key][0]["strategies"], "every rank has found the same"


@TABLE.parametrize("key", [(key,) for key in TRAINED])
def test_the_traffic_of_searched_strategies_is_the_counted_one(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    for found in outcomes[key]:
        assert found["counted"] == found["planned"]
    first = outcomes[key][0]  # what a halo sends differs between ranks
    assert first["priced"] == first["counted"]


@TABLE.parametrize("key", [(key,) for key in TRAINED])
def test_the_plan_says_what_was_searched_and_what_data_parallel_would_take(outcomes: Outcomes, key: str) -> None:
    found = outcomes[key][0]
    assert "note: searched (" in found["explain"]
    assert "note: data parallel instead: " in found["explain"]
    mode = key.rpartition("/")[2]
    assert found["mode"] == {"auto_parallel": "recursive_programming"}.get(mode, mode)


@TABLE.parametrize("key", [(key,) for key in KEYS if "divided" in key])
def test_a_step_divided_as_searched_trains_as_one_process(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    for found in outcomes[key]:
        assert found["losses"] == pytest.approx(found["right"], rel=1e-9), found["degrees"]
        assert found["degrees"] == outcomes[key][0]["degrees"], "every rank has found the same"


@TABLE.parametrize("key", [("2/file",), ("4/file",)])
def test_strategies_of_a_file_are_those_that_were_saved(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    found = outcomes[key][0]
    assert found["losses"][0] == found["losses"][1]
    assert found["saved"] == found["plans"][0] == found["plans"][1]
    assert found["saved"]["operators"]
    assert "the network has no operator 'linear_1'" in found["refused"]


@TABLE.parametrize("key", [("2/honoured",), ("4/honoured",)])
def test_an_operator_with_a_strategy_of_the_users_keeps_it(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    found, ranks = outcomes[key][0], int(key[0])
    assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
    assert found["down"] == [[[1, ranks], [1, ranks], [1]], "user"]


@TABLE.parametrize("key", [(key,) for key in KEYS if "limit" in key])
def test_a_limit_of_memory_is_kept_or_the_missing_bytes_are_told(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    found, limit_mb = outcomes[key][0], float(key.rpartition("/")[2])
    if "refused" in found:
        assert limit_mb < 0.4
        assert "too much" in found["refused"] or "cannot be brought under" in found["refused"]
        return
    assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
    assert found["memory"] <= limit_mb * 2**20


@TABLE.parametrize("key", [("2/cut_short",), ("4/cut_short",)])
def test_a_rank_that_has_no_time_cuts_the_search_of_all_short(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    for found in outcomes[key]:
        assert found["losses"] == pytest.approx(found["right"], rel=1e-9)
        assert found["operators"] == outcomes[key][0]["operators"]
        assert any("came after 1 of 15 searches; this is the best of their plans" in note for note in found["notes"])


@TABLE.parametrize("key", [("2/captured_by_some",), ("4/captured_by_some",)])
def test_a_search_does_not_wait_for_a_rank_that_has_nothing_to_search(outcomes: Outcomes, key: str) -> None:
    assert errors_of(outcomes, key) == []
    *others, last = outcomes[key]
    for found in others:
        assert found["refused"].startswith(f"rank {int(key[0]) - 1} cannot run this call: {last['refused'][:20]}")
