"""Pipelines give the numbers of one process, in as few messages as there must be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner
from pipeline_scenarios import BLOCKS, CLASSES, GLOBAL_BATCH, SCENARIOS, STEPS, WIDTH, WORLD_SIZES, Scenario

DEADLINE_S = 400.0
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def run_job(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a worker script in a world of some size and returns what it found."""

    def run(script: str, world_size: int) -> Any:
        folder = tmp_path_factory.mktemp(f"{script}-{world_size}")
        msrun_of_module.run_world(
            world_size, workers / "runtime" / f"{script}.py", folder / "result.json", cwd=folder, deadline_s=DEADLINE_S
        )
        return json.loads((folder / "result.json").read_text())

    return run


@pytest.fixture(scope="module")
def results(run_job: Any) -> Mapping[str, Any]:
    """What the worker found for every scenario; one job for each size of the world, started when first asked for."""
    found: dict[str, Any] = {}

    class Results(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            if name not in found:
                found.update(run_job("pipelines", BY_NAME[name.partition("/")[0]].world_size))
            return found[name]

    return Results()


def every_run() -> Any:
    runs = [(scenario, dtype) for size in WORLD_SIZES for scenario in SCENARIOS if scenario.world_size == size for dtype in scenario.dtypes]  # fmt: skip  # noqa: E501
    return pytest.mark.parametrize(("scenario", "dtype"), [pytest.param(s, d, id=f"{s.name}-{d}") for s, d in runs])


@every_run()
def test_losses_of_a_pipeline_are_those_of_one_process_on_every_rank(
    results: dict[str, Any], scenario: Scenario, dtype: str
) -> None:
    found = results[f"{scenario.name}/{dtype}"]
    assert len(found["right"]) == STEPS
    for rank in found["ranks"]:
        assert rank["losses"] == pytest.approx(found["right"], rel=TOLERANCE[dtype], abs=0)
        assert rank["losses"] == found["ranks"][0]["losses"]
    assert found["right"][-1] != found["right"][0]


@every_run()
def test_weights_of_a_pipeline_are_those_of_one_process(
    results: dict[str, Any], scenario: Scenario, dtype: str
) -> None:
    for rank in results[f"{scenario.name}/{dtype}"]["ranks"]:
        assert rank["difference"] <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", BY_NAME)
def test_ranks_hold_the_parameters_of_their_stages_alone(results: dict[str, Any], name: str) -> None:
    """What the graph does not use stays everywhere."""
    found = results[f"{name}/float64"]
    everywhere = {p["name"] for p in found["plan"]["parameters"] if not p["stages"]}
    assert everywhere == {"unused.weight", "unused.bias"}
    holders: dict[str, set[int]] = {}
    for rank, of_rank in enumerate(found["ranks"]):
        stages = [stage for stage in found["plan"]["pipeline"]["stages"] if rank in stage["ranks"]]
        assert len(stages) == BY_NAME[name].chunks
        assert set(of_rank["held"]) == everywhere.union(*(stage["parameters"] for stage in stages))
        for parameter in of_rank["held"]:
            holders.setdefault(parameter, set()).add(rank // BY_NAME[name].stage_size)
    shared = {parameter for parameter, ranks in holders.items() if len(ranks) > 1} - everywhere
    one_rank_holds_both_ends = BY_NAME[name].scheduler == "zbv" or BY_NAME[name].stages == 1
    assert shared == ({"first.weight"} if BY_NAME[name].tied and not one_rank_holds_both_ends else set())


def test_modules_go_to_the_stages_that_the_user_names_and_the_others_follow(results: dict[str, Any]) -> None:
    first, second = results["1f1b/float64"]["plan"]["pipeline"]["stages"]
    assert [name for name in first["parameters"] if not name.startswith("blocks")] == ["first.weight", "first.bias"]
    assert {name.split(".")[1] for name in first["parameters"] if name.startswith("blocks")} == {"0", "1"}
    assert [name for name in second["parameters"] if not name.startswith("blocks")] == ["last.weight", "last.bias"]
    assert "one_hot" in " ".join(second["operators"]), "what is computed of labels alone belongs to its reader"


WITH_MESSAGES = [s for s in SCENARIOS if s.form != "model"]


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in WITH_MESSAGES])
def test_number_and_bytes_of_messages_are_the_closed_form(results: dict[str, Any], scenario: Scenario) -> None:
    """Every border value of every copy of every micro batch is sent once, its gradient once, by every rank of a
    stage; borders between stages of one rank cost nothing."""
    found = results[f"{scenario.name}/float64"]
    stages = found["plan"]["pipeline"]["stages"]
    sent_calls = [0] * scenario.world_size
    sent_bytes = [0] * scenario.world_size
    times = scenario.micro_size * scenario.copies
    for border in found["plan"]["pipeline"]["borders"]:
        assert border["has_gradient"]
        here, there = (stages[border["from_stage"] + more]["ranks"] for more in (0, 1))
        if here != there:
            for rank in [*here, *there]:
                sent_calls[rank] += times
                sent_bytes[rank] += border["nbytes"] * scenario.micro_size
    for rank, of_rank in enumerate(found["ranks"]):
        assert of_rank["traffic"]["calls"].get("send", 0) == sent_calls[rank]
        assert of_rank["traffic"]["bytes"].get("send", 0) == sent_bytes[rank]
    assert sum(of_rank["traffic"]["bytes"].get("receive", 0) for of_rank in found["ranks"]) == sum(sent_bytes)


def test_border_of_one_activation_carries_the_rows_of_a_micro_batch_alone(results: dict[str, Any]) -> None:
    (border,) = results["gpipe/float64"]["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["gpipe"].micro_size
    assert border["shape"] == [rows, WIDTH]
    assert results["gpipe/float64"]["ranks"][0]["traffic"]["bytes"]["send"] == GLOBAL_BATCH * WIDTH * 8


def test_value_that_skips_stages_is_passed_along_in_the_layout_that_it_has(results: dict[str, Any]) -> None:
    borders = results["four-stages/float64"]["plan"]["pipeline"]["borders"]
    skipping = [border for border in borders if border["name"] == borders[0]["name"]]
    assert [border["from_stage"] for border in skipping] == [0, 1, 2]
    # Full batch and tensor parallel: the ranks of a stage hold the residual stream cut by rows, as layouts go.
    halves = results["tensor-parallel/float64"]["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["tensor-parallel"].micro_size
    assert [rows // 2, WIDTH] in [border["shape"] for border in halves]


def test_gradients_of_level2_are_scattered_after_every_micro_batch_and_weights_gathered_once(
    results: dict[str, Any],
) -> None:
    calls = results["data-parallel/float64"]["ranks"][0]["traffic"]["calls"]
    assert calls["reduce_scatter"] == 2
    assert calls["all_gather"] == 1
    assert calls["broadcast"] == 1


def test_explanation_says_which_stage_holds_what_and_what_leaves_it(results: dict[str, Any]) -> None:
    text = results["four-stages/float64"]["explain"]
    assert text.startswith("4 ranks in 4 stages (1f1b, 4 micro batches, 1 rank each)")
    assert "stages, divided by equal cost; 1f1b: 4 stages, 4 micro batches, bubble 42.9 %" in text
    (tied,) = [line for line in text.splitlines() if line.split()[:1] == ["first.weight"]]
    assert "stage 0,3, message" in tied
    (foreign,) = [line for line in text.splitlines() if line.split()[:1] == ["blocks.1.2.weight"]]
    assert f"{WIDTH}x{WIDTH} -> 0x{WIDTH} " in foreign
    assert "elsewhere" in foreign
    assert "512 B per micro batch, and its gradient back" in text
    assert sum(line.startswith("  stage ") for line in text.splitlines()) == 4


def test_losses_of_micro_batches_are_added_up_for_mindspore_and_the_gradient_is_that_of_their_mean(
    results: dict[str, Any],
) -> None:
    """The oracle's weights have moved by the mean's gradient; its losses are sums."""
    sums, means = results["tied-step-function-sums/float64"], results["zbv/float64"]
    factor = BY_NAME["tied-step-function-sums"].micro_size
    assert sums["ranks"][0]["losses"] == pytest.approx([loss * factor for loss in means["ranks"][0]["losses"]])


def test_network_of_the_scenarios_is_the_one_that_the_closed_forms_speak_of(results: dict[str, Any]) -> None:
    names = {p["name"] for p in results["gpipe/float64"]["plan"]["parameters"]}
    assert len(names) == 2 + 3 * BLOCKS + 2 + 2
    (first,) = [p for p in results["gpipe/float64"]["plan"]["parameters"] if p["name"] == "first.weight"]
    assert first["global_shape"] == [WIDTH, CLASSES]


# -- what else users do ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uses(run_job: Any) -> Any:
    """What four ranks in two stages found: a list with one dict for each."""
    return run_job("pipeline_uses", 4)


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
