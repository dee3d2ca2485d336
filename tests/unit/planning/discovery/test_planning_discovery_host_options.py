"""What is told and what is given, put together; and which environment speaks when several could."""

import pytest

from msrun.errors import UsageError
from msrun.planning.host_options import find_host_options
from msrun.planning.schedulers import HostView, Surroundings, Told, find_surroundings
from msrun.planning.settings import without_option_variables

DEFAULTS = {"worker_num": 8, "local_worker_num": None, "node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0}
TWO = Surroundings(
    name="a job",
    node_num=Told(2, "NODES"),
    node_rank=Told(1, "RANK"),
    master_addr=Told("h0", "MASTER"),
    master_port=Told(1234, "PORT"),
)
POD = Surroundings(
    name="a pod", node_rank=Told(1, "INDEX"), master_addr=Told("p-0.s", "/etc/hosts"), are_peers_near=True
)
ONE = Surroundings(name="a job", node_num=Told(1, "NODES"), hint="use all")


def told(job, *, devices=0, **given):
    return find_host_options(job, {**DEFAULTS, **given}, set(given), lambda: devices)


def with_local(job, count):
    return Surroundings(**{**vars(job), "local_worker_num": Told(count, "GPUS")})


@pytest.mark.parametrize(
    ("job", "devices", "given", "workers"),
    [
        (TWO, 4, {}, (8, 4)),
        (with_local(TWO, 3), 4, {}, (6, 3)),
        (with_local(TWO, 3), 4, {"worker_num": 4}, (4, 2)),
        (with_local(TWO, 3), 4, {"worker_num": 12, "local_worker_num": 4}, (12, 4)),
        (POD, 4, {"worker_num": 16}, (16, 4)),
    ],
)
def test_number_of_workers_comes_from_the_nearest_that_says_it(job, devices, given, workers):
    options = {**DEFAULTS, **given, **told(job, devices=devices, **given).options}
    assert (options["worker_num"], options["local_worker_num"]) == workers
    assert options["node_rank"] == 1 and options["master_addr"] in ("h0", "p-0.s")


def test_every_value_says_where_it_came_from_and_one_line_says_all():
    found = told(with_local(TWO, 3))
    assert {setting.name: setting.source for setting in found.settings} == {
        "node_rank": "RANK",
        "worker_num": "NODES x GPUS",
        "local_worker_num": "GPUS",
        "master_addr": "MASTER",
        "master_port": "PORT",
    }
    assert found.lines == ("a job: node 1 of 2, 3 workers here, master h0:1234 (NODES, RANK, GPUS, MASTER, PORT)",)


@pytest.mark.parametrize(("cpus", "is_said"), [(0, False), (1, True), (3, False), (8, False)])
def test_workers_with_too_few_processors_are_said(cpus, is_said):
    job = Surroundings(**{**vars(with_local(TWO, 3)), "cpu_count": cpus, "cpu_remedy": "ask for more"})
    assert told(job).lines[1:] == (("a job: 3 workers share 1 CPU here; ask for more",) if is_said else ())


def test_pods_whose_number_nobody_says_are_counted_from_the_workers():
    (line,) = told(POD, worker_num=10, local_worker_num=4).lines
    assert line == "a pod: node 1 of 3, 4 workers here, master p-0.s:8118 (INDEX, /etc/hosts)"
    beyond = Surroundings(**{**vars(POD), "node_rank": Told(3, "INDEX")})
    with pytest.raises(
        UsageError, match="node 3 with 4 workers per host is beyond --worker_num 10, which is for 3 hosts"
    ):
        told(beyond, worker_num=10, local_worker_num=4)


@pytest.mark.parametrize(
    ("job", "devices", "given", "said"),
    [
        (TWO, 0, {"worker_num": 5}, "--worker_num 5: cannot be shared evenly by 2 hosts (NODES)"),
        (POD, 0, {}, "a pod: is one of a job's, but no variable says how many those are; give --worker_num"),
        (POD, 0, {"worker_num": 4}, "give --local_worker_num, or --discover=False"),
        (Surroundings(name="x", node_num=Told(2, "N"), remedy="do this"), 0, {}, "x: no variable says the address of "),
        (Surroundings(name="x", node_num=Told(2, "N")), 0, {}, "give --master_addr ADDRESS on every host"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(job, devices, given, said):
    with pytest.raises(UsageError) as caught:
        told(job, devices=devices, **given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("job", "devices", "given"),
    [
        (POD, 8, {"worker_num": 8}),
        (Surroundings(name="x", node_rank=Told(3, "INDEX")), 8, {}),
        (Surroundings(name="x", node_rank=Told(3, "INDEX")), 0, {"worker_num": 16}),
        (ONE, 8, {"worker_num": 2}),
    ],
)
def test_a_job_on_one_host_stays_one(job, devices, given):
    assert told(job, devices=devices, **given).options == {}


def test_the_only_host_may_be_told_its_number_of_workers():
    found = told(with_local(ONE, 4))
    assert found.options == {"worker_num": 4}
    assert found.lines == ("a job: 4 workers on this host (GPUS)", "use all")
    assert told(ONE, local_worker_num=2).options == {"worker_num": 2}
    assert told(with_local(ONE, 4), worker_num=2).options == {}
    assert told(ONE, worker_num=16, local_worker_num=8).lines == (), "several hosts by hand need no hint"


PET = {"PET_NNODES": "2", "PET_NODE_RANK": "0"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_SERVER_URI4": "1.0;x"}
SLURM = {"SLURM_JOB_ID": "1"}
PODS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "1", "KUBERNETES_SERVICE_HOST": "k"}
VOLCANO = {"VC_TASK_INDEX": "0", "VC_A_HOSTS": "a,b"}
INDEXED = {"JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({**PET, **MPI, **SLURM, **VOLCANO, **INDEXED}, "torchrun's variables"),
        ({**MPI, **SLURM, **PODS, **INDEXED}, "mpirun"),
        ({**SLURM, **INDEXED}, "Slurm job 1"),
        ({**PODS, **VOLCANO, "VC_B_HOSTS": "c"}, "Kubernetes pod here"),
        ({**VOLCANO, **INDEXED}, "Volcano pod here"),
        (INDEXED, "Kubernetes pod here"),
        ({**SLURM, "MSRUN_JOB_ID": "j"}, None),
    ],
)
def test_the_nearest_environment_speaks(environ, name):
    job = find_surroundings(environ, HostView("here"))
    assert (job.name if job else None) == name


def test_workers_keep_what_is_true_of_their_host_and_lose_what_names_msruns_place():
    lost = [
        "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_COMMAND", "PMIX_RANK",
        "PMIX_SERVER_URI4", "PMI_RANK", "PRTE_LAUNCHED", "PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT",
    ]  # fmt: skip
    kept = [
        "SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "OMPI_MCA_btl",
        "PMIX_MCA_gds", "PRTE_MCA_x", "PETSC_DIR", "PMIX", "MY_PET_NNODES",
    ]  # fmt: skip
    assert list(without_option_variables(dict.fromkeys([*lost, *kept], "1"), [])) == kept
