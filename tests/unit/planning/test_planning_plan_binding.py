"""The plan of jobs that are bound, and of jobs on accelerators that are renumbered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msrun.errors import UsageError
from msrun.planning.build import build_plan
from msrun.planning.placement.bind_options import CoreBinding
from msrun.planning.placement.host import Cpu, HostFacts, Topology
from msrun.planning.plan import LaunchPlan
from msrun.planning.plan_text import render_plan
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

NODES = {"gpu": {"0": 0, "1": 0, "2": 1, "3": 1}}
TWO_NODES = Topology(
    tuple(Cpu(n, n // 3 % 2, 0, n % 6) for n in range(12)), tuple(range(12)), memory_nodes=(0, 1), device_nodes=NODES
)
"""Six cores of two threads on two nodes: 0-2 and 6-8, 3-5 and 9-11."""
HOST = HostFacts("h", "127.0.0.1", tuple(range(12)), gpus=("3", "1"), topology=TWO_NODES)


def plan_for(host: HostFacts = HOST, caller: dict[str, str] | None = None, **changes: Any) -> LaunchPlan:
    settings: dict[str, Any] = {
        "program": Program("script", "/j/train.py"),
        "worker_num": 2,
        "local_worker_num": 2,
        "working_directory": Path("/j"),
        "log_dir": Path("/j/log_output"),
    }
    spec = LaunchSpec(**{**settings, **changes})
    return build_plan(spec, host, caller=caller or {}, job_id="JOB", run_dir="/tmp/msrun-JOB", master_port=0)


def test_plan_shows_the_physical_device_beside_the_one_that_the_worker_sees() -> None:
    plan = plan_for()
    assert [(worker.device_id, worker.physical_device, worker.env["DEVICE_ID"]) for worker in plan.workers] == [
        (0, "3", "0"),
        (1, "1", "1"),
    ]
    text = render_plan(plan, as_json=False)
    assert "  rank  local  device  physical  log\n     0      0       0         3  /j/log_output/worker_0.log\n" in text
    assert json.loads(render_plan(plan, as_json=True))["hosts"][0]["workers"][0]["physical_device"] == "3"


def test_cores_follow_the_physical_device() -> None:
    plan = plan_for(bind_core=CoreBinding())
    assert [worker.cpus for worker in plan.workers] == [(3, 4, 5, 9, 10, 11), (0, 1, 2, 6, 7, 8)]
    text = render_plan(plan, as_json=False)
    assert "     0      0       0         3  3-5,9-11  /j/log_output/worker_0.log\n" in text
    assert "  binding of rank 0: an even share near its device: NUMA node 1\n" in text
    assert "memory" not in text


def test_numa_binds_memory_and_the_plan_shows_it() -> None:
    plan = plan_for(bind_numa=True)
    assert [worker.memory_nodes for worker in plan.workers] == [(1,), (0,)]
    assert "  rank  local  device  physical      cpus  memory  log\n" in render_plan(plan, as_json=False)


def test_dict_takes_physical_numbers() -> None:
    core = CoreBinding(is_auto=False, devices={3: (0, 6), 1: (1, 7, 2, 8)}, scheduler=(11,))
    plan = plan_for(bind_core=core)
    assert [worker.cpus for worker in plan.workers] == [(0, 6), (1, 7, 2, 8)]
    assert plan.hosts[0].scheduler_cpus == (11,)
    assert "  binding of the scheduler: CPU 11\n" in render_plan(plan, as_json=False)
    assert plan.hosts[0].common_env["OMP_NUM_THREADS"] == "1"
    assert [worker.env.get("OMP_NUM_THREADS") for worker in plan.workers] == [None, "2"]
    with pytest.raises(UsageError, match="'device4' is no device here; there are devices 0-3"):
        plan_for(bind_core=CoreBinding(is_auto=False, devices={4: (0,)}))


@pytest.mark.parametrize("changes", [{"caller": {"OMP_NUM_THREADS": "5"}}, {"env": (("OMP_NUM_THREADS", "5"),)}])
def test_an_own_number_of_threads_is_kept_for_all(changes: dict[str, Any]) -> None:
    plan = plan_for(bind_core=CoreBinding(is_auto=False, devices={3: (0,), 1: (1, 2)}), **changes)
    assert [worker.env.get("OMP_NUM_THREADS") for worker in plan.workers] == [None, None]
    assert not any("OMP_NUM_THREADS" in note for note in plan.notes)


def test_quota_of_the_cgroup_limits_the_threads() -> None:
    limited = Topology(TWO_NODES.cpus, TWO_NODES.allowed, quota_cores=4.5)
    plan = plan_for(HostFacts("h", "127.0.0.1", TWO_NODES.allowed, topology=limited))
    assert plan.hosts[0].common_env["OMP_NUM_THREADS"] == "2"
    assert plan.notes == (
        "OMP_NUM_THREADS=2 for each worker (its part of the cgroup's limit of 4.5 CPUs; set it to change)",
    )


@pytest.mark.parametrize(
    ("asked", "method", "text"),
    [
        ("auto", "exec", "OMP_PLACES binds whole processes: workers start by exec, each for itself"),
        ("fork", "fork", "--start_method fork with OMP_PLACES: OpenMP binds the fork server"),
        ("exec", "exec", ""),
    ],
)
def test_openmp_that_binds_by_itself_keeps_workers_from_forking(asked: str, method: str, text: str) -> None:
    plan = plan_for(start_method=asked, env=(("OMP_PLACES", "cores"),), preload=("torch",))
    assert plan.hosts[0].start_method == method
    assert plan.hosts[0].preload == (() if method == "exec" else ("torch",))
    notes = [note for note in plan.notes if "OMP_PLACES" in note]
    assert len(notes) == bool(text)
    assert all(text in note for note in notes)


def test_what_the_device_variable_hides_is_a_note() -> None:
    host = HostFacts("h", "127.0.0.1", (0,), gpus=("0", "1"), gpus_reason="CUDA_VISIBLE_DEVICES=0,1,9: '9' is none")
    assert "CUDA_VISIBLE_DEVICES=0,1,9: '9' is none" in plan_for(host).notes
