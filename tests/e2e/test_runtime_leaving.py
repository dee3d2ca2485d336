"""The end of a worker: the world's threads are gone before the interpreter is, and a failure is not held up."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner

STARTS = ["fork", pytest.param("exec", marks=pytest.mark.slow)]
ON_GLOO = {"MSRUN_CPU_BACKEND": "gloo"}
"""The backend with threads of its own; without the variable, ranks of one host are on shared memory."""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("how", one_fast("ending", "releasing"))
def test_no_thread_of_the_world_outlives_it(
    msrun: JobRunner, workers: Path, tmp_path: Path, start: str, how: str
) -> None:
    script = workers / "runtime" / "leave.py"
    finished = msrun.run(
        "--worker_num=2", f"--start_method={start}", script, how, cwd=tmp_path, env={**ON_GLOO, **msrun.warm()}
    )
    assert finished.code == 0, finished.stderr
    assert [finished.log(rank).decode().splitlines()[-1] for rank in range(2)] == ["group threads: []"] * 2


@pytest.mark.slow
def test_no_thread_of_a_world_under_ddp_outlives_its_release(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    script = workers / "runtime" / "leave.py"
    words = ["--worker_num=2", "--start_method=exec", script, "releasing", "data_parallel"]
    finished = msrun.run(*words, cwd=tmp_path, env=ON_GLOO)
    assert finished.code == 0, finished.stderr
    assert [finished.log(rank).decode().splitlines()[-1] for rank in range(2)] == ["group threads: []"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("start", "backend"), [("fork", "gloo"), ("exec", "shm")])
def test_failing_worker_does_not_wait_for_its_collectives(
    msrun: JobRunner, workers: Path, tmp_path: Path, start: str, backend: str
) -> None:
    script = workers / "runtime" / "leave.py"
    options = ["--worker_num=2", f"--start_method={start}"]
    finished = msrun.run(*options, script, "failing", cwd=tmp_path, env={"MSRUN_CPU_BACKEND": backend})
    assert finished.code == 1, finished.stderr
    failure = finished.read_json("failure.json")
    assert (failure["first_failure"]["global_rank"], failure["first_failure"]["exit_code"]) == (0, 1)
    assert "rank 0 fails with a collective under way" in finished.stderr
    assert [other["state"] for other in failure["others"]] == ["stopped by msrun"], (
        "it would never have ended by itself"
    )
