"""Strategies as users write them: whatever is cut by hand, with names or numbers, trains like one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from job_runner import JobRunner
from sharding_cases import CASES, WORLD_SIZE, ShardingCase

DEADLINE_S = 400.0
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
RUNS = [(case, dtype) for case in CASES for dtype in case.dtypes]
OF_FLOAT64 = [(case, "float64") for case in CASES]
TABLE = CaseTable(
    [*(f"{case.name}/{dtype}" for case, dtype in RUNS), "out-strategies", "other-strategies", "refusals"],
    fast=["layouts-copies-hsdp/float64", "out-strategy-scatters/float64"],
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the worker found; every case in one process group."""
    folder = tmp_path_factory.mktemp("sharding")
    script, result = workers / "runtime" / "sharding.py", folder / "result.json"
    msrun_of_module.run_world(WORLD_SIZE, script, result, cwd=folder, env=TABLE.asked(request), deadline_s=DEADLINE_S)
    return dict(json.loads((folder / "result.json").read_text()))


def ranks_of(results: dict[str, Any], case: ShardingCase, dtype: str) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = results[f"{case.name}/{dtype}"]
    assert [rank.get("error") for rank in ranks] == [None] * WORLD_SIZE
    return ranks


@TABLE.parametrize("case, dtype", RUNS)
def test_losses_and_weights_are_those_of_one_process(results: dict[str, Any], case: ShardingCase, dtype: str) -> None:
    for rank in ranks_of(results, case, dtype):
        assert rank["losses"] == pytest.approx(rank["right"], rel=TOLERANCE[dtype], abs=0)
        assert rank["difference"] <= TOLERANCE[dtype]
        assert rank["right"][-1] != rank["right"][0]


@TABLE.looks_at("out-strategies")
def test_every_layout_of_the_result_of_every_strategy_gives_the_numbers_of_one_process(results: dict[str, Any]) -> None:
    for rank in results["out-strategies"]:
        assert rank["wrong"] == []
        assert rank["runs"] == 144


@TABLE.looks_at("other-strategies")
def test_network_that_is_stored_already_runs_with_other_strategies_and_another_batch(results: dict[str, Any]) -> None:
    for found, right in results["other-strategies"]:
        assert found == pytest.approx(right, rel=1e-10, abs=0)


@TABLE.parametrize("case, dtype", RUNS)
def test_plan_tells_number_and_bytes_of_the_collectives_of_a_step(
    results: dict[str, Any], case: ShardingCase, dtype: str
) -> None:
    for rank in ranks_of(results, case, dtype):
        assert rank["plan"]["traffic"] == rank["traffic"]


@TABLE.parametrize("case, dtype", [row for row in OF_FLOAT64 if row[0].collectives])
def test_number_of_collectives_of_a_step_is_the_closed_form(
    results: dict[str, Any], case: ShardingCase, dtype: str
) -> None:
    assert ranks_of(results, case, dtype)[0]["traffic"]["calls"] == case.collectives


@TABLE.parametrize("case, dtype", OF_FLOAT64)
def test_mesh_has_the_axes_of_the_device_matrices_and_the_plan_comes_back_from_json(
    results: dict[str, Any], case: ShardingCase, dtype: str
) -> None:
    first = ranks_of(results, case, dtype)[0]
    assert tuple(first["mesh"]) == case.mesh
    assert first["round_trip"]


def parameter(results: dict[str, Any], case: str, name: str) -> dict[str, Any]:
    (found,) = [p for p in results[f"{case}/float64"][0]["plan"]["parameters"] if p["name"] == name]
    return dict(found)


@TABLE.looks_at("layouts/float64", "layouts-copies-hsdp/float64", "out-strategy-scatters/float64")
def test_plan_names_the_axes_of_the_users_layout(results: dict[str, Any]) -> None:
    assert parameter(results, "layouts", "fc1.weight")["axes"] == ["mp", "None"]
    assert parameter(results, "layouts", "fc2.weight")["axes"] == ["None", "mp"]
    assert parameter(results, "layouts", "fc1.weight")["layout"] == [3, 1]
    assert parameter(results, "layouts-copies-hsdp", "fc1.weight")["axes"] == ["mp+dp", "None"]
    assert parameter(results, "out-strategy-scatters", "fc1.weight")["axes"] is None


@TABLE.looks_at("layouts/float64", "layouts-of-a-rank-list/float64")
def test_axes_of_a_rank_list_cut_as_those_of_the_matrix_that_it_transposes(results: dict[str, Any]) -> None:
    for name in ("fc1.weight", "fc2.weight"):
        one, other = (parameter(results, case, name) for case in ("layouts", "layouts-of-a-rank-list"))
        assert one["axes"] == other["axes"]
        assert one["local_shape"] == other["local_shape"]


def operators(results: dict[str, Any], case: str, kind: str) -> list[dict[str, Any]]:
    return [o for o in results[f"{case}/float64"][0]["plan"]["operators"] if o["operator"] == kind]


def test_out_strategy_of_a_product_with_split_sums_is_a_reduce_scatter(results: dict[str, Any]) -> None:
    (product,) = [o for o in operators(results, "out-strategy-scatters", "aten.linear") if o["module_path"] == "fc2"]
    assert product["collectives"] == ["reduce_scatter dim 0 over axes 0,1"]
    (scatter,) = product["traffic"]
    assert scatter["forward"] == {"operation": "reduce_scatter", "bytes": 12 * 6 * 8, "ranks": 6}
    assert scatter["backward"] == {"operation": "all_gather", "bytes": 12 * 6 * 8 // 6, "ranks": 6}
    (wanted,) = operators(results, "out-strategy-scatters", "out_strategy")
    assert (wanted["strategy"], wanted["collectives"]) == ([[6, 1]], [])


@TABLE.looks_at("region/float64", "region-of-tuples/float64")
def test_operators_of_a_region_keep_what_its_inputs_and_parameters_bring(results: dict[str, Any]) -> None:
    first, second = operators(results, "region", "aten.linear")
    assert [o["origin"] for o in (first, second)] == ["follows", "follows"]
    assert first["strategy"] == [[2, 1], [3, 1], [3]]
    assert second["strategy"] == [[2, 3], [1, 3], [1]]
    assert operators(results, "region-of-tuples", "aten.linear")[1]["strategy"] == [[2, 3], [1, 3], [1]]


@TABLE.looks_at("out-strategy-scatters/float64", "layouts/float64")
def test_explanation_lists_messages_with_bytes_forward_and_backward_and_the_total(results: dict[str, Any]) -> None:
    text = results["out-strategy-scatters/float64"][0]["explain"]
    assert "reduce_scatter dim 0 over axes 0,1: forward reduce_scatter of 576 B by 6 ranks, backward all_gather" in text
    assert "one training step, on each rank: " in text
    lines = results["layouts/float64"][0]["explain"].splitlines()
    (weight,) = [line for line in lines if line.split()[:1] == ["fc1.weight"]]
    assert "24x12 -> 8x12" in weight
    assert "(mp, None)" in weight


REFUSED = {
    "strict": "strict: aten.gelu in module network gives (1, 6) and aten.linear in module network.fc2 reads (6, 1), "
    "which moves 640 bytes to each rank and step; give aten.gelu in module network out_strategy=((6, 1),)",
    "strict-input": "strict: input input_0 gives (6, 1) and aten.linear in module network.0 reads (1, 6), "
    "which moves 960 bytes to each rank and step; pass it so with dataset_strategy, as (1, 6)",
    "late": "the parameters are stored on a mesh of (3, 2) since an earlier call, which has no such axes",
    "contradiction": "device matrices (2, 3) ('dp', 'mp') and (3, 2) ('a', 'b') cut the ranks at places that",
    "several": "has 2 tuples for its 1 tensor inputs, and it calls aten.linear in network.fc1, aten.linear in network",
    "unknown-name": "there is no parameter 'fc3.weight' (did you mean fc2.weight?)",
    "small-matrix": "the matrix has 4 places for 6 ranks; the product of device_matrix must be the number of ranks",
    "results": "has 2 tuples for its 1 results; give one for each",
    "lenient": "accepted",
}


@TABLE.looks_at("refusals")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_or_was_not_asked_for_is_refused_in_words(results: dict[str, Any], name: str) -> None:
    assert REFUSED[name] in results["refusals"][name]
