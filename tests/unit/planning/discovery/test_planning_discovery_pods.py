"""Variables of Kubernetes pods, of torchrun, and of the schedulers and clouds of the table."""

import json

import pytest
from cluster_pods import DOMAIN as CLUSTER
from cluster_pods import pods_of

from launch_templates import render_manifest
from msrun.errors import UsageError
from msrun.planning.host_options import find_host_options
from msrun.planning.schedulers import HostView, Told, find_surroundings, read_domain

DOMAIN = "train.default.svc.cluster.local"
POD_1 = HostView("train-1", DOMAIN, cpu_count=6)
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "train-0", "PET_MASTER_PORT": "29500"}
PYTORCH_JOB = {
    "PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto", "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1", "PYTHONUNBUFFERED": "1", "KUBERNETES_SERVICE_HOST": "10.1",
}  # fmt: skip
OLD_PYTORCH_JOB = {name: value for name, value in PYTORCH_JOB.items() if not name.startswith("PET_")}
VOLCANO = {"VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1", "VC_NODE_HOSTS": "t-node-0.t,t-node-1.t", "VC_NODE_NUM": "2"}


def assignment(job):
    """Return what was found: number and index of hosts, workers, address, port."""
    assert job is not None
    values = (job.node_num, job.node_rank, job.local_worker_num, job.master_addr, job.master_port)
    return tuple(told.value if told else None for told in values)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (PET, (2, 1, None, "train-0", 29500)),
        ({**PET, "PET_NNODES": "2:2", "PET_NPROC_PER_NODE": "4"}, (2, 1, 4, "train-0", 29500)),
        ({**PET, "PET_NPROC_PER_NODE": "cpu"}, (2, 1, 6, "train-0", 29500)),
        (PYTORCH_JOB, (3, 1, None, "train-master-0", 23456)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, (1, None, 4, None, None)),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": "localhost"}, (2, 0, None, "train-1", None)),
    ],
)
def test_torchruns_variables(environ, expected):
    assert assignment(find_surroundings(environ, POD_1)) == expected


@pytest.mark.parametrize(
    ("endpoint", "address", "port"),
    [("h1:29400", "h1", 29400), ("[fd77::9]:1234", "fd77::9", 1234), ("[fd77::9]", "fd77::9", 29400)],
)
def test_a_rendezvous_endpoint_is_the_master_and_leaves_numbering_to_the_meeting(endpoint, address, port):
    environ = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": endpoint, "PET_NODE_RANK": "0"}
    assert assignment(find_surroundings(environ, POD_1)) == (2, None, None, address, port)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"PET_NNODES": "4:2"}, "PET_NNODES=4:2: MIN:MAX is expected"),
        ({"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2: must be below PET_NNODES=2"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE='0': a whole number from 1 on"),
        ({"PET_MASTER_ADDR": "127.0.0.1"}, "PET_MASTER_ADDR=127.0.0.1: other hosts cannot be reached by it"),
        ({"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "h1:x"}, "PET_RDZV_ENDPOINT=h1:x: HOST:PORT is expected"),
    ],
)
def test_wrong_torchrun_variables_are_refused(change, said):
    with pytest.raises(UsageError) as caught:
        find_surroundings({**PET, **change}, POD_1)
    assert said in str(caught.value)


def test_an_elastic_number_says_how_few_hosts_are_enough():
    environ = {**PET, "PET_NNODES": "2:4", "PET_RDZV_BACKEND": "c10d"}
    job = find_surroundings(environ, POD_1)
    assert job is not None and (job.node_num, job.min_hosts) == (Told(4, "PET_NNODES"), Told(2, "PET_NNODES"))
    given = {"worker_num": None, "local_worker_num": None, "node_rank": -1, "master_addr": "", "master_port": 0}
    found = find_host_options(job, given, (), lambda: 3)
    counts = {"worker_num": 12, "local_worker_num": 3, "min_hosts": 2}
    assert found.options == {**counts, "master_addr": "train-0", "master_port": 29500}
    assert "one of 4, 2 are enough, 3 workers here" in found.lines[0]


def test_an_operator_without_pet_variables_counts_pods():
    assert assignment(find_surroundings(OLD_PYTORCH_JOB, POD_1)) == (3, 1, None, "train-master-0", 23456)
    outside = {name: value for name, value in OLD_PYTORCH_JOB.items() if not name.startswith("KUBERNETES")}
    assert find_surroundings(outside, POD_1) is None, "outside of pods RANK and WORLD_SIZE are a worker's"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"VC_PS_HOSTS": "t-ps-0.t"}, "VC_<TASK>_HOSTS of 2 tasks (NODE, PS)"),
        ({"VC_NODE_NUM": "3"}, "VC_NODE_NUM=3: but VC_NODE_HOSTS has 2 hosts"),
        ({"VC_TASK_INDEX": "2"}, "VC_TASK_INDEX=2: must be below VC_NODE_NUM=2"),
    ],
)
def test_volcano_pods_without_numbers_of_their_own_are_refused(change, said):
    with pytest.raises(UsageError) as caught:
        find_surroundings({**VOLCANO, **change}, POD_1)
    assert said in str(caught.value)


def test_volcano_without_the_svc_plugin_goes_by_the_host_name():
    job = find_surroundings({"VC_TASK_INDEX": "1"}, POD_1)
    assert assignment(job) == (None, 1, None, f"train-0.{DOMAIN}", None)
    assert job is not None and job.are_peers_near


def test_pod_of_an_indexed_job_knows_pod_0_by_the_service_of_both():
    job = find_surroundings({"JOB_COMPLETION_INDEX": "1"}, POD_1)
    assert assignment(job) == (None, 1, None, f"train-0.{DOMAIN}", None)
    assert job is not None and job.are_peers_near
    child = find_surroundings({"JOB_COMPLETION_INDEX": "12"}, HostView("js-node-0-12", "js.ns.svc"))
    assert assignment(child)[3] == "js-node-0-0.js.ns.svc"


@pytest.mark.parametrize("host", [HostView("train-1"), HostView("gpu-node-7", DOMAIN), HostView("train", DOMAIN)])
def test_pod_without_a_service_or_with_the_name_of_its_machine_has_no_peers(host):
    job = find_surroundings({"JOB_COMPLETION_INDEX": "1"}, host)
    assert assignment(job) == (None, 1, None, None, None)
    assert job is not None and not job.are_peers_near and "headless Service" in job.remedy


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        (f"127.0.0.1\tlocalhost\n10.244.1.5\ttrain-1.{DOMAIN}\ttrain-1\n", DOMAIN),
        (f"10.244.1.5 train-1 # train-1.{DOMAIN}\n", ""),
        (f"10.244.1.6 train-10.{DOMAIN} train-10\n", ""),
    ],
)
def test_service_of_a_pod_is_read_from_its_hosts_file(text, domain):
    assert read_domain(text, "train-1") == domain


NODES = 3
VALUES = {"name": "train", "image": "registry.example/train:1", "nodes": NODES, "local_worker_num": 4}


def view(pod):
    return HostView(pod.name, f"{pod.subdomain}.{CLUSTER}" if pod.subdomain else "")


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob", "volcano", "pytorchjob", "leaderworkerset"])
def test_pods_find_the_places_that_their_manifest_gives(kind):
    pods = pods_of(render_manifest(kind, VALUES, ["train.py"]))
    assert len(pods) == NODES
    for rank, pod in enumerate(pods):
        numbers = {name: int(pod.args[name]) for name in ("worker_num", "local_worker_num")}
        job = find_surroundings(pod.environ, view(pod))
        assert job is not None
        options = {"node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0, **numbers}
        found = find_host_options(job, options, set(numbers), lambda: 0).options
        assert found["node_rank"] == rank == int(pod.args["node_rank"])
        assert str(found["master_addr"]).removesuffix(f".{CLUSTER}").removesuffix(".default") == pod.args["master_addr"]


@pytest.mark.parametrize("kind", ["volcano", "pytorchjob", "trainjob"])
def test_pods_that_know_their_number_need_no_option_at_all(kind):
    pod = pods_of(render_manifest(kind, VALUES, ["train.py"]))[1]
    job = find_surroundings(pod.environ, view(pod))
    assert job is not None
    options = {"worker_num": 8, "local_worker_num": None, "node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0}
    found = find_host_options(job, options, set(), lambda: 4).options
    assert (found["worker_num"], found["local_worker_num"], found["node_rank"]) == (NODES * 4, 4, 1)


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


def found(environ):
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
def test_a_place_is_read_from_the_variables_of_each_scheduler(environ, name, expected):
    job = found(environ)
    values = (job.node_num, job.node_rank, job.local_worker_num, job.master_addr)
    assert (job.name, tuple(told.value if told else None for told in values)) == (name, expected)


@pytest.mark.parametrize("environ", [SKYPILOT, DSTACK, SAGEMAKER])
def test_two_jobs_on_the_same_hosts_meet_on_different_ports(environ):
    other = {
        name: value.replace("7", "8") if name.endswith(("_ID", "_NAME")) else value for name, value in environ.items()
    }
    ports = [found(each).master_port for each in (environ, environ, other)]
    assert ports[0] == ports[1] != ports[2]


def test_a_world_size_beside_a_node_rank_is_that_of_workers():
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
def test_variables_that_cannot_be_right_are_refused(environ, words):
    with pytest.raises(UsageError) as refused:
        found(environ)
    assert words in str(refused.value)


def test_the_port_of_the_first_host_is_that_of_the_job():
    port = found(VERTEX).master_port
    assert port is not None and port.value == 2222


@pytest.mark.parametrize("environ", [JSRUN, HYDRA])
def test_a_launcher_that_tells_no_address_has_it_asked_for(environ):
    with pytest.raises(UsageError, match=r"no variable says the address of node 0; add --master_addr ADDRESS"):
        find_host_options(found(environ), OPTIONS, (), lambda: 2)


@pytest.mark.parametrize(
    ("environ", "listed", "words"),
    [
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4 h2 4 h3 4"}, (), "LSF job 7 has 3 hosts (LSB_MCPU_HOSTS), but "),
        (
            {"PBS_JOBID": "7", "PBS_NODEFILE": "/x"},
            ("h1", "h1", "h2", "h2"),
            "PBS job 7 has 2 hosts (PBS_NODEFILE), but",
        ),
        ({"RAY_ADDRESS": "10.0.0.4:6379"}, (), "Ray: no variable says which nodes a job has"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4"}, (), ""),
    ],
)
def test_hosts_that_are_not_used_are_named(environ, listed, words):
    job = find_surroundings(environ, HostView("h1", listed=listed))
    assert job is not None
    lines = find_host_options(job, OPTIONS, (), lambda: 0).lines
    assert words in "".join(lines)
    assert bool(lines) == bool(words)
