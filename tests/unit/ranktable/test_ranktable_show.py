"""What show prints: right for one rank, readable for 131,072; and what a file is that is no table, and why."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import Device, RankTable, Server, SuperPod, build_table, read_table, write_table
from ranktable.errors import BuildError, UnknownDialectError
from ranktable.kinds import find_near_keys
from ranktable.report import list_ranks, overview_as_json, render_overview, render_rank


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
    servers = [Server(f"node{n}", (Device(0, 2 * n, f"10.0.0.{n}"), Device(1, 2 * n + 1))) for n in range(100)]
    value = overview_as_json(RankTable("1.2", tuple(servers), super_pods=(SuperPod("8", ("node50", "node99")),)))
    assert value["servers"][99] == {
        "server_id": "node99",
        "node_rank": 99,
        "ranks": [198, 199],
        "device_ids": [0, 1],
        "device_ips": ["10.0.0.99", None],
        "super_pod_id": "8",
        **dict.fromkeys(("host_ip", "pod_ip", "group")),
    }
    assert value["super_pods"] == [{"super_pod_id": "8", "servers": ["node50", "node99"]}]


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
def show(run):
    def call(*arguments):
        if not Path("t.json").exists():
            write_table("t.json", build_table([("a", 2), ("b", 2)]))
        return run("show", "t.json", *arguments)

    return call


def test_the_command_prints_servers_ranks_one_rank_or_json(show):
    assert show()[1].splitlines()[-1] == "b       2-3    0-1"
    assert show("--ranks")[1].splitlines()[-1].split() == ["3", "b", "1", "-"]
    assert "server_id   b\n" in show("--rank", "3")[1]
    assert json.loads(show("--format", "json")[1])["world_size"] == 4
    assert [place["rank_id"] for place in json.loads(show("--ranks", "--format", "json")[1])] == [*range(4)]
    status, out, err = show("--rank", "0", "--ranks")
    assert (status, out, err.count("\n")) == (2, "", 1) and "exclude each other" in err


def test_a_table_in_the_making_is_shown_as_far_as_it_can_be_read(show):
    show()
    Path("t.json").write_text(Path("t.json").read_text().replace("completed", "initializing"))
    status, out, _ = show()
    assert (status, out.splitlines()[0]) == (0, "version 1.0, status initializing, 2 servers, 4 devices")
    Path("t.json").write_text('{"version": "1.0", "status": "initializing", "server_list": []}')
    assert show()[0] == 3


CATALOGUE = Path(__file__).parent / "catalogue"


def test_show_says_what_is_known_of_a_file_that_is_no_table_of_a_job(run):
    status, out, err = run("show", CATALOGUE / "not_hccl" / "tor_list.json")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].endswith("tor_list.json: a TOR list")
    assert out.splitlines()[1:] == [
        "    dialect:  tor-list",
        "    evidence: tor_ip in its devices and no rank_id",
        "    consumer: ModelArts, beside jobstart_hccl.json",
        "    advice:   it names switches, not ranks: use the file jobstart_hccl.json that stands beside it",
    ]
    status, out, _ = run("show", "--format", "json", CATALOGUE / "not_hccl" / "roles.json")
    assert (status, json.loads(out)["dialect"]) == (0, "roles")


def test_show_refuses_what_is_nothing_that_is_known(run):
    status, _, err = run("show", CATALOGUE / "not_hccl" / "near_miss.json")
    assert status == 1
    assert "rename 'serverList' to 'server_list', 'serverCount' to 'server_count'" in err


def test_misspelt_keys_are_looked_for_among_the_first_and_short_ones():
    near = find_near_keys(dict.fromkeys([f"x{number}" for number in range(98)] + ["serverlist", "y", "grouplist"]))
    assert near == {"serverlist": "server_list"}
    assert find_near_keys({"s" * 65: 1, "rankList": 1}) == {"rankList": "rank_list"}


def test_no_more_than_six_renames_are_proposed(tmp_path):
    path = tmp_path / "strange.json"
    path.write_text(json.dumps({f"serverlist{number}": 0 for number in range(9)}))
    with pytest.raises(UnknownDialectError) as caught:
        read_table(path)
    assert str(caught.value).count("to 'server_list'") == 6
