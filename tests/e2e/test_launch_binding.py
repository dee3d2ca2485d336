"""Real jobs run on the processors that the plan names, with the threads that fit them."""

import json
import os
import signal
import sys

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, read_record

from msrun.agent.host.host_facts import read_topology

_topology = read_topology()
CPUS = sorted(core[0].number for core in _topology.cores()[:2])
"""Jobs are kept to two processors of different cores, so that they are the same on a large machine."""

KEPT = (
    "import os, sys; "
    f"os.sched_setaffinity(0, {CPUS}); "
    "os.execv(sys.executable, [sys.executable, '-m', 'msrun', *sys.argv[1:]])"
)
COMMAND = (sys.executable, "-c", KEPT)

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors of different cores")
FIRST, SECOND = CPUS[0], CPUS[-1]

methods = pytest.mark.parametrize("method", one_fast("fork", "exec"))


def run(msrun, cwd, *args, **settings):
    finished = msrun.run(*args, cwd=cwd, command=COMMAND, **settings)
    assert finished.code == 0, finished.stderr
    return finished


def as_dict(**lists):
    return f"--bind_core={json.dumps(lists)}"


@methods
def test_workers_run_on_cores_of_their_own(msrun, tmp_path, method):
    options = ["--bind_core", "--worker_num=2", "--start_method", method]
    finished = run(msrun, tmp_path, *options, WORKERS / "record.py")
    found = [read_record(tmp_path, rank) for rank in range(2)]
    assert [place["affinity"] for place in found] == [[FIRST], [SECOND]]
    assert [place["env"]["OMP_NUM_THREADS"] for place in found] == ["1", "1"]
    assert finished.stderr.count("OMP_NUM_THREADS=1 for each worker (its own cores; set it to change)") == 1
    assert [worker["cpus"] for worker in finished.read_json("plan.json")["hosts"][0]["workers"]] == [[FIRST], [SECOND]]


@pytest.mark.slow
def test_dict_of_mindspore_binds_the_named_ones(msrun, tmp_path):
    lists = as_dict(device1=[str(SECOND)], scheduler=[str(SECOND)])
    job = msrun.start(lists, "--worker_num=2", WORKERS / "wait.py", cwd=tmp_path, command=COMMAND).wait_for_workers(2)
    pids = [job.pid_of(role) for role in ("0", "1", "scheduler")]
    assert [sorted(os.sched_getaffinity(pid)) for pid in pids] == [CPUS, [SECOND], [SECOND]]
    assert job.stderr.count("--bind_core names no CPUs for device 0 (local rank 0): not bound") == 1
    job.send(signal.SIGTERM)
    assert job.finish().code == 143


@pytest.mark.slow
def test_an_executable_is_bound_too(msrun, tmp_path):
    finished = run(msrun, tmp_path, "--bind_core", "--worker_num=2", "grep", "Cpus_allowed_list", "/proc/self/status")
    assert [finished.log(rank).split()[-1] for rank in (0, 1)] == [str(FIRST).encode(), str(SECOND).encode()]


@pytest.mark.slow
@methods
def test_unequal_shares_get_unequal_threads(msrun, tmp_path, method):
    """The fork server has loaded torch, and so read a number of threads, before any worker had its own."""
    (tmp_path / "threads.py").write_text(
        "import os\nimport torch\n"
        "print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads(), len(os.sched_getaffinity(0)))\n"
    )
    lists = as_dict(device0=[f"{cpu}" for cpu in CPUS], device1=[])
    finished = run(msrun, tmp_path, lists, "--worker_num=2", "--start_method", method, "threads.py")
    assert [finished.log(rank).split() for rank in (0, 1)] == [[b"2", b"2", b"2"], [b"1", b"1", b"2"]]
    assert finished.stderr.count("OMP_NUM_THREADS=1 to 2 for each worker") == 1


@pytest.mark.slow
def test_openmp_that_binds_processes_does_not_bind_them_all_to_one(msrun, tmp_path):
    """OpenMP would bind the fork server when it loads torch, and every worker would inherit that one processor."""
    (tmp_path / "where_torch.py").write_text("import os\nimport torch\nprint(*sorted(os.sched_getaffinity(0)))\n")
    finished = run(msrun, tmp_path, "--bind_core", "--worker_num=2", "where_torch.py", env={"OMP_PROC_BIND": "true"})
    assert [finished.log(rank).split() for rank in (0, 1)] == [[str(FIRST).encode()], [str(SECOND).encode()]]
    assert finished.stderr.count("OMP_PROC_BIND binds whole processes: workers start by exec") == 1
    plan = finished.read_json("plan.json")["hosts"][0]
    assert (plan["start_method"], plan["preload"]) == ("exec", [])
