"""What users do with pipelines besides training: predictions, checkpoints, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner

DEADLINE_S = 400.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 10)]


@pytest.fixture(scope="module")
def uses(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What four ranks in two stages found: a list with one dict for each."""
    folder = tmp_path_factory.mktemp("pipeline-uses")
    script, result = workers / "runtime" / "pipeline_uses.py", folder / "result.json"
    msrun_of_module.run_world(4, script, result, cwd=folder, deadline_s=DEADLINE_S)
    return json.loads(result.read_text())


def test_results_that_are_no_loss_stay_in_their_stage_unless_they_are_broadcast(uses: Any) -> None:
    found = [rank["predictions"] for rank in uses]
    assert [rank["broadcast False"] for rank in found] == [None, None, 0.0, 0.0]
    assert [rank["broadcast True"] for rank in found] == [0.0] * 4


def test_network_without_a_loss_is_refused_in_training(uses: Any) -> None:
    for rank in uses:
        assert (
            "StrategyError: Pipeline(net): in training net must return one scalar loss"
            in (rank["predictions"]["with gradients"])
        )


def test_gradients_are_multiplied_by_what_comes_in_and_batches_may_change_their_size(uses: Any) -> None:
    for rank in uses:
        for loss, right in rank["training"]["losses"]:
            assert loss == pytest.approx(right, rel=1e-12)


def test_without_gradients_only_forward_passes_run(uses: Any) -> None:
    """Two losses' micro batches leave stage 0, and two of the prediction."""
    for index, rank in enumerate(uses):
        loss, right, requires_grad = rank["training"]["without gradients"]
        assert loss == pytest.approx(right, rel=1e-12)
        assert requires_grad is False
        assert rank["training"]["sends"] == (4 if index < 2 else 0)
        assert rank["training"]["predicted"] < 1e-12


def test_parameters_in_stages_are_not_used_with_another_number_of_stages(uses: Any) -> None:
    for rank in uses:
        assert (
            "placed already, by another AutoParallel with another number of stages"
            in (rank["training"]["another number of stages"])
        )


def test_value_and_grad_gives_gradients_of_inputs_and_of_held_weights_and_other_results(uses: Any) -> None:
    for rank in uses:
        found = rank["inputs"]
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
        assert found["labels"]
        assert max(found["input"], found["weights"]) < 1e-12
    assert sum(rank["inputs"]["held"] for rank in uses) == 2 * 6, "each of six weights is in two ranks of a stage"


@pytest.mark.parametrize("way", ["stages to one", "one to stages", "stages-hsdp to zbv", "into placed stages"])
def test_training_goes_on_from_a_checkpoint_with_other_stages(uses: Any, way: str) -> None:
    for rank in uses:
        found = rank["checkpoints"][way]
        assert found["losses"] == pytest.approx(found["right"], rel=1e-12)


def test_checkpoint_of_stages_holds_every_whole_parameter(uses: Any) -> None:
    for way in ("stages to one", "stages-hsdp to zbv"):
        shapes = uses[0]["checkpoints"][way]["shapes"]
        assert shapes == {
            "first.weight": [8, 4], "first.bias": [8], "middle.weight": [8, 8], "middle.bias": [8],
            "last.weight": [3, 8], "last.bias": [3],
        }  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("twice", "backward() was called twice on one loss"),
        ("not wrapped", "wrap it in Pipeline(net_with_loss, micro_size)"),
        ("world", "pipeline(stages=3): 4 ranks cannot be divided into 3 equal stages"),
        ("inside", "the step computes with the result of a network whose batch is divided"),
        ("changed", "the step computes with the result of a network whose batch is divided"),
        ("different", "rank 2 captured another network than rank 0"),
        ("wrong order", "module last is in stage 0 but reads what operator aten.tanh in stage 1 makes"),
        ("batch", "a batch of 8 rows on this rank cannot be cut into 3 equal micro batches"),
        ("few micro batches", "Pipeline(micro_size=1): 1f1b with 2 stages needs at least 2 micro batches"),
    ],
)
def test_mistake_is_explained_on_every_rank(uses: Any, mistake: str, words: str) -> None:
    for rank in uses:
        assert words in rank["errors"][mistake]


def test_mistake_of_one_rank_is_told_to_the_others(uses: Any) -> None:
    own = "stage_config: no module 'lats' (did you mean last?); the network's modules are first, middle, last"
    assert uses[3]["errors"]["one rank fails"] == f"StrategyError: {own}"
    for rank in uses[:3]:
        assert rank["errors"]["one rank fails"] == f"CaptureError: rank 3 cannot run this call: {own}"


def test_rank_that_waits_for_another_stage_says_for_which_message(
    msrun_of_module: JobRunner, workers: Path, tmp_path: Path
) -> None:
    finished = msrun_of_module.run(
        "--worker_num=2", "--hang_time_out=2", workers / "runtime" / "pipeline_stuck.py", cwd=tmp_path
    )
    assert finished.code == 124, finished.stderr
    (line,) = finished.errors
    assert "behind: rank 1 (step 2" in line
    assert "rank 0 (step 3, waits in receive of gradients of micro batch 0, stage 1 to 0, from rank 1" in line
