"""mpirun's variables, as Open MPI 4.1.4 and 5.0.11 set them for one process per host."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.discovery.schedulers import find_open_mpi, read_node_regex
from msrun.planning.discovery.surroundings import HostView, Surroundings

HOST = HostView("h10")
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


def found(environ: dict[str, str]) -> Surroundings:
    job = find_open_mpi(environ, HOST)
    assert job is not None
    return job


def test_a_rank_is_a_node() -> None:
    job = found(VERSION_4)
    assert job.node_num and (job.node_num.value, job.node_num.source) == (3, "OMPI_COMM_WORLD_SIZE")
    assert job.node_rank and (job.node_rank.value, job.node_rank.source) == (1, "OMPI_COMM_WORLD_RANK")
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
def test_address_of_rank_0_follows_from_the_daemons(environ: dict[str, str], address: str, source: str) -> None:
    master = found(environ).master_addr
    assert master and (master.value, master.source) == (address, source)


@pytest.mark.parametrize(
    "environ",
    [
        FROM_OUTSIDE_5,
        {name: value for name, value in VERSION_4.items() if not name.startswith("PMIX_SERVER")},
        {**VERSION_4, "OMPI_COMM_WORLD_RANK": "2"},  # ranks do not follow the order of hosts
        {**FROM_OUTSIDE_4, "OMPI_MCA_orte_node_regex": "?"},
    ],
)
def test_where_the_address_cannot_be_known_the_remedy_is_the_exact_option(environ: dict[str, str]) -> None:
    job = found(environ)
    assert job.master_addr is None
    assert "mpirun ... msrun --master_addr ADDRESS" in job.remedy


def test_port_is_one_for_all_hosts_and_another_for_another_mpirun() -> None:
    here, there = found(VERSION_4).master_port, found({**VERSION_4, "OMPI_COMM_WORLD_RANK": "0"}).master_port
    assert here is not None and here == there
    assert found({**VERSION_4, "PMIX_NAMESPACE": "70516737"}).master_port != here


def test_once_per_worker_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_LOCAL_SIZE=8: mpirun starts msrun once per worker") as caught:
        find_open_mpi({**VERSION_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, HOST)
    assert "mpirun --map-by ppr:1:node msrun" in str(caught.value)


def test_one_rank_is_one_host_and_outside_mpirun_there_is_none() -> None:
    job = found({**VERSION_4, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    assert job.node_num and job.node_num.value == 1
    assert find_open_mpi({"OMPI_MCA_btl": "tcp", "PMIX_RANK": "0"}, HOST) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h[1:9],[2:10].77.0.10,[2:10].77.0.11@0(3)", ["h9", "10.77.0.10", "10.77.0.11"]),
        ("login@0(1)", ["login"]),
        ("node[2:1-3,7].dc,gpu[3:9-10]@0(6)", ["node01.dc", "node02.dc", "node03.dc", "node07.dc", "gpu009", "gpu010"]),
        ("", []),
        ("[", []),
        ("a[1:1-99999999]", []),
    ],
)
def test_node_regex_is_read(text: str, names: list[str]) -> None:
    assert read_node_regex(text) == names


@settings(max_examples=25)
@given(st.text("hn[]:-,.@()0123456789", max_size=30))
def test_any_node_regex_is_read_or_not_understood(text: str) -> None:
    assert isinstance(read_node_regex(text), list)
