"""Pipelines give the numbers of one process, in as few messages as there must be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from job_runner import JobRunner
from pipeline_scenarios import BLOCKS, CLASSES, GLOBAL_BATCH, SCENARIOS, STEPS, WIDTH, Scenario

DEADLINE_S = 400.0
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
RUNS = sorted(((s, dtype) for s in SCENARIOS for dtype in s.dtypes), key=lambda run: run[0].world_size)
TABLE = CaseTable(
    (f"{scenario.name}/{dtype}" for scenario, dtype in RUNS),
    fast=["zero-bubble-level3-copies/float64"],
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    """What the worker found for every scenario; one job for each size of the world, started when first asked for."""

    class Results(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            world_size = BY_NAME[name.partition("/")[0]].world_size
            folder = tmp_path_factory.mktemp(f"pipelines-{world_size}")
            script, result = workers / "runtime" / "pipelines.py", folder / "result.json"
            msrun_of_module.run_world(
                world_size, script, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S
            )
            self.update(json.loads(result.read_text()))
            return dict(self)[name]

    return Results()


def every_run() -> Any:
    return TABLE.parametrize("scenario, dtype", RUNS)


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


@TABLE.parametrize("name, dtype", [(name, "float64") for name in BY_NAME])
def test_ranks_hold_the_parameters_of_their_stages_alone(results: dict[str, Any], name: str, dtype: str) -> None:
    """What the graph does not use stays everywhere."""
    found = results[f"{name}/{dtype}"]
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


@TABLE.looks_at("1f1b/float64")
def test_modules_go_to_the_stages_that_the_user_names_and_the_others_follow(results: dict[str, Any]) -> None:
    first, second = results["1f1b/float64"]["plan"]["pipeline"]["stages"]
    assert [name for name in first["parameters"] if not name.startswith("blocks")] == ["first.weight", "first.bias"]
    assert {name.split(".")[1] for name in first["parameters"] if name.startswith("blocks")} == {"0", "1"}
    assert [name for name in second["parameters"] if not name.startswith("blocks")] == ["last.weight", "last.bias"]
    assert "one_hot" in " ".join(second["operators"]), "what is computed of labels alone belongs to its reader"


@TABLE.parametrize("scenario, dtype", [(s, "float64") for s in SCENARIOS if s.form != "model"])
def test_number_and_bytes_of_messages_are_the_closed_form(
    results: dict[str, Any], scenario: Scenario, dtype: str
) -> None:
    """Every border value of every copy of every micro batch is sent once, its gradient once, by every rank of a
    stage; borders between stages of one rank cost nothing."""
    found = results[f"{scenario.name}/{dtype}"]
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


@TABLE.looks_at("gpipe/float64")
def test_border_of_one_activation_carries_the_rows_of_a_micro_batch_alone(results: dict[str, Any]) -> None:
    (border,) = results["gpipe/float64"]["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["gpipe"].micro_size
    assert border["shape"] == [rows, WIDTH]
    assert results["gpipe/float64"]["ranks"][0]["traffic"]["bytes"]["send"] == GLOBAL_BATCH * WIDTH * 8


@TABLE.looks_at("four-stages/float64", "tensor-parallel/float64")
def test_value_that_skips_stages_is_passed_along_in_the_layout_that_it_has(results: dict[str, Any]) -> None:
    borders = results["four-stages/float64"]["plan"]["pipeline"]["borders"]
    skipping = [border for border in borders if border["name"] == borders[0]["name"]]
    assert [border["from_stage"] for border in skipping] == [0, 1, 2]
    # Full batch and tensor parallel: the ranks of a stage hold the residual stream cut by rows, as layouts go.
    halves = results["tensor-parallel/float64"]["plan"]["pipeline"]["borders"]
    rows = GLOBAL_BATCH // BY_NAME["tensor-parallel"].micro_size
    assert [rows // 2, WIDTH] in [border["shape"] for border in halves]


@TABLE.looks_at("data-parallel/float64")
def test_gradients_of_level2_are_scattered_after_every_micro_batch_and_weights_gathered_once(
    results: dict[str, Any],
) -> None:
    calls = results["data-parallel/float64"]["ranks"][0]["traffic"]["calls"]
    assert calls["reduce_scatter"] == 2
    assert calls["all_gather"] == 1
    assert calls["broadcast"] == 1


@TABLE.looks_at("four-stages/float64")
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


@TABLE.looks_at("tied-step-function-sums/float64", "zbv/float64")
def test_losses_of_micro_batches_are_added_up_for_mindspore_and_the_gradient_is_that_of_their_mean(
    results: dict[str, Any],
) -> None:
    """The oracle's weights have moved by the mean's gradient; its losses are sums."""
    sums, means = results["tied-step-function-sums/float64"], results["zbv/float64"]
    factor = BY_NAME["tied-step-function-sums"].micro_size
    assert sums["ranks"][0]["losses"] == pytest.approx([loss * factor for loss in means["ranks"][0]["losses"]])


@TABLE.looks_at("gpipe/float64")
def test_network_of_the_scenarios_is_the_one_that_the_closed_forms_speak_of(results: dict[str, Any]) -> None:
    names = {p["name"] for p in results["gpipe/float64"]["plan"]["parameters"]}
    assert len(names) == 2 + 3 * BLOCKS + 2 + 2
    (first,) = [p for p in results["gpipe/float64"]["plan"]["parameters"] if p["name"] == "first.weight"]
    assert first["global_shape"] == [WIDTH, CLASSES]
