"""What a dry run's process gets, and which dry runs there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.program import Program
from msrun.planning.simulation import Simulation


def simulation(**changes: Any) -> Simulation:
    given = {"level": 1, "worker_num": 32, "local_worker_num": 8, "global_rank": 11, "device": "h100"}
    program, here = Program("script", "train.py"), Path("/here")
    return Simulation(program=program, working_directory=here, log_dir=here / "out", **{**given, **changes})


def test_process_is_told_its_place_and_nothing_of_another_job() -> None:
    caller = {"HOME": "/root", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "MSRUN_JOB_ID": "x", "MS_ROLE": "MS_WORKER"}
    environ = simulation().environment(caller)
    assert environ["HOME"] == "/root"
    assert {environ[name] for name in ("RANK", "RANK_ID")} == {"11"}
    assert {environ[name] for name in ("WORLD_SIZE", "RANK_SIZE")} == {"32"}
    assert (environ["LOCAL_RANK"], environ["DEVICE_ID"], environ["LOCAL_WORLD_SIZE"]) == ("3", "3", "8")
    assert not {"MASTER_ADDR", "MSRUN_JOB_ID", "MS_ROLE", contract.MSRUN_SIM_ESTIMATE} & environ.keys()


def test_estimate_asks_for_changes() -> None:
    assert simulation(tries_changes=True).environment({})[contract.MSRUN_SIM_ESTIMATE] == "1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_num": 0}, "--worker_num 0: must be 1 or more"),
        ({"global_rank": 32}, "--sim_rank_id 32: no such rank; the ranks of this job are 0 to 31"),
        ({"global_rank": -1}, "--sim_rank_id -1: no such rank"),
        ({"local_worker_num": 5}, "--worker_num 32 on hosts of 5: .* give --local_worker_num 8"),
        ({"local_worker_num": 0}, "--worker_num 32 on hosts of 0: .* give --local_worker_num 8"),
        ({"worker_num": 12, "tries_changes": True}, "--worker_num 12 on hosts of 8: .* give --hosts 2"),
        ({"device": "h10"}, r"--sim_device h10 \(did you mean h100\?\): must be one of ascend910a, .* JSON file"),
        ({"device": "h10", "tries_changes": True}, "--device h10 "),
        ({"device": "none.json"}, "--sim_device none.json: no such file"),
    ],
)
def test_dry_run_that_no_job_could_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulation(**changes)
