"""What show prints: right for one rank, readable for 131,072."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import Device, RankTable, Server, SuperPod, build_table, write_table
from ranktable.cli import main
from ranktable.errors import BuildError
from ranktable.report import (
    list_ranks,
    overview_as_json,
    render_overview,
    render_rank,
)


def table_of(*ips_by_server, **rest):
    """Return a table whose servers have devices with these addresses."""
    rank = iter(range(10**6))
    servers = (
        Server(f"node{number}", tuple(Device(device_id, next(rank), ip) for device_id, ip in enumerate(ips)))
        for number, ips in enumerate(ips_by_server)
    )
    return RankTable(rest.pop("dialect", "1.0"), tuple(servers), **rest)


def pods(number_of_servers=4):
    servers = [[f"10.{device}.0.{i + 1}" for device in range(2)] for i in range(number_of_servers)]
    half = number_of_servers // 2
    names = [f"node{i}" for i in range(number_of_servers)]
    super_pods = (SuperPod("7", tuple(names[:half])), SuperPod("8", tuple(names[half:])))
    return table_of(*servers, dialect="1.2", super_pods=super_pods)


def test_a_line_per_server_in_the_order_of_rank():
    table = build_table([("b", 2), ("a", [4, 5])], device_ips={"b": ["10.0.0.1", "10.1.0.1"]}, order="given")
    assert render_overview(table).splitlines() == [
        "version 1.0, status completed, 2 servers, 4 devices",
        "",
        "server  ranks  devices  device_ip",
        "b       0-1    0-1      10.0.0.1, 10.1.0.1",
        "a       2-3    4-5      -, -",
    ]


def test_a_rank_is_described_with_all_that_is_known_of_it():
    server = Server("b", (Device(4, 2), Device(3, 1, "10.0.0.3", "77")), "172.0.0.1")
    table = RankTable("1.2", (server, Server("a", (Device(0, 0),))), super_pods=(SuperPod("5", ("b",)),))
    (found,) = list_ranks(table, 1)
    assert render_rank(found).splitlines() == [
        "rank_id          1",
        "server_id        b",
        "node_rank        1",
        "local_rank       0",
        "device_id        3",
        "device_ip        10.0.0.3",
        "super_device_id  77",
        "host_ip          172.0.0.1",
        "super_pod_id     5",
    ]
    with pytest.raises(BuildError, match="no device of the table has rank 9"):
        list_ranks(table, 9)


def test_ranks_that_start_again_in_every_group_are_all_told():
    servers = tuple(Server(name, (Device(0, 0),), group=name) for name in "ba")
    table = RankTable("mindie-global", servers)
    assert [row["server_id"] for row in list_ranks(table, 0)] == ["b", "a"]


def test_the_object_for_programs_has_every_server():
    table = pods(100)
    value = overview_as_json(table)
    assert len(value["servers"]) == 100
    assert value["servers"][99] == {
        "server_id": "node99",
        "node_rank": 99,
        "ranks": [198, 199],
        "device_ids": [0, 1],
        "device_ips": ["10.0.0.100", "10.1.0.100"],
        "host_ip": None,
        "pod_ip": None,
        "super_pod_id": "8",
        "group": None,
    }
    assert value["super_pods"][1]["servers"][0] == "node50"


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=12), st.none() | st.text(max_size=12))
def test_any_name_makes_lines(name, address):
    server = Server(name, (Device(0, 0, address),), host_ip=address)
    table = RankTable("1.2", (server,), status=name, super_pods=(SuperPod(name, (name,)),))
    for line in [*render_overview(table).split("\n"), *render_rank(list_ranks(table, 0)[0]).split("\n")]:
        assert line.isascii()
        assert line.isprintable()


def test_a_table_without_servers_is_a_heading():
    assert render_overview(RankTable("1.0", ())) == "version 1.0, status completed, 0 servers, 0 devices"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table("t.json", build_table([("a", 2), ("b", 2)]))

    def call(*arguments):
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_command_prints_servers_ranks_one_rank_or_json(run):
    assert run("show", "t.json")[1].splitlines()[-1] == "b       2-3    0-1"
    assert run("show", "t.json", "--ranks")[1].splitlines()[-1].split() == ["3", "b", "1", "-"]
    assert "server_id   b\n" in run("show", "t.json", "--rank", "3")[1]
    assert json.loads(run("show", "t.json", "--format", "json")[1])["world_size"] == 4
    assert [place["rank_id"] for place in json.loads(run("show", "t.json", "--ranks", "--format", "json")[1])] == [
        *range(4)
    ]
    assert json.loads(run("show", "t.json", "--rank", "2", "--format", "json")[1])[0]["node_rank"] == 1


def test_a_table_in_the_making_is_shown_as_far_as_it_can_be_read(run):
    Path("t.json").write_text(Path("t.json").read_text().replace("completed", "initializing"))
    status, out, _ = run("show", "t.json")
    assert (status, out.splitlines()[0]) == (0, "version 1.0, status initializing, 2 servers, 4 devices")
    Path("t.json").write_text('{"version": "1.0", "status": "initializing", "server_list": []}')
    assert run("show", "t.json")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rank", "9"], "no device of the table has rank 9"),
        (["--rank", "0", "--ranks"], "exclude each other"),
    ],
)
def test_wrong_usage_is_said_in_one_line(run, arguments, says):
    status, out, err = run("show", "t.json", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err
