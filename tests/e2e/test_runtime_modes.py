"""Modes without capture, and hybrid parallel: the numbers of one process.

The cases stand in tests/cases/mode_*.py. One job of four ranks runs them all, one of eight the hybrid network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mode_hybrid
import mode_training
import pytest
from asked_cases import CaseTable
from job_runner import JobRunner

DEADLINE_S = 400.0
EXACT = 1e-10
SINGLE = 1e-5
MODULES = (mode_training, mode_hybrid)
CASES = [name for module in MODULES for name in module.cases(4)]
SLOW = {
    *(name for name in CASES if name.startswith("train/") and name.endswith(("-step", "float32", "deferred"))),
    *("train/hybrid-without-marks", "train/fsdp-torch-optimizer"),
}
TABLE = CaseTable(CASES, fast=[name for name in CASES if name not in SLOW], key=lambda case: case)
Outcome = list[dict[str, Any]]
"""What a case found, per rank."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Outcome]:
    """Gives what a case found in a world; its job runs when first asked for."""
    found: dict[int, dict[str, Outcome] | None] = {}

    def run(world_size: int) -> dict[str, Outcome]:
        folder = tmp_path_factory.mktemp(f"modes-{world_size}")
        modules = MODULES if world_size == 4 else (mode_hybrid,)
        msrun_of_module.run_world(
            world_size,
            workers / "runtime" / "modes.py",
            folder / "result.json",
            *(module.__name__ for module in modules),
            cwd=folder,
            env=TABLE.asked(request) if world_size == 4 else {},
            deadline_s=DEADLINE_S,
        )
        return dict(json.loads((folder / "result.json").read_text()))

    def outcome(case: str, world_size: int = 4) -> Outcome:
        if world_size not in found:
            found[world_size] = None
            found[world_size] = run(world_size)
        outcomes_of_world = found[world_size]
        assert outcomes_of_world is not None, "the job failed before"
        ranks = outcomes_of_world[case]
        for rank in ranks:
            assert "error" not in rank, rank["error"]
        return ranks

    return outcome


def names(module: Any, prefix: str) -> list[str]:
    return [name for name in module.cases(4) if name.startswith(prefix)]


def assert_trained(outcome: Outcome, tolerance: float, *, has_own_losses: bool = False) -> None:
    means = [sum(losses) / len(outcome) for losses in zip(*(rank["losses"] for rank in outcome), strict=True)]
    assert has_own_losses is (outcome[0]["losses"] != outcome[1]["losses"])
    for rank in outcome:
        assert (means if has_own_losses else rank["losses"]) == pytest.approx(rank["right"], rel=tolerance, abs=0)
        assert rank["difference"] <= tolerance
        assert rank["losses"][0] != rank["losses"][-1]


# -- modes --------------------------------------------------------------------------------------------------------


@TABLE.parametrize("case", [(name,) for name in names(mode_training, "train/")])
def test_every_mode_trains_as_one_process_does(outcomes: Callable[..., Outcome], case: str) -> None:
    means_mindspore = "sum" in case or "mindspore" in case
    assert_trained(outcomes(case), SINGLE if case.endswith("float32") else EXACT, has_own_losses=means_mindspore)


def test_stand_alone_ranks_train_for_themselves_and_exchange_nothing(outcomes: Callable[..., Outcome]) -> None:
    ranks = outcomes("stand-alone")
    for rank in ranks:
        assert rank["losses"] == rank["right"]
        assert rank["difference"] == 0.0
        assert rank["losses"][0] != rank["losses"][-1]
    assert [rank["calls"] for rank in ranks] == [0, 0, 0, 0]
    assert len({rank["losses"][0] for rank in ranks}) == 4


def test_ranks_that_differ_get_the_values_of_rank_0_and_the_plan_says_so(outcomes: Callable[..., Outcome]) -> None:
    notes = outcomes("train/data-parallel")[0]["plan"]["notes"]
    assert notes == ["4 parameters or buffers differed between ranks (layer1.weight, ...): rank 0's are used"]
    assert outcomes("train/mindspore-mean")[0]["plan"]["notes"] == []


def test_without_broadcast_ranks_keep_their_own_values_and_the_plan_says_so(outcomes: Callable[..., Outcome]) -> None:
    ranks = outcomes("no-broadcast")
    (note,) = ranks[0]["notes"]
    assert "layer2.bias" in note
    assert note.endswith("parameter_broadcast is off: the ranks train different networks")
    assert [round(rank["bias"][0] - ranks[0]["bias"][0], 9) for rank in ranks] == [0.0, 1.0, 2.0, 3.0]


def test_plan_says_whether_gradients_are_means_or_sums(outcomes: Callable[..., Outcome]) -> None:
    assert "gradients are means over the ranks (torch)" in outcomes("train/data-parallel")[0]["explain"]
    assert "added up over the ranks (MindSpore's gradients_mean=False)" in outcomes("train/sum")[0]["explain"]
    assert "means over the ranks" in outcomes("train/mindspore-mean")[0]["explain"]


def test_every_form_of_a_call_begins_with_the_buffers_of_rank_0(outcomes: Callable[..., Outcome]) -> None:
    ranks = outcomes("buffers")
    forms = ("module", "hsdp", "step")
    assert ranks[1]["module"]["trained"] != ranks[0]["module"]["trained"], "every rank has rows of its own"
    for rank in ranks:
        for form in forms:
            assert rank[form]["trained"] == pytest.approx(rank["module"]["trained"], rel=EXACT)
            assert rank[form]["called again"] == ranks[0][form]["trained"]


@pytest.mark.parametrize("level", mode_training.LEVELS)
def test_hsdp_without_capture_names_what_is_cut_and_what_stays_whole(
    outcomes: Callable[..., Outcome], level: str
) -> None:
    plan = outcomes(f"train/fsdp-{level}")[0]["plan"]
    found = {p["name"]: (p["local_shape"], p["shard_ranks"], p["reason"]) for p in plan["parameters"]}
    assert found == {
        "layer1.weight": ([8, 24], 4, "rows cut over 4 ranks"),
        "layer1.bias": ([32], 1, "256 B is under the threshold of 1 KB"),
        "layer2.weight": ([6, 32], 1, "its 6 rows cannot be cut into 4 equal parts"),
        "layer2.bias": ([6], 1, "48 B is under the threshold of 1 KB"),
    }
    assert f"hsdp {level}" in plan["optimizer_parallel"]
    assert any("optimizers made before follow" in note for note in plan["notes"])


def test_shard_size_says_how_many_ranks_share_a_weight(outcomes: Callable[..., Outcome]) -> None:
    plan = outcomes("train/fsdp-shard-size-2")[0]["plan"]
    assert {p["name"]: p["local_shape"] for p in plan["parameters"]} == {
        "layer1.weight": [16, 24],
        "layer1.bias": [16],
        "layer2.weight": [3, 32],
        "layer2.bias": [3],
    }


@pytest.mark.parametrize("case", names(mode_training, "accumulate/"))
def test_gradients_of_two_backward_passes_are_those_of_both_batches(
    outcomes: Callable[..., Outcome], case: str
) -> None:
    for rank in outcomes(case):
        assert rank["difference"] <= EXACT
        assert rank["waits"] is (case == "accumulate/level1"), "level2 and level3 hold cut gradients at once"


@pytest.mark.parametrize("case", ["two-functions", "input-gradients", "value-and-grad-of-module", "unused"])
def test_gradients_without_capture_are_those_of_one_process(outcomes: Callable[..., Outcome], case: str) -> None:
    assert all(rank["difference"] <= EXACT for rank in outcomes(case))


def test_value_and_grad_leaves_gradients_that_were_there_alone(outcomes: Callable[..., Outcome]) -> None:
    assert all(rank["is_kept"] for rank in outcomes("value-and-grad-of-module"))


def test_model_runs_in_the_mode_of_the_context(outcomes: Callable[..., Outcome]) -> None:
    ranks = outcomes("context/model")
    assert_trained(ranks, EXACT)
    assert {rank["mode"] for rank in ranks} == {"data_parallel"}


def test_context_turns_on_optimizer_parallel_and_full_batch(outcomes: Callable[..., Outcome]) -> None:
    ranks = outcomes("context/hsdp")
    assert_trained(ranks, EXACT)
    plan = ranks[0]["plan"]
    assert plan["dataset_strategy"] == "full_batch"
    assert plan["optimizer_parallel"].startswith("hsdp level2")
    assert [p["shard_ranks"] for p in plan["parameters"] if p["name"] == "layer1.weight"] == [4]
    assert any("gradients_mean changes nothing" in note for note in plan["notes"])


# -- hybrid parallel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["hybrid/module", "hybrid/step", "hybrid/semi-auto"])
def test_hand_cut_network_of_the_document_equals_its_semi_auto_twin_and_one_process(
    outcomes: Callable[..., Outcome], case: str, world_size: int
) -> None:
    ranks = outcomes(case, world_size)
    assert len(ranks) == world_size
    assert_trained(ranks, EXACT)


def test_plan_names_parameters_that_are_a_ranks_own(outcomes: Callable[..., Outcome]) -> None:
    assert outcomes("hybrid/module")[0]["reasons"] == {"weight": "this rank's own part", "scale": "hsdp is off"}


def test_mindspores_sums_leave_marked_gradients_as_the_operators_give_them(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("hybrid/mindspore"):
        assert rank["mean"] == pytest.approx([4.0, 1.0])
        assert rank["sum"] == pytest.approx([4.0, 4.0])


def test_marked_parameters_are_refused_where_they_would_be_reduced_or_cut(
    outcomes: Callable[..., Outcome],
) -> None:
    for rank in outcomes("hybrid/refusals"):
        for mode in ("data_parallel", "semi_auto"):
            assert "parameter weight is marked layerwise_parallel" in rank[mode]
            assert 'use parallel_mode="hybrid_parallel"' in rank[mode]


def test_hand_cut_network_is_saved_by_every_rank_and_goes_on(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("hybrid/resumed"):
        for form in ("shared", "apart"):
            right, resumed = rank[form]["losses"]
            assert resumed == right
            assert rank[form]["is_same"]
            assert rank[form]["files"] == ["a"]
            assert rank[form]["shape"] == [512, 128 // 4]


MOVES = {
    "all-reduce": ["all_reduce"],
    "all-reduce-max": ["all_reduce"],
    "all-reduce-min": ["all_reduce"],
    "all-gather": ["all_gather", "reduce_scatter"],
    "all-gather-last": ["all_gather", "reduce_scatter"],
    "reduce-scatter": ["all_gather", "reduce_scatter"],
    "reduce-scatter-last": ["all_gather", "reduce_scatter"],
    "broadcast": ["all_reduce", "broadcast"],
    "all-to-all": ["all_to_all"],
    "all-to-all-across": ["all_to_all"],
}


@pytest.mark.parametrize("name", MOVES)
def test_communication_operator_has_the_result_and_the_gradient_of_the_sum_of_losses(
    outcomes: Callable[..., Outcome], name: str
) -> None:
    in_groups = [rank[name] for rank in outcomes("operators/groups")]
    for rank in [*outcomes(f"operators/{name}"), *in_groups]:
        assert rank["difference"] <= EXACT
        assert rank["of_gradient"] <= EXACT
        assert rank["moved"] == MOVES[name]


def test_every_case_is_looked_at() -> None:
    """Guards the guard."""
    assert len(CASES) > 45
