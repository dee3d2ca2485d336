"""Where a process stands, from the variables of every launcher."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest
from job_runner import REPOSITORY

from msrun.errors import WorldError
from msrun.runtime.world import WorldSpec, find_world

MSRUN = {
    "MSRUN_JOB_ID": "job",
    "MSRUN_RENDEZVOUS": "file:///tmp/store",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    **MASTER,
}
SLURM = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2", "SLURM_STEP_NUM_NODES": "2", **MASTER}
RANK_TABLE = {"RANK_TABLE_FILE": "/x/table.json", "RANK_ID": "1", "RANK_SIZE": "8", "DEVICE_ID": "1", **MASTER}
MS_ROLE = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "4",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "RANK_ID": "3",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "spec"),
    [
        ({}, WorldSpec("alone", 0, 1, 0, 1, "")),
        ({"WORLD_SIZE": "8"}, WorldSpec("alone", 0, 1, 0, 1, "")),
        (MSRUN, WorldSpec("msrun", 3, 8, 1, 4, "file:///tmp/store")),
        (without(MSRUN, "MSRUN_RENDEZVOUS"), WorldSpec("msrun", 3, 8, 1, 4, "env://")),
        (TORCHRUN, WorldSpec("torchrun", 5, 8, 1, 4, "env://")),
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), WorldSpec("torchrun", 5, 8, 0, 8, "env://")),
        (MPIRUN, WorldSpec("mpirun", 2, 4, 0, 2, "tcp://10.0.0.1:29500")),
        (SLURM, WorldSpec("Slurm", 6, 8, 2, 4, "tcp://10.0.0.1:29500")),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, WorldSpec("alone", 0, 1, 0, 1, "")),
        (RANK_TABLE, WorldSpec("rank table", 1, 8, 1, 8, "tcp://10.0.0.1:29500")),
        (MS_ROLE, WorldSpec("MS_ROLE", 3, 4, 0, 4, "tcp://10.0.0.1:8118")),
        ({**without(MS_ROLE, "RANK_ID"), "MS_NODE_ID": "2"}, WorldSpec("MS_ROLE", 2, 4, 0, 4, "tcp://10.0.0.1:8118")),
        ({**MS_ROLE, "MS_NODE_ID": "node-b"}, WorldSpec("MS_ROLE", 3, 4, 0, 4, "tcp://10.0.0.1:8118")),
        ({**MS_ROLE, "MS_ROLE": "MS_SCHED"}, WorldSpec("alone", 0, 1, 0, 1, "")),
    ],
    ids=lambda value: value.source if isinstance(value, WorldSpec) else "",
)
def test_every_launcher_is_understood(environ: dict[str, str], spec: WorldSpec) -> None:
    assert find_world(environ) == spec


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({**MS_ROLE, **RANK_TABLE, **SLURM, **MPIRUN, **TORCHRUN, **MSRUN}, "msrun"),
        ({**RANK_TABLE, **SLURM, **MPIRUN, **TORCHRUN}, "torchrun"),
        ({**RANK_TABLE, **SLURM, **MPIRUN}, "mpirun"),
        ({**RANK_TABLE, **SLURM}, "Slurm"),
        ({**MS_ROLE, **RANK_TABLE}, "rank table"),
        ({**MS_ROLE, **MPIRUN}, "MS_ROLE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nearest_launcher_wins_when_several_left_variables(environ: dict[str, str], source: str) -> None:
    assert find_world(environ).source == source


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({**TORCHRUN, "RANK": "eight"}, "RANK='eight': a whole number is expected; start the job with msrun"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE='': a whole number"),
        (without(MSRUN, "WORLD_SIZE"), "WORLD_SIZE=None: a whole number"),
        ({**MSRUN, "LOCAL_RANK": "1.5"}, "LOCAL_RANK='1.5'"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of a world of 8 (torchrun variables): must be 0 to 7; stale variables"),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 of a world of 8"),
        ({**TORCHRUN, "WORLD_SIZE": "0", "RANK": "0"}, "rank 0 of a world of 0"),
        (without(MPIRUN, "MASTER_ADDR"), "MASTER_ADDR and MASTER_PORT are not set: mpirun -x MASTER_ADDR"),
        (without(SLURM, "MASTER_PORT"), "export MASTER_ADDR and MASTER_PORT before srun, or start with msrun"),
        (without(RANK_TABLE, "MASTER_ADDR"), "beside RANK_TABLE_FILE"),
        (without(RANK_TABLE, "RANK_SIZE"), "RANK_SIZE=None"),
        ({**RANK_TABLE, "RANK_ID": "9"}, "rank 9 of a world of 8 (rank table variables)"),
        (without(MS_ROLE, "RANK_ID"), "MS_ROLE=MS_WORKER but no RANK_ID: export it as 0 to N-1"),
        ({**MS_ROLE, "RANK_ID": "4"}, "rank 4 of a world of 4 (MS_ROLE variables)"),
        (without(MS_ROLE, "MS_SCHED_PORT"), "MS_SCHED_PORT=None"),
        (without(MS_ROLE, "MS_WORKER_NUM"), "MS_WORKER_NUM=None"),
    ],
)
def test_contradictions_and_words_are_refused_with_a_remedy(environ: dict[str, str], text: str) -> None:
    with pytest.raises(WorldError) as caught:
        find_world(environ)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def run_python(program: str, environ: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_process_alone_opens_nothing_and_has_rank_0() -> None:
    program = (
        "import torch.distributed as dist\n"
        "from msrun.errors import WorldError\n"
        "from msrun.runtime import *\n"
        "from msrun.runtime import init\n"
        "assert not is_initialized()\n"
        "init()\n"
        "assert is_initialized() and not dist.is_initialized()\n"
        "assert (get_rank(), get_group_size(), get_local_rank(), get_local_rank_size()) == (0, 1, 0, 1)\n"
        "try:\n    init()\nexcept WorldError as error:\n    assert 'release() first' in str(error)\n"
        "else:\n    assert False\n"
        "release(); release()\n"
        "assert not is_initialized()\n"
        "init(); release()\n"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def test_world_that_nobody_else_joins_is_an_error_within_the_time_limit() -> None:
    program = (
        "from msrun.errors import WorldError\n"
        "from msrun.runtime import init\n"
        "try:\n    init(timeout_s=1)\nexcept WorldError as error:\n    print(error)\n"
    )
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run_python(program, environ)
    assert "rank 1 of 2 could not join at env:// with gloo" in done.stdout, done.stderr
