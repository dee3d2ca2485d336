"""Modes without capture, hybrid parallel, clipping and mixed precision: the numbers of one process.

The cases stand in tests/cases/mode_*.py. One job of four ranks runs them all, one of eight the hybrid network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mode_checkpoints
import mode_clipping
import mode_hybrid
import mode_precision
import mode_training
import pytest
from job_runner import JobRunner

DEADLINE_S = 400.0
EXACT = 1e-10
SINGLE = 1e-5
FOUR = ("mode_training", "mode_hybrid", "mode_clipping", "mode_precision", "mode_checkpoints")
Outcome = list[dict[str, Any]]
"""What a case found, per rank."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Outcome]:
    """Gives what a case found in a world; its job runs when first asked for."""
    found: dict[int, dict[str, Outcome] | None] = {}

    def run(world_size: int) -> dict[str, Outcome]:
        folder = tmp_path_factory.mktemp(f"modes-{world_size}")
        modules = FOUR if world_size == 4 else ("mode_hybrid",)
        msrun_of_module.run_world(
            world_size,
            workers / "runtime" / "modes.py",
            folder / "result.json",
            *modules,
            cwd=folder,
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


def assert_trained(outcome: Outcome, tolerance: float) -> None:
    for rank in outcome:
        assert rank["losses"] == pytest.approx(rank["right"], rel=tolerance, abs=0)
        assert rank["difference"] <= tolerance
        assert rank["losses"][0] != rank["losses"][-1]


# -- modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", names(mode_training, "train/"))
def test_every_mode_trains_as_one_process_does(outcomes: Callable[..., Outcome], case: str) -> None:
    assert_trained(outcomes(case), SINGLE if case.endswith("float32") else EXACT)


def test_stand_alone_ranks_train_for_themselves_and_exchange_nothing(outcomes: Callable[..., Outcome]) -> None:
    ranks = outcomes("stand-alone")
    assert_trained(ranks, 0.0)
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


@pytest.mark.parametrize("level", mode_training.LEVELS)
def test_hsdp_without_capture_names_what_is_cut_and_what_stays_whole(
    outcomes: Callable[..., Outcome], level: str
) -> None:
    plan = outcomes(f"train/fsdp-{level}")[0]["plan"]
    found = {p["name"]: (p["local_shape"], p["shard_ranks"], p["reason"]) for p in plan["parameters"]}
    assert found == {
        "layer1.weight": ([8, 24], 4, "rows cut over 4 ranks"),
        "layer1.bias": ([32], 1, "0.25 KB is under the threshold of 1 KB"),
        "layer2.weight": ([6, 32], 1, "its 6 rows cannot be cut into 4 equal parts"),
        "layer2.bias": ([6], 1, "0.046875 KB is under the threshold of 1 KB"),
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


@pytest.mark.parametrize("case", names(mode_checkpoints, "checkpoint/"))
def test_checkpoints_of_fsdp_go_on_in_other_layouts_and_the_other_way_round(
    outcomes: Callable[..., Outcome], case: str
) -> None:
    assert_trained(outcomes(case), EXACT)


# -- hybrid parallel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [4, 8])
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


def test_marked_parameters_are_refused_where_they_would_be_reduced_cut_or_saved_as_whole(
    outcomes: Callable[..., Outcome],
) -> None:
    for rank in outcomes("hybrid/refusals"):
        for mode in ("data_parallel", "semi_auto"):
            assert "parameter weight is marked layerwise_parallel" in rank[mode]
            assert 'use parallel_mode="hybrid_parallel"' in rank[mode]
        assert "no rank knows the whole of it" in rank["checkpoint"]


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


# -- clipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [name for name in names(mode_clipping, "clip/") if name != "clip/changed"])
def test_clipped_training_is_that_of_torchs_clipping_in_one_process(
    outcomes: Callable[..., Outcome], case: str
) -> None:
    is_whole = case.startswith(("clip/semi-auto", "clip/data-parallel"))
    for rank in outcomes(case):
        assert_trained([rank], EXACT)
        assert rank["norms"] == pytest.approx(rank["right_norms"], rel=EXACT)
        assert min(rank["norms"]) > mode_clipping.MAX_NORM
        assert rank["moved"] == [0 if is_whole else 1] * mode_clipping.STEPS


@pytest.mark.parametrize("case", names(mode_clipping, "mixture/"))
def test_one_list_may_mix_meshes_marked_parts_and_whole_parameters(outcomes: Callable[..., Outcome], case: str) -> None:
    for rank in outcomes(case):
        assert rank["norm"] == pytest.approx(rank["right_norm"], rel=EXACT)
        assert rank["difference"] <= EXACT
        assert rank["moved"] == 1


def test_changed_gradients_need_their_weights(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("clip/changed"):
        assert "is not one that value_and_grad returned, so its layout is not known: give weights=" in rank["text"]
        assert rank["difference"] == 0.0


# -- mixed precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*names(mode_precision, "mixed/"), *names(mode_precision, "scaled/")])
def test_mixed_precision_trains_as_one_process_under_autocast_with_weights_in_float32(
    outcomes: Callable[..., Outcome], case: str
) -> None:
    for rank in outcomes(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-3)
        assert rank["losses"] != pytest.approx(rank["float32"], rel=1e-6), "nothing was computed in 16 bits"
        assert set(rank["weights"]) == {"torch.float32"}
        assert set(rank["types"]) <= {"torch.float32"}


@pytest.mark.parametrize("case", names(mode_precision, "faint/"))
def test_gradients_of_micro_batches_too_small_for_float16_survive_with_a_loss_scale(
    outcomes: Callable[..., Outcome], case: str
) -> None:
    for rank in outcomes(case):
        assert len(rank["differences"]) >= 2
        assert max(rank["differences"]) < 1e-2


def test_columns_computed_in_16_bits_are_bit_by_bit_those_of_autocast(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("mixed/columns"):
        assert rank["losses"][0] == pytest.approx(rank["right"][0], rel=1e-7)
        assert abs(rank["losses"][0] - rank["float32"][0]) > 1e-5


def test_weights_are_gathered_in_16_bits_and_gradients_summed_in_32(outcomes: Callable[..., Outcome]) -> None:
    elements = 32 * 24
    moved = outcomes("mixed/hsdp-module")[0]["moved"]
    assert moved["all_gather"] == elements // 4 * 2
    assert moved["reduce_scatter"] == elements * 4


@pytest.mark.parametrize("case", names(mode_precision, "scaled/data-parallel"))
def test_looking_for_overflows_costs_one_number(outcomes: Callable[..., Outcome], case: str) -> None:
    scaled, plain = outcomes(case)[0]["moved"], outcomes(case.replace("scaled", "mixed"))[0]["moved"]
    assert scaled["all_reduce"] - plain["all_reduce"] == 4


def test_network_that_says_autocast_itself_is_captured_with_its_casts(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("region"):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-6)
        assert rank["notes"] == []


@pytest.mark.parametrize("case", [n for n in names(mode_precision, "overflow/") if n != "overflow/stand-alone"])
def test_gradients_that_overflow_on_one_rank_are_skipped_by_all(outcomes: Callable[..., Outcome], case: str) -> None:
    bad = mode_precision.BAD_STEP
    for rank in outcomes(case):
        assert rank["changed"] == [step != bad for step in range(mode_precision.STEPS)]
        assert rank["scales"] == [2.0**16] * bad + [2.0**15] * (mode_precision.STEPS - bad)
        assert rank["losses_after"] == pytest.approx(rank["right_after"], rel=1e-3)
        assert rank["is_finite"]


def test_overflow_that_only_one_rank_can_see_is_skipped_by_all(outcomes: Callable[..., Outcome]) -> None:
    bad = mode_precision.BAD_STEP
    ranks = outcomes("seen-by-one")
    assert [rank["sees"][bad] for rank in ranks] == [True, False, False, False]
    for rank in ranks:
        assert rank["changed"] == [step != bad for step in range(1, mode_precision.STEPS)]
        assert rank["scales"] == [2.0**16] * bad + [2.0**15] * (mode_precision.STEPS - bad)


def test_stand_alone_ranks_skip_their_own_overflows_only(outcomes: Callable[..., Outcome]) -> None:
    bad = mode_precision.BAD_STEP
    for number, rank in enumerate(outcomes("overflow/stand-alone")):
        assert rank["changed"][bad] is (number != 1)
        assert rank["scales"][-1] == (2.0**15 if number == 1 else 2.0**16)


def test_model_trains_with_a_dynamic_loss_scale(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("model"):
        assert rank["scale"] == 2.0**16
        assert rank["loss"] < rank["before"] - 0.1


def test_float16_without_a_scale_is_said_aloud(outcomes: Callable[..., Outcome]) -> None:
    notes = outcomes("mixed/float16-unscaled")[0]["notes"]
    assert any('give mixed_precision(loss_scale="dynamic")' in note for note in notes)


@pytest.mark.parametrize(
    "case", ["semi_auto-module", "semi_auto-step", "data_parallel-module", "data_parallel-step", "fsdp-module"]
)
def test_short_gradients_are_added_up_in_float32_unless_switched_off(
    outcomes: Callable[..., Outcome], case: str
) -> None:
    share = 1.0 if case.startswith("semi_auto") else 0.25  # a sum of the network's own, or the mean of the ranks
    for rank in outcomes(f"sum/{case}-True"):
        assert rank["gradient"] == [258.0 * share] * 4
        assert rank["dtype"] == "torch.bfloat16"
        assert rank["summed"] == ["torch.float32"] or case == "fsdp-module"  # each rank adds up its part alone
    if case != "fsdp-module":
        for rank in outcomes(f"sum/{case}-False"):
            assert rank["summed"] == ["torch.bfloat16"]


def test_every_case_is_looked_at() -> None:
    """Guards the guard."""
    count = sum(len(module.cases(4)) for module in (mode_training, mode_hybrid, mode_clipping, mode_precision))
    assert count > 90
