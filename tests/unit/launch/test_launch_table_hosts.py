"""A rank table as the list of a job's hosts."""

import json
from pathlib import Path

import pytest

from msrun.errors import UsageError
from msrun.launch import job_hosts
from msrun.launch.job_hosts import HostList, TableHost, find_own_server, read_host_list, read_table_hosts, table_digest
from msrun.planning.hosts import HostAssignment


def write(path, servers):
    listed = [
        {**server, "device": [{"device_id": str(d), "rank_id": str(r)} for d, r in server["device"]]}
        for server in servers
    ]
    table = {"version": "1.0", "server_count": str(len(listed)), "server_list": listed, "status": "completed"}
    path.write_text(json.dumps(table))
    return path


@pytest.fixture(autouse=True)
def this_host(monkeypatch):
    monkeypatch.setattr(job_hosts, "own_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.7": "eth0"})
    monkeypatch.setattr(job_hosts.socket, "gethostname", lambda: "trainer-7.cluster")


DEFAULTS = {"worker_num": 8, "local_worker_num": None, "node_rank": -1, "master_addr": "127.0.0.1"}


def test_ranks_and_devices_are_those_of_the_table_and_rank_0_is_on_node_0(tmp_path):
    devices = {"10.0.0.7": [(4, 3), (6, 1)], "10.0.0.8": [(0, 2), (1, 0)]}
    servers = [{"server_id": name, "device": device} for name, device in devices.items()]
    path = write(tmp_path / "t.json", servers)
    first = HostAssignment(0, "10.0.0.8", "10.0.0.8", (0, 2), (1, 0))
    own = HostAssignment(1, "10.0.0.7", "10.0.0.7", (1, 3), (6, 4))
    found = read_host_list(path)
    assert found == HostList(path, (first, own), own)
    told = {"worker_num": 4, "local_worker_num": 2, "node_rank": 1, "master_addr": "10.0.0.8"}
    assert found.apply({**DEFAULTS, "x": 5}, set()) == {**told, "x": 5}
    assert found.apply({**DEFAULTS, "master_addr": "m"}, {"master_addr"})["master_addr"] == "m"
    assert found.apply({**DEFAULTS, "worker_num": 4}, {"worker_num"})["worker_num"] == 4
    for name, value in (("worker_num", 8), ("local_worker_num", 4), ("node_rank", 0)):
        with pytest.raises(UsageError, match=f"--{name} {value}: --rank_table_file .* says . for node 1"):
            found.apply({**DEFAULTS, name: value}, {name})


def test_server_without_a_name_is_refused_and_no_list_of_hosts(tmp_path):
    servers = [{"server_id": name, "device": [(0, rank)]} for rank, name in enumerate(("", "10.0.0.1"))]
    path = write(tmp_path / "t.json", servers)
    assert read_host_list(path) is None
    with pytest.raises(UsageError, match="has an empty server_id"):
        read_table_hosts(path)


def test_one_server_is_this_host_whatever_it_is_called(tmp_path):
    found = read_host_list(write(tmp_path / "t.json", [{"server_id": "10.0.0.99", "device": [(6, 1), (4, 0)]}]))
    assert found is not None
    assert found.hosts == (HostAssignment(0, "10.0.0.99", "10.0.0.99", (0, 1), (4, 6)),)
    assert found.apply(DEFAULTS, set()) == {**DEFAULTS, "worker_num": 2, "local_worker_num": 2}
    with pytest.raises(UsageError, match=r"--worker_num 8: --rank_table_file .* says 2"):
        found.apply(DEFAULTS, {"worker_num"})


def test_one_server_with_wrong_ranks_is_left_to_the_checks_of_the_table(tmp_path):
    assert read_host_list(write(tmp_path / "t.json", [{"server_id": "a", "device": [(0, 0), (1, 0)]}])) is None


@pytest.mark.parametrize("ranks", [(0, 0), (0, 2), (1, 2)])
def test_ranks_that_leave_a_doubt_are_refused(tmp_path, ranks):
    servers = [{"server_id": f"10.0.0.{7 + i}", "device": [(0, rank)]} for i, rank in enumerate(ranks)]
    with pytest.raises(UsageError, match="rank_ids are not 0 to 1, each once"):
        read_host_list(write(tmp_path / "t.json", servers))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00", '{"version": "1.0"}'])
def test_file_that_is_no_table_is_left_to_the_checks(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    assert read_host_list(tmp_path / "t.json") is None


def test_host_that_is_in_no_server_or_in_two_is_refused():
    names = [f"10.0.1.{index}" for index in range(6)]
    hosts, path = [TableHost(HostAssignment(0, name, "", (0,), (0,)), (name,)) for name in names], Path("t.json")
    with pytest.raises(UsageError) as error:
        find_own_server(hosts, {"127.0.0.1": "lo", "10.0.0.7": "eth0"}, "here", path)
    assert "this host (here, 10.0.0.7) is none of its servers (10.0.1.0, " in str(error.value)
    assert "10.0.1.3 and 2 more)" in str(error.value)
    with pytest.raises(UsageError, match=r"2 servers of it are this host \(10.0.1.0, 10.0.1.1\)"):
        find_own_server(hosts, {"10.0.1.0": "a", "10.0.1.1": "b"}, "here", path)


def test_tables_that_say_the_same_have_the_same_digest():
    assignments = [
        HostAssignment(0, "a", "10.0.0.1", (0, 1), (0, 1)),
        HostAssignment(1, "b", "10.0.0.2", (2, 3), (0, 1)),
    ]
    assert table_digest(assignments) == table_digest(tuple(assignments)) != table_digest(assignments[:1])
    assert table_digest([]) == ""
