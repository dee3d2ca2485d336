"""The equality law: however the work is divided, training gives the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from equality_scenarios import SCENARIOS, SIZES, WORLD_SIZE, Scenario
from job_runner import JobRunner

DEADLINE_S = 400.0
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
OF_WEIGHTS = {"float64": 1e-10, "float32": 3e-5}
"""Sums in another order move a weight near 0 by more than the loss."""
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
RUNS = [(scenario, dtype) for scenario in SCENARIOS for dtype in scenario.dtypes]
TABLE = CaseTable(
    [*(f"{scenario.name}/{dtype}" for scenario, dtype in RUNS), "published"],
    fast=[
        *("published", "everything/float64"),
    ],
)
ITEMS = {"float64": 8, "float32": 4}
BIG = SIZES[0] * SIZES[1], SIZES[1] * SIZES[2]
SMALL = SIZES[1], SIZES[2], SIZES[2] * SIZES[3], SIZES[3]

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the worker found; every scenario in one process group."""
    folder = tmp_path_factory.mktemp("equality")
    script, result = workers / "runtime" / "equality.py", folder / "result.json"
    msrun_of_module.run_world(WORLD_SIZE, script, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S)
    return dict(json.loads((folder / "result.json").read_text()))


def every_run() -> Any:
    return TABLE.parametrize("scenario, dtype", RUNS)


@every_run()
def test_losses_are_those_of_one_process(results: dict[str, Any], scenario: Scenario, dtype: str) -> None:
    found = results[f"{scenario.name}/{dtype}"]
    assert len(found["right"]) == scenario.steps
    for rank in found["ranks"]:
        assert rank["losses"] == pytest.approx(found["right"], rel=TOLERANCE[dtype], abs=0)
    assert found["right"][-1] != found["right"][0]


@every_run()
def test_every_rank_returns_the_same_loss(results: dict[str, Any], scenario: Scenario, dtype: str) -> None:
    ranks = results[f"{scenario.name}/{dtype}"]["ranks"]
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)


@every_run()
def test_weights_after_training_are_those_of_one_process(
    results: dict[str, Any], scenario: Scenario, dtype: str
) -> None:
    for rank in results[f"{scenario.name}/{dtype}"]["ranks"]:
        assert rank["difference"] <= OF_WEIGHTS[dtype]


@TABLE.parametrize("scenario, dtype", [(s, "float64") for s in SCENARIOS if s.traffic is not None])
def test_number_of_collectives_of_a_step_is_the_closed_form(
    results: dict[str, Any], scenario: Scenario, dtype: str
) -> None:
    assert results[f"{scenario.name}/{dtype}"]["traffic"]["calls"] == scenario.traffic


@TABLE.parametrize("scenario, dtype", [(s, d) for s, d in RUNS if s.mode == "semi_auto"])
def test_plan_tells_number_and_bytes_of_the_collectives_of_a_step(
    results: dict[str, Any], scenario: Scenario, dtype: str
) -> None:
    found = results[f"{scenario.name}/{dtype}"]
    assert found["traffic"]["calls"]["all_reduce"] > 0
    assert found["plan"]["traffic"] == found["traffic"]


@TABLE.parametrize(
    "name, dtype", [(name, "float64") for name in ("hsdp-level1", "hsdp-level2", "two-copies-hsdp", "fusion-never")]
)
def test_bytes_of_optimizer_parallel_are_the_closed_form(results: dict[str, Any], name: str, dtype: str) -> None:
    """Gather: this rank's parts. Reduce-scatter: the whole gradients. All-reduce: whole parameters, and sum and count
    of every loss."""
    moved = results[f"{name}/{dtype}"]["traffic"]["bytes"]
    item = 8
    assert moved["all_gather"] == sum(BIG) * item // WORLD_SIZE
    assert moved["reduce_scatter"] == sum(BIG) * item
    assert moved["all_reduce"] == sum(SMALL) * item + 2 * item * BY_NAME[name].copies


@TABLE.looks_at("tensor-parallel/float64", "tensor-parallel-two-copies/float64")
def test_two_copies_double_the_collectives_of_activations_but_not_those_of_gradients(results: dict[str, Any]) -> None:
    one = results["tensor-parallel/float64"]["traffic"]
    two = results["tensor-parallel-two-copies/float64"]["traffic"]
    of_gradients = 1
    assert two["calls"]["all_gather"] == 2 * one["calls"]["all_gather"]
    assert two["calls"]["all_reduce"] - of_gradients == 2 * (one["calls"]["all_reduce"] - of_gradients)
    assert two["bytes"]["all_gather"] == one["bytes"]["all_gather"], "each copy has half the rows"


@TABLE.parametrize(
    "name, dtype", [(f"hsdp-level{level}", dtype) for level in (1, 2, 3) for dtype in ("float64", "float32")]
)
def test_cut_parameters_take_one_eighth_and_small_ones_stay_whole(
    results: dict[str, Any], name: str, dtype: str
) -> None:
    plan = results[f"{name}/{dtype}"]["plan"]
    by_name = {parameter["name"]: parameter for parameter in plan["parameters"]}
    for layer, size in zip(("layer1", "layer2"), BIG, strict=True):
        weight = by_name[f"{layer}.weight"]
        assert weight["global_bytes"] == size * ITEMS[dtype]
        assert weight["local_bytes"] * WORLD_SIZE == weight["global_bytes"]
        assert (weight["shard_ranks"], weight["reason"]) == (8, "rows cut over 8 ranks")
    for name in ("layer1.bias", "layer2.bias", "layer3.weight", "layer3.bias"):
        assert by_name[name]["local_bytes"] == by_name[name]["global_bytes"]
        assert by_name[name]["shard_ranks"] == 1
        assert by_name[name]["reason"].endswith("is under the threshold of 64 KB")


@TABLE.parametrize("name, dtype", [("hsdp-adam", "float64"), ("hsdp-adam", "float32")])
def test_optimizer_state_is_cut_exactly_like_its_parameter(results: dict[str, Any], name: str, dtype: str) -> None:
    whole = [*BIG, *SMALL]
    order = [0, 2, 1, 3, 4, 5]  # weight, bias of layer1; weight, bias of layer2; weight, bias of layer3
    for rank in results[f"{name}/{dtype}"]["ranks"]:
        sizes = list(rank["state_bytes"].values())
        expected = [size // (WORLD_SIZE if size in BIG else 1) * 2 * ITEMS[dtype] for size in whole]
        assert sizes == [expected[index] for index in order]


@TABLE.parametrize("name, dtype", [("hsdp-shard-size-2", "float64"), ("hsdp-shard-size-4", "float64")])
def test_shard_size_says_how_many_ranks_share_a_weight(results: dict[str, Any], name: str, dtype: str) -> None:
    plan, shard_ranks = results[f"{name}/{dtype}"]["plan"], int(name[-1])
    cut = [parameter for parameter in plan["parameters"] if parameter["shard_ranks"] > 1]
    assert {parameter["name"] for parameter in cut} == {"layer1.weight", "layer2.weight"}
    assert all(p["local_bytes"] * shard_ranks == p["global_bytes"] for p in cut)


@TABLE.looks_at("hsdp-level1/float32")
def test_explanation_names_every_parameter_with_its_sizes_and_the_reason(results: dict[str, Any]) -> None:
    lines = results["hsdp-level1/float32"]["explain"].splitlines()
    (weight,) = [line for line in lines if line.split()[:1] == ["layer1.weight"]]
    assert "128x196 -> 16x196" in weight
    assert weight.endswith("rows cut over 8 ranks")
    (bias,) = [line for line in lines if line.split()[:1] == ["layer3.bias"]]
    assert bias.endswith("40 B is under the threshold of 64 KB")
    assert lines[0].startswith("8 ranks as 2 x 2 x 2, semi_auto, hsdp level1")


@TABLE.parametrize(
    "name, dtype",
    [("two-copies", "float64"), ("two-copies-sum", "float64"), ("everything", "float64"), ("plain", "float64")],
)
def test_plan_says_which_losses_are_added_up(results: dict[str, Any], name: str, dtype: str) -> None:
    adds_up = BY_NAME[name].compat == "mindspore"
    text = results[f"{name}/{dtype}"]["explain"]
    assert ("added up" in text, "means over the global batch" in text) == (adds_up, not adds_up)


@TABLE.looks_at("published")
def test_second_loss_is_the_one_that_mindspore_publishes(results: dict[str, Any]) -> None:
    published = results["published"]
    assert published["losses"][1] == pytest.approx(0.0047495714, abs=1e-5)
    assert published["losses"] == pytest.approx([0.0047997204, 0.0047495700, 0.0046943463], abs=1e-8)
    strategies = [o["strategy"] for o in published["plan"]["operators"] if o["origin"] == "user"]
    assert strategies == [[[2, 4], [4, 1]], [[2, 4], [4, 1]]]
