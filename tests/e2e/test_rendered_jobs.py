"""Rendered jobs run as they are: pods as processes in networks of their own train together, and fail as one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_net import HostNet
from job_runner import WORKER_IMPORTS, WORKER_PATH, JobRunner, wait_until
from pod_cluster import PodCluster

from launch_templates import render_manifest

VALUES: dict[str, Any] = {
    "name": "train",
    "image": "registry.example/train:1",
    "nodes": 2,
    "local_worker_num": 2,
    "cluster_time_out": 60,
    "grace_s": 20,
}
KINDS = [
    "jobset",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("indexed-job", "pytorchjob", "trainjob", "volcano", "ascendjob")
    ),
]
PERMANENT = (2, 93)
"""Exit statuses after which a JobSet does not start its pods again."""
SRUN = """
import subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
addresses, prefixes = {addresses!r}, {prefixes!r}
step = {{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}}
step["SLURM_STEP_NODELIST"] = ",".join(addresses)
tasks = []
for node, address in enumerate(addresses):
    own = {{**step, "SLURM_NODEID": str(node), "SLURMD_NODENAME": address}}
    env = ["env", *(f"{{name}}={{value}}" for name, value in own.items())]
    tasks.append(subprocess.Popen([*prefixes[node], *env, *words]))
sys.exit(max(task.wait() for task in tasks))
"""
"""srun as it starts a step of one task on each node of an allocation."""
PRELOAD = [f"--preload={name}" for name in WORKER_IMPORTS]
Start = Callable[..., PodCluster]


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    """Two nodes for all tests of this module, and one for a launcher."""
    with HostNet(2, has_control=True) as hosts:
        yield hosts


@pytest.fixture
def cluster(msrun: JobRunner, net: HostNet, tmp_path: Path) -> Start:
    """Makes the cluster of a kind that runs a script."""

    def make(kind: str, *script: str | Path, **more: Any) -> PodCluster:
        device = {"device_target": "Ascend"} if kind == "ascendjob" else {}
        manifest = render_manifest(kind, {**VALUES, **device, **more}, [str(word) for word in script])
        folder = tmp_path / "cluster"
        folder.mkdir()
        return PodCluster(msrun, net, folder, manifest)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_pods_train_as_one_process_does_although_names_come_late(
    kind: str, cluster: Start, workers: Path, tmp_path: Path
) -> None:
    pods = cluster(kind, *PRELOAD, workers / "pod_steps.py", tmp_path / "found.json")
    jobs = pods.start(tmp_path, {"PYTHONPATH": WORKER_PATH})
    wait_until(lambda: "trying again" in jobs[1].stderr, "the second pod looks for the name of the first")
    pods.publish_names()
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-9)
    assert (pods.log_folder(1) / "log_output" / "node_1" / "worker_3.log").exists()


@pytest.mark.slow
def test_rank_table_of_a_config_map_is_awaited_and_copied(
    cluster: Start, workers: Path, net: HostNet, tmp_path: Path
) -> None:
    """The kubelet shows a ConfigMap as links, and replaces all of it at once."""
    pods = cluster("ascendjob", *PRELOAD, workers / "pod_steps.py", tmp_path / "found.json", rank_table=True)
    [first] = [body for body in pods.bodies if body["kind"] == "ConfigMap"]
    pods.write_map(first["metadata"]["name"], first["data"], 1)
    jobs = pods.start(tmp_path, {"PYTHONPATH": WORKER_PATH})
    wait_until(lambda: all('waiting until it is "completed"' in job.stderr for job in jobs), "both pods wait")
    servers = [
        {
            "server_id": net.address(host),
            "device": [{"device_id": str(n), "rank_id": str(2 * rank + n)} for n in range(2)],
        }
        for rank, host in enumerate((1, 0))  # the pod that the operator made second is node 0 here
    ]
    table = {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}
    pods.write_map(first["metadata"]["name"], {"hccl.json": json.dumps(table)}, 2)
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-9)
    assert not found["is_link"] and json.loads(found["table"]) == table
    assert "this is node 0" in jobs[1].stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_pod_fails_the_others_with_a_status_that_starts_the_job_again(
    kind: str, cluster: Start, workers: Path, tmp_path: Path
) -> None:
    pods = cluster(kind, workers / "wait.py")
    jobs = pods.start(tmp_path, {})
    pods.publish_names()
    jobs[0].wait_for(*(tmp_path / f"ready_{rank}" for rank in range(4)))
    jobs[1].send(signal.SIGKILL)
    codes = [job.finish().code for job in jobs]
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0 and codes[0] not in PERMANENT, "2 would end a JobSet for good"


def test_a_pod_asked_to_stop_lets_its_workers_save_and_says_so(cluster: Start, workers: Path, tmp_path: Path) -> None:
    pods = cluster("jobset", workers / "say_goodbye.py")
    jobs = pods.start(tmp_path, {})
    pods.publish_names()
    jobs[0].wait_for(*(tmp_path / f"ready_{rank}" for rank in range(4)))
    for job in jobs:
        job.send(signal.SIGTERM)
    assert {job.finish().code for job in jobs} == {128 + signal.SIGTERM}
    assert all((tmp_path / f"goodbye_{rank}").exists() for rank in range(4))


def test_wrong_input_has_the_status_that_ends_the_job_for_good(cluster: Start, tmp_path: Path) -> None:
    pods = cluster("jobset", "absent.py", cluster_time_out=5)
    jobs = pods.start(tmp_path, {})
    pods.publish_names()
    assert [job.finish().code for job in jobs] == [2, 2]
    policy = pods.bodies[-1]
    spec = policy["spec"]["replicatedJobs"][0]["template"]["spec"]
    [rule] = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], tuple(rule["onExitCodes"]["values"])) == ("FailJob", PERMANENT)
    assert rule["onExitCodes"]["containerName"] == pods.pods[0].container["name"]


def test_batch_script_of_slurm_starts_one_world_on_all_nodes(
    msrun: JobRunner, net: HostNet, workers: Path, tmp_path: Path
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    addresses, prefixes = [net.address(host) for host in range(2)], [net.prefix(host) for host in range(2)]
    (tmp_path / "srun.py").write_text(SRUN.format(addresses=addresses, prefixes=prefixes))
    for name, words in (("srun", str(tmp_path / "srun.py")), ("msrun", "-m msrun")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (commands / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    values = {"name": "train", "nodes": 2, "local_worker_num": 2, "cluster_time_out": 60}
    script.write_text(render_manifest("slurm", values, [str(workers / "record.py")]))
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    done = msrun.start(str(script), cwd=tmp_path, command=["bash"], env={"PATH": path}).finish()
    assert done.code == 0, done.stderr
    for rank in range(4):
        env = json.loads((tmp_path / f"record_{rank}.json").read_text())["env"]
        told = {"RANK": str(rank), "WORLD_SIZE": "4", "GROUP_RANK": str(rank // 2), "MASTER_ADDR": addresses[0]}
        assert {name: env[name] for name in told} == told


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun; apt-get install openmpi-bin")
def test_launcher_of_an_mpi_job_starts_one_world_in_the_workers(cluster: Start, workers: Path, tmp_path: Path) -> None:
    pods = cluster("mpijob", workers / "record.py", env={"SETTING": "a b"})
    done = pods.start_launcher(tmp_path, {}).finish()
    assert done.code == 0, done.stderr
    for rank in range(4):
        env = json.loads((tmp_path / f"record_{rank}.json").read_text())["env"]
        told = {"RANK": str(rank), "WORLD_SIZE": "4", "GROUP_RANK": str(rank // 2), "SETTING": "a b"}
        assert {name: env[name] for name in told} == told
