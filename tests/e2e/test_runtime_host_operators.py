"""Parts of a network on the host: the numbers of one process, the copies of the plan, on 2 and 4 ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked_cases import CaseTable
from host_placements import PLACEMENTS, WAYS, cases
from job_runner import JobRunner

DEADLINE_S = 400.0
OTHERS = ("dropout", "function", "data-parallel-mode", "pipeline-limit", "limit-impossible")
TRAINED = [*PLACEMENTS, *(name for name in WAYS if name not in OTHERS)]
FAST = ("everything", "limit")
TABLE = CaseTable(
    [*cases(2), *cases(4)],
    fast=[f"2/{name}" for name in FAST],
    key=lambda case: case,
)
Outcome = list[dict[str, Any]]

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outcome]:
    """Gives what a case found, on every rank; the job of a world runs when first asked for."""
    found: dict[int, dict[str, Outcome]] = {}

    def run(ranks: int) -> dict[str, Outcome]:
        folder = tmp_path_factory.mktemp(f"host-operators-{ranks}")
        result, worker, env = folder / "result.json", workers / "runtime" / "modes.py", TABLE.asked(request)
        msrun_of_module.run_world(ranks, worker, result, "host_placements", cwd=folder, env=env, deadline_s=DEADLINE_S)
        return dict(json.loads(result.read_text()))

    def outcome_of(case: str) -> Outcome:
        ranks = int(case.partition("/")[0])
        if ranks not in found:
            found[ranks] = run(ranks)
        for rank in found[ranks][case]:
            assert "error" not in rank, rank["error"]
        return found[ranks][case]

    return outcome_of


@TABLE.parametrize("case", [(f"{ranks}/{name}",) for ranks in (2, 4) for name in TRAINED])
def test_training_with_parts_on_the_host_gives_the_numbers_of_one_process(
    outcome: Callable[[str], Outcome], case: str
) -> None:
    for rank in outcome(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-9, abs=0)
        assert rank["difference"] < 1e-9
        assert rank["losses"][-1] != rank["losses"][0]


@TABLE.parametrize("case", [(f"{ranks}/{name}",) for ranks in (2, 4) for name in TRAINED])
def test_plan_tells_number_and_bytes_of_the_copies_of_a_step(outcome: Callable[[str], Outcome], case: str) -> None:
    for rank in outcome(case):
        assert rank["counted"] == rank["planned"]
    copied = any(
        rank["counted"][0].get("to_host", 0) > 0 for rank in outcome(case)
    )  # of a stage's ranks there may be none
    assert copied is not case.endswith("/nothing")


@TABLE.parametrize("case", [("2/mlp/second",), ("4/mlp/second",)])
def test_parameters_of_the_host_leave_the_device(outcome: Callable[[str], Outcome], case: str) -> None:
    (rank, *_) = outcome(case)
    assert {name for name, (_, on_host) in rank["parameters"].items() if on_host} == {"second.weight", "second.bias"}
    assert rank["host_bytes"] == (12 * 8 + 8) * 8
    assert rank["device_bytes"] == sum(size for size, on_host in rank["parameters"].values() if not on_host)
    lines = rank["explain"].splitlines()
    begin = lines.index("borders between host (1 operator) and device")
    rows = 4 // rank["ranks"]
    into, out = 8 * 12 * rows, 8 * 8 * rows
    assert [" ".join(line.split()) for line in lines[begin + 1 : begin + 3]] == [
        f"aten.relu of network to_host {into} B, gradient to_device {into} B",
        f"aten.linear of second to_device {out} B, gradient to_host {out} B",
    ]


@TABLE.looks_at("2/pipeline-deferred")
def test_plan_of_a_stage_names_what_it_copies_as_the_whole_network_does(outcome: Callable[[str], Outcome]) -> None:
    for rank, found in enumerate(outcome("2/pipeline-deferred")):
        lines = found["explain"].splitlines()
        begin = lines.index("borders between host (2 operators) and device") + 1
        named = [line.split(" to_")[0].strip() for line in lines[begin : lines.index("", begin)]]
        assert named == (["input 0", "aten.linear of first"], ["aten.tanh of network", "aten.linear of third"])[rank]


@TABLE.parametrize("case", [("2/dropout",), ("4/dropout",), ("2/function",), ("4/function",)])
def test_dropouts_and_functions_on_the_host_change_no_number(outcome: Callable[[str], Outcome], case: str) -> None:
    for rank in outcome(case):
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-12, abs=0)
        assert rank.get("difference", 0.0) < 1e-12
        assert "explain" not in rank or "aten.sin" in rank["explain"]


@TABLE.parametrize("case", [(f"{ranks}/{name}",) for ranks in (2, 4) for name in ("limit", "limit-level2")])
def test_limit_of_device_memory_moves_parameters_and_says_which(outcome: Callable[[str], Outcome], case: str) -> None:
    for rank in outcome(case):
        assert rank["host_bytes"] > 0
        assert rank["device_bytes"] > 0
        (note,) = [line for line in rank["first"].splitlines() if line.startswith("note: device_memory_limit")]
        found = re.fullmatch(r".*: (\S+) KB instead of (\S+) KB of the device; on the host: (.*)", note)
        assert found is not None, note
        assert float(found[1]) <= rank["limit"] < float(found[2])
        moved = {name.rpartition(".")[0] for name, (_, on_host) in rank["parameters"].items() if on_host}
        assert moved == set(found[3].split(", "))
        assert f"as in the first call, on the host: {found[3]}" in rank["explain"]


@TABLE.looks_at("2/limit-impossible")
def test_impossible_limit_is_refused_with_what_is_missing(outcome: Callable[[str], Outcome]) -> None:
    for rank in outcome("2/limit-impossible"):
        assert re.match(
            r"device_memory_limit\(\S+\): a step needs \S+ KB of the device, and \S+ KB with every operator that has "
            r"parameters on the host: \S+ KB are missing; give more",
            rank["refused"],
        )


@TABLE.looks_at("2/data-parallel-mode", "2/pipeline-limit")
def test_modes_that_cannot_do_it_say_so(outcome: Callable[[str], Outcome]) -> None:
    for rank in outcome("2/data-parallel-mode"):
        assert rank["refused"] == (
            'set_target of network.first with parallel_mode="data_parallel", which cuts no graph: '
            'use parallel_mode="semi_auto"'
        )
    for rank in outcome("2/pipeline-limit"):
        assert rank["refused"].startswith("device_memory_limit does not know how many micro batches")
