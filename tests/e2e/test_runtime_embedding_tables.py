"""Tables over ranks and gradients of rows: the numbers of one process, and no memory or message of a table's size.

The cases stand in tests/cases/embedding_tables.py; one job of two ranks runs them all.
"""

from __future__ import annotations

import json
from pathlib import Path

import embedding_tables
import pytest
import torch
from asked_cases import CaseTable
from case_job import Outcomes, errors_of, run_cases
from embedding_tables import SLICES, Net, lookup
from job_runner import JobRunner
from only_cases import ONLY_CASES

from msrun.runtime import load_checkpoint, optim

DEADLINE_S = 240.0
CASES = list(embedding_tables.cases(2))
FAST = [
    "table_row_slice/semi_auto/FTRL",
    "sparse_embedding_layers_train_as_in_one_process",
    "a_cache_changes_no_bit",
    "every_row_travels_once",
    "first_values_are_those_of_one_process",
    "what_a_world_cannot_share_out_is_refused",
]
TABLE = CaseTable(CASES, fast=FAST, key=lambda case: case)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedding-tables")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, folder: Path) -> Outcomes:
    return run_cases(msrun_of_module, request, workers, folder, "embedding_tables", TABLE, DEADLINE_S)


@TABLE.parametrize("case", [(case,) for case in CASES])
def test_embedding_tables(outcomes: Outcomes, case: str) -> None:
    assert errors_of(outcomes, case) == []


@pytest.mark.slow
def test_four_ranks_train_sparse_layers_and_tables_in_stages_as_one_process(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    cases = [case for case in CASES if case.startswith(("sparse_", "a_cache", "stages_"))]
    result, env = tmp_path / "result.json", {ONLY_CASES: json.dumps(cases)}
    program = workers / "runtime" / "modes.py"
    msrun.run_world(4, program, result, "embedding_tables", cwd=tmp_path, env=env, deadline_s=DEADLINE_S)
    outcomes = json.loads(result.read_text())
    assert [errors_of(outcomes, case) for case in cases] == [[]] * len(cases)


@TABLE.looks_at("first_values_are_those_of_one_process")
def test_first_values_do_not_depend_on_ranks_or_slices(outcomes: Outcomes) -> None:
    for found in outcomes["first_values_are_those_of_one_process"]:
        for slices in SLICES:
            assert torch.equal(_table(Net(lookup(slices))), torch.tensor(found[slices], dtype=torch.float64))


@TABLE.looks_at("tables_go_to_files_and_come_back")
def test_one_process_loads_what_several_have_saved(outcomes: Outcomes, folder: Path) -> None:
    (saved, *_) = outcomes["tables_go_to_files_and_come_back"]
    for slices, (table, moment) in saved["tables"].items():
        network = Net(lookup("batch_slice"))
        optimizer = optim.LazyAdam(network.parameters())
        load_checkpoint(folder / "saved" / slices, network, optimizer=optimizer)
        assert torch.equal(_table(network), torch.tensor(table, dtype=torch.float64))
        state = optimizer.state[network.table.embedding_table]  # type: ignore[index]
        torch.testing.assert_close(state["exp_avg"], torch.tensor(moment, dtype=torch.float64), rtol=1e-10, atol=1e-13)


def _table(network: Net) -> torch.Tensor:
    found = network.table.embedding_table
    assert isinstance(found, torch.Tensor)
    return found.detach()
