"""Clipping, mixed precision and checkpoints in every mode: the numbers of one process.

The cases stand in tests/cases/mode_*.py; one job of four ranks runs them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mode_checkpoints
import mode_clipping
import mode_precision
import pytest
from job_runner import JobRunner

DEADLINE_S = 400.0
EXACT = 1e-10
MODULES = (mode_clipping, mode_precision, mode_checkpoints)
Outcome = list[dict[str, Any]]
"""What a case found, per rank."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 10)]


@pytest.fixture(scope="module")
def outcomes(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outcome]:
    """Gives what a case found."""
    folder = tmp_path_factory.mktemp("modes")
    words = [workers / "runtime" / "modes.py", folder / "result.json", *(module.__name__ for module in MODULES)]
    msrun_of_module.run_world(4, *words, cwd=folder, deadline_s=DEADLINE_S)
    found: dict[str, Outcome] = json.loads((folder / "result.json").read_text())

    def outcome(case: str) -> Outcome:
        for rank in found[case]:
            assert "error" not in rank, rank["error"]
        return found[case]

    return outcome


def names(module: Any, prefix: str) -> list[str]:
    return [name for name in module.cases(4) if name.startswith(prefix)]


def assert_trained(outcome: Outcome, tolerance: float) -> None:
    for rank in outcome:
        assert rank["losses"] == pytest.approx(rank["right"], rel=tolerance, abs=0)
        assert rank["difference"] <= tolerance
        assert rank["losses"][0] != rank["losses"][-1]


@pytest.mark.parametrize("case", names(mode_checkpoints, "checkpoint/"))
def test_checkpoints_of_fsdp_go_on_in_other_layouts_and_the_other_way_round(
    outcomes: Callable[..., Outcome], case: str
) -> None:
    assert_trained(outcomes(case), EXACT)


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
    assert sum(len(module.cases(4)) for module in MODULES) > 70
