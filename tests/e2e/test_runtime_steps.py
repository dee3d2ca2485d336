"""One training step in all its ways: accumulation, levels, fusion, recompute, copies, and their products."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from job_runner import REPOSITORY, JobRunner
from step_cases import CASES, HIDDEN, LOSS, WIDTH, WORLD_SIZE, StepCase

from msrun.runtime.execute.executor import AHEAD

DEADLINE_S = 400.0
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
RUNS = [(case, dtype) for case in CASES for dtype in case.dtypes]
MEASURES = ("order", "memory", "levels", "activations", "results", "level3", "tensor parallel")
TABLE = CaseTable(
    [*(f"{case.name}/{dtype}" for case, dtype in RUNS), *MEASURES],
    fast=[
        *("fresh-closures/float64", "recompute-level3-accumulation/float64"),
    ],
)
LEVELS = ("level1", "level2", "level3")

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What every rank found; all cases and measures in one job, with an allocator that gives memory back at once."""
    folder = tmp_path_factory.mktemp("steps")
    msrun_of_module.run_world(
        WORLD_SIZE,
        workers / "runtime" / "steps.py",
        folder / "result.json",
        cwd=folder,
        env={"MALLOC_MMAP_THRESHOLD_": "65536", **TABLE.asked(request)},
        deadline_s=DEADLINE_S,
    )
    return list(json.loads((folder / "result.json").read_text()))


@pytest.fixture(scope="module")
def measures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 measured."""
    return dict(ranks[0]["measures"])


@TABLE.parametrize("case, dtype", RUNS)
def test_losses_gradients_and_weights_are_those_of_one_process(
    ranks: list[dict[str, Any]], case: StepCase, dtype: str
) -> None:
    for rank in ranks:
        found = rank[f"{case.name}/{dtype}"]
        assert len(found["right"]) == case.steps
        assert found["losses"] == pytest.approx(found["right"], rel=TOLERANCE[dtype], abs=0)
        assert found["gradients"] <= TOLERANCE[dtype]
        assert found["weights"] <= TOLERANCE[dtype]


@TABLE.parametrize("case, dtype", [(case, "float64") for case in CASES if case.calls is not None])
def test_number_of_messages_of_a_step_is_the_closed_form(
    ranks: list[dict[str, Any]], case: StepCase, dtype: str
) -> None:
    for rank in ranks:
        assert rank[f"{case.name}/{dtype}"]["calls"] == case.calls


@TABLE.parametrize("case, dtype", [(case, "float64") for case in CASES])
def test_a_network_is_captured_once_however_often_it_is_called(
    ranks: list[dict[str, Any]], case: StepCase, dtype: str
) -> None:
    assert {rank[f"{case.name}/{dtype}"]["captures"] for rank in ranks} == {1}


@TABLE.looks_at("levels")
def test_weights_are_bit_equal_between_levels(measures: dict[str, Any]) -> None:
    assert set(measures["levels"].values()) == {True}, measures["levels"]


@TABLE.looks_at("memory")
def test_bytes_on_a_rank_are_the_formula_of_the_level(measures: dict[str, Any]) -> None:
    for level in LEVELS:
        found = measures["memory"][level]
        whole, layers = found["whole"], found["layers"]
        assert found["weights"] == found["state"] == whole // WORLD_SIZE
        assert found["gradients"] == (whole if level == "level1" else whole // WORLD_SIZE)
        windows = [sum(layers[i : i + 1 + AHEAD]) for i in range(len(layers))]
        assert found["gathered"] == (max(windows) if level == "level3" else whole)


def positions(events: list[list[Any]], kind: str) -> dict[int, list[int]]:
    """Return number -> places at which this kind of event stands for it."""
    found: dict[int, list[int]] = {}
    for place, (name, number) in enumerate(events):
        if name == kind:
            found.setdefault(number, []).append(place)
    return found


@TABLE.looks_at("order")
def test_gathers_start_before_the_layer_ahead_is_computed_and_not_earlier_than_needed(measures: dict[str, Any]) -> None:
    order = measures["order"]
    events, reads = order["events"], {int(k): v for k, v in order["reads"].items()}
    gathers, forward, backward = (positions(events, kind) for kind in ("gather", "forward", "backward"))
    assert all(len(places) == 2 for places in gathers.values())
    for segment, (group,) in reads.items():
        on_the_way, on_the_way_back = gathers[group]
        if segment - 1 in forward:
            assert on_the_way < forward[segment - 1][0]
        if segment + 1 in backward:
            assert on_the_way_back < backward[segment + 1][0]
        if segment - AHEAD - 1 in forward:
            assert on_the_way > forward[segment - AHEAD - 1][0]


@TABLE.looks_at("order")
def test_text_of_the_program_has_what_happens_in_a_step_in_its_order(measures: dict[str, Any]) -> None:
    order = measures["order"]
    words = {"segment": "forward", "backward of segment": "backward", "gather message": "gather"}
    words |= {"free message": "free", "send gradients": "reduce"}
    told = re.findall(rf"^ *({'|'.join(words)}) (\d+)", order["program"], re.MULTILINE)
    computed = {(name, number) for name, number in map(tuple, order["events"])}
    shown = [(words[name], int(number)) for name, number in told]
    quiet = {event for event in shown if event[0] in ("forward", "backward")} - computed  # collectives alone
    assert [event for event in shown if event not in quiet] == [*map(tuple, order["events"])]


@TABLE.looks_at("order")
def test_gradients_leave_while_the_backward_pass_goes_on(measures: dict[str, Any]) -> None:
    order = measures["order"]
    reduces, backward = (positions(order["events"], kind) for kind in ("reduce", "backward"))
    segment_of = {group: int(segment) for segment, (group,) in order["reads"].items()}
    for group in range(1, order["groups"]):
        segment = segment_of[group]
        assert backward[segment][0] < reduces[group][0] < backward[segment - 1][0]


@TABLE.looks_at("order")
def test_gathered_parts_are_freed_after_their_last_use_of_each_pass(measures: dict[str, Any]) -> None:
    events = measures["order"]["events"]
    frees = positions(events, "free")
    for group, places in positions(events, "gather").items():
        assert [a < b for a, b in pairwise(sorted([*places, *frees[group]]))] == [True] * 3
        assert places[0] < frees[group][0] < places[1] < frees[group][1]


@TABLE.looks_at("activations")
def test_estimate_of_activations_is_what_a_step_really_keeps(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, found in rank["measures"]["activations"].items():
            assert found["kept"] == found["estimate"], name


@TABLE.looks_at("activations")
def test_recomputed_blocks_keep_their_inputs_only(measures: dict[str, Any]) -> None:
    """A block keeps tanh's result of 8 rows on this rank; its input is the result of the block before.

    Where all blocks are one segment, the sum of the losses waits for the number of labels in another one, and is kept.
    """
    found = measures["activations"]
    rows, item = 8, 8
    inside = rows * HIDDEN * item
    assert found["plain"]["kept"] - found["blocks"]["kept"] == measures["blocks"] * inside + item
    assert found["blocks"]["again"] == inside + rows * WIDTH * item  # and the block's result once more
    assert found["tensor parallel, blocks"]["kept"] < found["tensor parallel, blocks, collectives kept"]["kept"]
    assert found["tensor parallel, blocks, collectives kept"]["kept"] < found["tensor parallel"]["kept"]


@TABLE.looks_at("activations")
def test_limit_recomputes_as_few_blocks_as_it_takes(measures: dict[str, Any]) -> None:
    found = measures["limited"]
    assert [len(each["regions"]) for each in found["chosen"]] == [0, 2, 3]
    assert all(each["peak"] <= each["limit"] for each in found["chosen"])
    assert found["chosen"][1]["regions"] == ["network.blocks.0", "network.blocks.1"]
    assert found["refusal"].startswith("recompute: activations of 0.02 MB on this rank cannot be brought under 0.00 MB")


@TABLE.looks_at("results")
@pytest.mark.parametrize("nesting", ["alone", "micro of copies", "copies of micro"])
def test_further_results_and_gradients_of_inputs_come_back_in_the_order_of_rows(
    measures: dict[str, Any], nesting: str
) -> None:
    found = measures["results"][nesting]
    assert found["logits"]
    assert found["gradient"]
    assert found["without gradient"]
    assert found["calls without gradient"] == {"all_reduce": LOSS if nesting == "alone" else 8 * LOSS}


@pytest.mark.slow
def test_new_shape_on_one_rank_is_refused_on_all(msrun_of_module: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun_of_module.run(
        "--worker_num=3",
        "--quiet",
        workers / "runtime" / "new_shape.py",
        tmp_path,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY)},
        deadline_s=60.0,
    )
    assert finished.code == 0, finished.stderr
    texts = {(tmp_path / str(rank)).read_text() for rank in range(3)}
    assert len(texts) == 1
    assert texts.pop().startswith("rank 2 got a batch of 3x8, 3, which no rank had before, while other ranks go on")


@TABLE.parametrize("way", [("level3",), ("tensor parallel",)])
def test_network_larger_than_a_rank_is_never_whole_on_it(ranks: list[dict[str, Any]], way: str) -> None:
    """Most at a time: parts and their gradients, the gathered layers, and messages of gradients with their sources."""
    for rank in ranks:
        found = rank["large"][way]
        layer = found["whole"] // found["layers"]
        assert found["stored"] < found["whole"] // WORLD_SIZE + layer  # the biases of level3 are whole
        assert found["built"] < layer
        in_use = 2 * found["stored"] + (1 + AHEAD + 3 * (1 + AHEAD)) * layer
        assert found["peak"] < in_use < found["whole"]
