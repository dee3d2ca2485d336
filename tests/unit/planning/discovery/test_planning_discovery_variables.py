"""Schedulers and clouds of the table: SkyPilot, dstack, SageMaker, Vertex AI, Azure ML and others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from msrun.errors import UsageError
from msrun.planning.discovery.host_options import find_host_options
from msrun.planning.discovery.schedulers import find_surroundings
from msrun.planning.discovery.surroundings import HostView, Surroundings

H1 = HostView("h1", cpu_count=4)
OPTIONS = {"worker_num": 8, "local_worker_num": -1, "node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0}

SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_TASK_ID": "sky-2026-train-7",
}  # fmt: skip
DSTACK = {
    "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_GPUS_PER_NODE": "8", "DSTACK_RUN_NAME": "train-7",
}  # fmt: skip
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2","algo-3"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8",
    "TRAINING_JOB_NAME": "resnet-7",
}  # fmt: skip
VERTEX_SPEC = {
    "cluster": {
        "workerpool0": ["cmle-training-workerpool0-0:2222"],
        "workerpool1": ["cmle-training-workerpool1-0:2222", "cmle-training-workerpool1-1:2222"],
        "workerpool3": ["cmle-training-workerpool3-0:2222"],
    },
    "task": {"type": "workerpool1", "index": 1},
}
VERTEX = {"CLUSTER_SPEC": json.dumps(VERTEX_SPEC)}
AZURE = {
    "AZUREML_RUN_ID": "plum_7", "NODE_RANK": "1", "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105",
}  # fmt: skip
LWS = {"LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "lws-0.lws.default"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_SIZE": "1", "LSB_JOBID": "7",
    "LSB_MCPU_HOSTS": "batch2 1 h41n05 42 h41n06 42",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
PLAIN = {"NODE_RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}


def found(environ: dict[str, str]) -> Surroundings:
    job = find_surroundings(environ, H1)
    assert job is not None
    return job


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        (SKYPILOT, "SkyPilot task sky-2026-train-7", (2, 1, 4, "10.0.0.4")),
        ({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}, "SkyPilot task sky-2026-train-7", (2, 1, None, "10.0.0.4")),
        (DSTACK, "dstack run train-7", (2, 1, 8, "10.0.0.4")),
        (SAGEMAKER, "SageMaker job resnet-7", (3, 1, 8, "algo-1")),
        (VERTEX, "Vertex AI job", (3, 2, None, "cmle-training-workerpool0-0")),
        (AZURE, "Azure ML run plum_7", (2, 1, None, "10.0.0.4")),
        (LWS, "LeaderWorkerSet pod", (3, 2, None, "lws-0.lws.default")),
        (JSRUN, "jsrun", (2, 1, None, None)),
        (HYDRA, "mpiexec", (2, 1, None, None)),
        ({**PLAIN, "NNODES": "3"}, "NODE_RANK and MASTER_ADDR", (3, 1, None, "h0")),
        ({**PLAIN, "NUM_NODES": "3", "NPROC_PER_NODE": "2"}, "NODE_RANK and MASTER_ADDR", (3, 1, 2, "h0")),
    ],
)
def test_a_place_is_read_from_the_variables_of_each_scheduler(
    environ: dict[str, str], name: str, expected: tuple[Any, ...]
) -> None:
    job = found(environ)
    values = (job.node_num, job.node_rank, job.local_worker_num, job.master_addr)
    assert (job.name, tuple(told.value if told else None for told in values)) == (name, expected)


@pytest.mark.parametrize("environ", [SKYPILOT, DSTACK, SAGEMAKER])
def test_two_jobs_on_the_same_hosts_meet_on_different_ports(environ: dict[str, str]) -> None:
    other = {
        name: value.replace("7", "8") if name.endswith(("_ID", "_NAME")) else value for name, value in environ.items()
    }
    ports = [found(each).master_port for each in (environ, environ, other)]
    assert ports[0] == ports[1] != ports[2]


def test_a_world_size_beside_a_node_rank_is_that_of_workers() -> None:
    environ = {**PLAIN, "WORLD_SIZE": "8"}
    options = find_host_options(found(environ), OPTIONS, (), lambda: 4).options
    assert (options["worker_num"], options["local_worker_num"], options["node_rank"]) == (8, 4, 1)
    assert (options["master_addr"], options["master_port"]) == ("h0", 29500)
    with pytest.raises(
        UsageError, match=r"no variable says how many those are; give --local_worker_num, or --discover"
    ):
        find_host_options(found(environ), OPTIONS, (), lambda: 0)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3: but SKYPILOT_NODE_IPS has 2 hosts"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1': JSON of a list of hosts is expected"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"}, "SM_CURRENT_HOST=algo-9: is not in SM_HOSTS"),
        ({"CLUSTER_SPEC": '{"cluster": {}}'}, "CLUSTER_SPEC: cluster with workerpool0 and task are expected"),
        ({**AZURE, "RANK": "3"}, "RANK=3 on node 1: Azure ML starts msrun once per worker; set process_count_per"),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_SIZE": "4"}, "jsrun starts msrun once per worker; start it once per host"),
        ({**PLAIN, "MASTER_ADDR": "localhost", "NNODES": "2"}, "MASTER_ADDR=localhost: other hosts cannot be reached"),
    ],
)
def test_variables_that_cannot_be_right_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        found(environ)
    assert words in str(refused.value)


@pytest.mark.parametrize("environ", [JSRUN, HYDRA])
def test_a_launcher_that_tells_no_address_has_it_asked_for(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"no variable says the address of node 0; add --master_addr ADDRESS"):
        find_host_options(found(environ), OPTIONS, (), lambda: 2)


@pytest.mark.parametrize(
    ("environ", "listed", "words"),
    [
        (
            {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4 h2 4 h3 4"},
            (),
            "LSF job 7 has 3 hosts (LSB_MCPU_HOSTS), but msrun was started once",
        ),
        (
            {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/var/spool/pbs/aux/7"},
            ("h1", "h1", "h2", "h2"),
            "PBS job 7.pbs has 2 hosts (PBS_NODEFILE), but msrun was started once",
        ),
        ({"RAY_ADDRESS": "10.0.0.4:6379"}, (), "Ray: no variable says which nodes a job has"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4"}, (), ""),
    ],
)
def test_hosts_that_are_not_used_are_named(environ: dict[str, str], listed: tuple[str, ...], words: str) -> None:
    job = find_surroundings(environ, HostView("h1", listed=listed))
    assert job is not None
    lines = find_host_options(job, OPTIONS, (), lambda: 0).lines
    assert words in "".join(lines)
    assert bool(lines) == bool(words)
