"""Slurm's variables, as srun, sbatch and salloc of Slurm 22.05 set them."""

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.schedulers import FIRST_PORT, PORT_COUNT, HostView, Told, find_surroundings, read_node_regex
from ranktable.hosts.brackets import fold

HOST = HostView("n2")
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
BATCH = {
    **JOB, "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "3", "SLURM_NTASKS": "3", "SLURM_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip
STEP = {
    **JOB, "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2",
}  # fmt: skip
SHELL = {
    **JOB, "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
}  # fmt: skip


def found(environ):
    job = find_surroundings(environ, HOST)
    assert job is not None
    return job


def test_task_of_a_step_is_a_node_of_the_step_not_of_the_allocation():
    job = found(STEP)
    assert job.name == "Slurm job 4711"
    assert job.node_num == Told(2, "SLURM_STEP_NUM_NODES")
    assert job.node_rank == Told(1, "SLURM_NODEID")
    assert job.master_addr == Told("n1", "SLURM_STEP_NODELIST")
    assert job.master_port and FIRST_PORT <= job.master_port.value < FIRST_PORT + PORT_COUNT
    assert job.local_worker_num is None
    assert (job.cpu_count, job.cpu_remedy) == (HOST.cpu_count, "srun --cpus-per-task=N gives more")


def test_gpus_of_the_node_are_its_workers():
    job = found({**STEP, "SLURM_GPUS_ON_NODE": "8"})
    assert job.local_worker_num == Told(8, "SLURM_GPUS_ON_NODE")
    assert found({**STEP, "SLURM_GPUS_ON_NODE": "0"}).local_worker_num is None


def test_port_is_one_for_all_hosts_of_a_step_and_another_for_another_step_or_job():
    changes = [{}, {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"}]
    here, there, *others = [found({**STEP, **change}).master_port for change in changes]
    assert here == there
    assert here not in others and len(set(others)) == 2


@pytest.mark.parametrize("environ", [BATCH, SHELL, JOB], ids=["batch script", "shell of salloc", "salloc without one"])
def test_started_once_in_an_allocation_of_several_it_is_one_host_and_says_how_to_use_all(environ):
    job = found(environ)
    assert job.node_num and job.node_num.value == 1
    assert job.node_rank is None and job.master_addr is None
    assert "Slurm job 4711 has 3 nodes" in job.hint and "srun --ntasks-per-node=1 msrun" in job.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "16"}, "SLURM_STEP_NUM_TASKS=16 on 2 hosts: srun starts msrun once per worker"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2: must be below SLURM_STEP_NUM_NODES=2"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x': a whole number"),
        (
            {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"},
            "SLURM_STEP_NUM_NODES=3: but SLURM_STEP_NODELIST has 2 hosts",
        ),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: 'n[1-' has a ["),
        ({"SLURMD_NODENAME": "n1"}, "SLURM_NODEID=1: is n2 in SLURM_STEP_NODELIST=n[1-2], but SLURMD_NODENAME=n1"),
        ({"SLURM_GPUS_ON_NODE": "many"}, "SLURM_GPUS_ON_NODE='many': a whole number"),
    ],
)
def test_contradictions_are_refused_with_the_variable(change, said):
    with pytest.raises(UsageError) as caught:
        find_surroundings({**STEP, **change}, HOST)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_step_that_does_not_say_which_node_this_is_is_refused():
    environ = {name: value for name, value in STEP.items() if name != "SLURM_NODEID"}
    with pytest.raises(UsageError, match="SLURM_NODEID='': a whole number from 0 on is expected"):
        find_surroundings(environ, HOST)


numbers = st.lists(st.integers(0, 12_000), min_size=2, max_size=40, unique=True)


@settings(max_examples=25)
@given(numbers=numbers, width=st.integers(1, 5), data=st.data())
def test_first_node_of_any_list_is_the_master_and_each_node_finds_its_rank(numbers, width, data):
    nodes = [f"rack-{number:0{width}d}" for number in numbers]
    rank = data.draw(st.integers(0, len(nodes) - 1))
    count = str(len(nodes))
    environ = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": fold(nodes), "SLURM_STEP_NUM_NODES": count,
        "SLURM_STEP_NUM_TASKS": count, "SLURM_NODEID": str(rank), "SLURMD_NODENAME": nodes[rank],
    }  # fmt: skip
    job = found(environ)
    assert job.node_rank and job.node_rank.value == rank
    assert job.master_addr and job.master_addr.value == nodes[0]


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from([*sorted(STEP), "SLURM_GPUS_ON_NODE"]), st.text(max_size=12)))
@example({"SLURM_STEP_NODELIST": "0\r0", "SLURMD_NODENAME": "0"})
def test_whatever_the_variables_hold_there_is_a_place_or_one_line(change):
    with contextlib.suppress(UsageError):
        find_surroundings({**STEP, **change}, HOST)


H10 = HostView("h10")
URI = "499712000.0;tcp://10.77.0.9,172.17.0.1:34911;tcp6://[fd77::9]:35937"
VERSION_4 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_hnp_uri": URI, "PMIX_NAMESPACE": "499712001",
    "OMPI_MCA_orte_node_regex": "h[1:9],[2:10].77.0.10,[2:10].77.0.11@0(3)",
    "PMIX_SERVER_URI4": "499712000.1;tcp4://127.0.0.1:56697", "PMIX_RANK": "1",
}  # fmt: skip
FROM_OUTSIDE_4 = {  # mpirun on h9, ranks 0 and 1 on 10.77.0.11 and 10.77.0.10
    **VERSION_4, "OMPI_COMM_WORLD_SIZE": "2", "PMIX_SERVER_URI4": "70516736.2;tcp4://127.0.0.1:39855",
    "OMPI_MCA_orte_node_regex": "h[1:9],[2:10].77.0.11,[2:10].77.0.10@0(3)",
}  # fmt: skip
VERSION_5 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-gpu-h9-11105@1", "PMIX_SERVER_URI41": "prterun-gpu-h9-11105@0.1;tcp4://127.0.0.1:52369",
    "OMPI_VERSION": "5.0.11",
}  # fmt: skip
FROM_OUTSIDE_5 = {**VERSION_5, "PMIX_SERVER_URI41": "prterun-gpu-h9-11105@0.2;tcp4://127.0.0.1:51485"}


def mpirun(environ):
    job = find_surroundings(environ, H10)
    assert job is not None
    return job


def test_a_rank_is_a_node():
    job = mpirun(VERSION_4)
    assert job.node_num == Told(3, "OMPI_COMM_WORLD_SIZE")
    assert job.node_rank == Told(1, "OMPI_COMM_WORLD_RANK")
    assert job.local_worker_num is None


@pytest.mark.parametrize(
    ("environ", "address", "source"),
    [
        (VERSION_4, "10.77.0.9", "OMPI_MCA_orte_hnp_uri"),
        ({**VERSION_4, "OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd77::9]:35937"}, "fd77::9", "OMPI_MCA_orte_hnp_uri"),
        (FROM_OUTSIDE_4, "10.77.0.11", "OMPI_MCA_orte_node_regex"),
        (VERSION_5, "gpu-h9", "PMIX_NAMESPACE"),
    ],
)
def test_address_of_rank_0_follows_from_the_daemons(environ, address, source):
    master = mpirun(environ).master_addr
    assert master == Told(address, source)


@pytest.mark.parametrize(
    "environ",
    [
        FROM_OUTSIDE_5,
        {name: value for name, value in VERSION_4.items() if not name.startswith("PMIX_SERVER")},
        {**VERSION_4, "OMPI_COMM_WORLD_RANK": "2"},  # ranks do not follow the order of hosts
        {**FROM_OUTSIDE_4, "OMPI_MCA_orte_node_regex": "?"},
    ],
)
def test_where_the_address_cannot_be_known_the_remedy_is_the_exact_option(environ):
    job = mpirun(environ)
    assert job.master_addr is None
    assert "mpirun ... msrun --master_addr ADDRESS" in job.remedy


def test_port_is_one_for_all_hosts_and_another_for_another_mpirun():
    here, there = (mpirun(VERSION_4).master_port, mpirun({**VERSION_4, "OMPI_COMM_WORLD_RANK": "0"}).master_port)
    assert here is not None and here == there
    assert mpirun({**VERSION_4, "PMIX_NAMESPACE": "70516737"}).master_port != here


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h[1:9],[2:10].77.0.10,[2:10].77.0.11@0(3)", ["h9", "10.77.0.10", "10.77.0.11"]),
        ("node[2:1-3,7].dc,gpu[3:9-10]@0(6)", ["node01.dc", "node02.dc", "node03.dc", "node07.dc", "gpu009", "gpu010"]),
        ("[", []),
        ("a[1:1-99999999]", []),
    ],
)
def test_node_regex_is_read(text, names):
    assert read_node_regex(text) == names
