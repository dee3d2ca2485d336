"""Between dialects: ranks, ids and addresses survive, the rest is told, and nothing is made up that machines know."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import (
    BuildError,
    Cluster,
    ConvertWishes,
    Device,
    Group,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    build_table,
    convert_table,
    encode_table,
    parse_table,
    read_table,
    validate_table,
    write_table,
)
from ranktable.cli import main
from ranktable.edit.convert import dialect_names, refused_names, write_hostfile
from ranktable.kinds import codec_names
from ranktable.overview import overview_as_json

CATALOGUE = Path(__file__).parent / "catalogue"
GOOD = [
    path.parent / name
    for path in sorted(CATALOGUE.glob("*/expected.yaml"))
    for name, expected in yaml.safe_load(path.read_text(encoding="utf-8")).items()
    if expected.get("findings") == []
]
ANEW = ConvertWishes(renumber=True)
PODS = ConvertWishes(super_pods=[("0", ["a"]), ("1", ["b"])], super_device_ids={"a": ["1", "2"], "b": ["1", "2"]})


def placements(table):
    """What every conversion must keep."""
    return sorted(
        (device.rank_id, server.server_id, device.device_id, device.device_ip or None)
        for server, device in table.placements
    )


@st.composite
def tables(draw):
    """Return a table with servers and devices in any order, and the ranks in any order or in that of the cloud form."""
    names = draw(st.lists(st.sampled_from(["10.0.0.9", "10.0.0.10", "node1", "node10", "a"]), min_size=1, unique=True))
    per_server = draw(st.sampled_from([1, 2, 4]))
    ids = {name: draw(st.permutations(range(8)))[:per_server] for name in names}
    keys = [(name, device_id) for name in names for device_id in ids[name]]
    order = sorted(keys) if draw(st.booleans()) else draw(st.permutations(keys))
    ranks = {key: rank for rank, key in enumerate(order)}
    has_ips = draw(st.booleans())
    servers = tuple(
        Server(
            name,
            tuple(
                Device(number, ranks[name, number], f"10.1.{number}.{place}" if has_ips else None)
                for number in ids[name]
            ),
        )
        for place, name in enumerate(names)
    )
    return RankTable("1.0", servers, declared_server_count=len(servers))


@settings(deadline=None, max_examples=60)
@given(tables())
def test_template_2_and_back_keeps_every_rank_device_and_address(table):
    converted = convert_table(table, "template2-cloud", ANEW)
    cloud = parse_table(encode_table(converted.table))
    assert converted.is_renumbered == (placements(cloud) != placements(table))
    concise = parse_table(encode_table(convert_table(cloud, "1.0").table))
    assert placements(concise) == placements(cloud)
    again = convert_table(concise, "template2-cloud")
    assert placements(parse_table(encode_table(again.table))) == placements(cloud)
    assert encode_table(again.table) == encode_table(convert_table(cloud, "template2-cloud").table)
    assert not any("pod_name" in what for what in again.invented)


@settings(deadline=None, max_examples=40)
@given(tables())
def test_without_renumbering_the_cloud_form_has_the_ranks_of_the_table_or_is_refused(table):
    implied = sorted((server.server_id, device.device_id) for server, device in table.placements)
    listed = [(server_id, device_id) for _, server_id, device_id, _ in placements(table)]
    if listed == implied:
        assert placements(convert_table(table, "template2-cloud").table) == placements(table)
    else:
        with pytest.raises(BuildError, match=r"string order of server_id, then device_id, makes it .*--renumber"):
            convert_table(table, "template2-cloud")


@settings(deadline=None, max_examples=40)
@given(tables())
def test_super_pods_come_and_go_without_a_trace(table):
    ids = {server.server_id: [str(number) for number in range(len(server.devices))] for server in table.servers}
    pods = [(f"p{place}", [server.server_id]) for place, server in enumerate(table.servers)]
    there = convert_table(table, "1.2", ConvertWishes(super_pods=pods, super_device_ids=ids))
    read = parse_table(encode_table(there.table))
    assert (placements(read), there.lost) == (placements(table), ())
    assert [device.super_device_id for _, device in read.placements] == [n for each in ids.values() for n in each]
    back = convert_table(read, "1.0")
    assert back.table == table
    assert len(back.lost) == 2


def test_what_a_conversion_makes_is_valid():
    ips = {name: [f"10.{device}.0.{place}" for device in range(8)] for place, name in enumerate("ab", 1)}
    table = build_table([("a", 8), ("b", 8)], device_ips=ips)
    sdids = {name: [str(place * 8 + device) for device in range(8)] for place, name in enumerate("ab")}
    wishes = ConvertWishes(super_pods=[("0", "ab")], super_device_ids=sdids)
    for to in dialect_names():
        assert [problem for problem in validate_table(convert_table(table, to, wishes).table) if problem.is_error] == []


def test_what_only_one_dialect_says_is_listed():
    device = Device(0, 0, "10.0.0.1", "7", {"device_port": "16666", "pod_name": "p"})
    server = Server("a", (device,), "172.0.0.1", "172.1.0.1", extra={"container_ip": "172.1.0.1"})
    pods, clusters = (SuperPod("0", ("a",)),), (Cluster("east", super_pod_ids=("0",)),)
    table = RankTable("volcano-global", (server,), super_pods=pods, clusters=clusters, extra={"data_version": 3})
    to_1_2 = convert_table(table, "1.2")
    assert to_1_2.lost == ("cluster_list (1 cluster)", "data_version of the table")
    assert to_1_2.table == RankTable("1.2", (server,), declared_server_count=1, super_pods=pods)
    to_1_0 = convert_table(to_1_2.table, "1.0")
    assert to_1_0.lost == ("super_device_id of 1 device", "super_pod_list (1 super pod)")
    assert to_1_0.table.servers[0].extra == server.extra
    cloud = convert_table(to_1_0.table, "template2-cloud")
    assert cloud.lost == (
        "host_ip of 1 server",
        "pod_ip of 1 server",
        "container_ip of 1 server",
        "device_port of 1 device",
    )
    assert cloud.invented == ("group_name hccl_world_group, HCCL's own default",)


def test_pods_are_named_by_the_order_of_the_server_ids():
    table = build_table([("b", 1), ("a", 1)], order="given")
    cloud = convert_table(table, "template2-cloud", ConvertWishes(renumber=True, group_name="job"))
    assert {s.server_id: s.devices[0].extra["pod_name"] for s in cloud.table.servers} == {"a": "pod-0", "b": "pod-1"}
    assert cloud.invented == ("pod_name of 2 servers (pod-0 to pod-1)",)
    assert cloud.is_renumbered
    assert cloud.table.groups == (Group("job"),)
    named = replace(table.servers[0], extra={"pod_name": "job-worker-0"})
    one = convert_table(replace(table, servers=(named,)), "template2-cloud")
    assert one.table.servers[0].devices[0].extra == {"pod_name": "job-worker-0"}


def test_instances_of_one_server_become_one_server():
    servers = tuple(
        Server("a", (Device(number, number, extra={"pod_name": f"p{number}"}),), group=f"g{number}")
        for number in range(2)
    )
    table = RankTable("template2-cloud", servers, groups=(Group("g0"), Group("g1")))
    (server,) = convert_table(table, "1.0").table.servers
    assert [(device.device_id, device.rank_id, device.extra["pod_name"]) for device in server.devices] == [
        (0, 0, "p0"),
        (1, 1, "p1"),
    ]


def test_an_empty_address_of_template_2_is_no_address():
    server = Server("a", (Device(0, 0, "", extra={"pod_name": "p"}),), group="g")
    table = RankTable("template2-cloud", (server,), groups=(Group("g"),))
    assert convert_table(table, "1.0").table.servers[0].devices[0].device_ip is None


def test_super_pods_that_version_1_0_keeps_unread_are_read():
    table = build_table([("a", 2), ("b", 2)])
    value = json.loads(encode_table(convert_table(table, "1.2", PODS).table))
    value["version"] = "1.0"
    unread = parse_table(json.dumps(value))
    assert unread.super_pods == ()
    assert convert_table(unread, "1.2").table == convert_table(table, "1.2", PODS).table


def wish(pods=PODS.super_pods, ids={"a": ["1", "2"], "b": ["3", "4"]}):  # noqa: B006
    return ConvertWishes(super_pods=pods, super_device_ids=ids)


@pytest.mark.parametrize(
    ("to", "wishes", "says"),
    [
        ("2.0", ANEW, "nothing can be converted to 2.0; the EIDs"),
        ("1.1", ANEW, "collective_id"),
        ("3.0", ANEW, "dialect '3.0' is not known"),
        ("template2-lab", ConvertWishes(), "the board and the chip of a lab table cannot be made up"),
        ("1.2", ConvertWishes(), "does not say which servers make a super pod"),
        ("1.2", wish(ids={}), "4 devices of the table have no super_device_id"),
        ("1.2", wish(pods=[("0", ["a"])]), "the server is in no super pod of super_pod_list"),
        (
            "1.2",
            wish(pods=[("0", ["a", "b"]), ("1", ["a"])]),
            "super pod '1': server_id = .a.: the same server stands at super pod '0'",
        ),
        ("1.2", wish(pods=[("0", ["a"]), ("0", ["b"])]), "the same super_pod_id stands at"),
        ("1.2", wish(pods=[("0", ["a", "c"])]), "super pod '0': server_id = .c.: the id is not in server_list"),
        ("1.2", wish(ids={"a": ["1"]}), "2 devices and 1 super device id;"),
        (
            "1.2",
            wish(ids={"a": ["1", "1"], "b": ["2", "3"]}),
            "device 1 of server 'a': .* the same super_device_id stands at",
        ),
        ("1.2", wish(ids={"c": ["1"]}), "given for 'c'"),
    ],
)
def test_what_cannot_be_known_is_refused(to, wishes, says):
    with pytest.raises(BuildError, match=says):
        convert_table(build_table([("a", 2), ("b", 2)]), to, wishes)


def test_another_number_than_that_of_the_table_is_refused():
    device = Device(0, 0, device_ip="10.1.0.1", super_device_id="7")
    with pytest.raises(BuildError, match="device 0 of server 'a' has super device id 7, 8 is given"):
        convert_table(RankTable("1.0", (Server("a", (device,)),)), "1.2", wish(ids={"a": ["8"]}, pods=[("0", ["a"])]))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (RankTable("1.0", ()), "no devices"),
        (RankTable("1.0", (Server("a", (Device(0, 1),)),)), "not 0 to 0, each once; run ranktable validate"),
        (RankTable("1.1", (Server("a", (Device(-1, 0),)),)), "rank 0 runs on its host"),
        (RankTable("mindie-global", (Server("a", (Device(0, 0),)), Server("b", (Device(0, 0),)))), "start again"),
    ],
)
def test_tables_that_no_dialect_can_take_are_refused(table, says):
    with pytest.raises(BuildError, match=says):
        convert_table(table, "template2-cloud", ANEW)


def test_a_taken_pod_name_and_a_second_group_name_are_refused():
    server = Server("a", (Device(0, 0, extra={"pod_name": "pod-0"}),))
    table = RankTable("1.0", (server, Server("b", (Device(0, 1),))))
    with pytest.raises(BuildError, match="pod-0 is taken"):
        convert_table(table, "template2-cloud")
    job = replace(convert_table(build_table([("a", 2), ("b", 2)]), "1.2", PODS).table, dialect="volcano-job")
    with pytest.raises(BuildError, match="leave --super_pods out"):
        convert_table(job, "1.2", PODS)


def test_a_table_in_its_own_dialect_is_left_as_it_is():
    table = build_table([("a", 1)])
    assert convert_table(table, "1.0").table is table


def test_every_dialect_is_written_or_refused_in_words():
    assert {*dialect_names(), *refused_names()} == set(codec_names())


@pytest.mark.parametrize("path", GOOD, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_good_table_of_the_catalogue_is_shown_and_converted_or_refused_in_words(path):
    table = read_table(path)
    assert len(overview_as_json(table)["servers"]) == len(table.servers)
    with suppress(RankTableError):
        assert write_hostfile(table, renumber=True)[0].endswith("\n")
    for to in codec_names():
        with suppress(RankTableError):
            converted = convert_table(table, to, ANEW)
            read = parse_table(encode_table(converted.table))
            assert read.dialect == to
            assert converted.is_renumbered or placements(read) == placements(table)


@pytest.mark.parametrize("number", ["x", "4294967296", "-1", "007", ""])
def test_wrong_super_device_ids_are_refused(number):
    table = build_table([("a", 1)])
    with pytest.raises(BuildError, match=r"the id is (?:empty|no decimal number of 32 bits)"):
        convert_table(table, "1.2", ConvertWishes(super_pods=[("0", ["a"])], super_device_ids={"a": [number]}))


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table("t.json", build_table([("a", 2), ("b", 2)]))

    def call(*arguments):
        status = main(["convert", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_command_writes_another_dialect_and_says_what_changed(run):
    Path("ids.yaml").write_text("a: [4294967295, 0]\nb: [2, 3]\n")
    words = ["t.json", "--to", "1.2", "--super_pods", "0=a,b", "--super-device-ids", "ids.yaml"]
    assert run(*words, "--device_target", "cpu", "-o", "u.json") == (
        0,
        "",
        "ranktable: wrote u.json: 2 servers, 4 devices\n",
    )
    status, out, err = run("u.json", "--to", "1.0", "--device_target", "cpu")
    assert (status, out) == (0, Path("t.json").read_text())
    assert err.splitlines() == [
        "ranktable: left out: super_device_id of 4 devices",
        "ranktable: left out: super_pod_list (1 super pod)",
    ]
    status, out, err = run("u.json", "--to", "1.0", "--strict", "-o", "v.json")
    assert (status, out) == (1, "")
    assert err.endswith("ranktable: nothing is written, because of --strict\n")
    assert not Path("v.json").exists()


def test_the_command_says_which_rules_the_new_table_breaks(run):
    Path("ids.yaml").write_text("a: [0, 1]\nb: [2, 3]\n")
    words = ["t.json", "--to", "1.2", "--super_pods", "0=a", "--super_pods", "1=b", "--super_device_ids", "ids.yaml"]
    status, _, err = run(*words, "-o", "u.json")
    assert status == 0
    assert "the new table has 4 errors (R16), first server_list[0].device[0].device_ip: " in err


def test_the_command_writes_a_host_file_that_keeps_the_ranks(run):
    assert run("t.json", "--to", "hostfile", "--strict") == (0, "a slots=2\nb slots=2\n", "")
    assert run("t.json", "--to", "hostfile", "-o", "hosts")[2] == "ranktable: wrote hosts\n"
    assert main(["generate", "--hostfile", "hosts", "-o", "u.json"]) == 0
    assert Path("u.json").read_text() == Path("t.json").read_text()
    servers = (Server("b", (Device(0, 0), Device(1, 2))), Server("a", (Device(4, 1),)))
    write_table("t.json", RankTable("1.0", servers))
    status, out, err = run("t.json", "--to", "hostfile")
    assert (status, out) == (2, "")
    assert "which the ranks of this table do not follow; give --renumber" in err
    status, out, err = run("t.json", "--to", "hostfile", "--renumber")
    assert (status, out) == (0, "b slots=2\na slots=1\n")
    assert "left out: device_id of the devices of 1 server" in err
    assert "numbered anew, host by host" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "1.0", "--group_name", "g"], "--group_name means nothing to 1.0, only to template2-cloud"),
        (["--to", "hostfile", "--super_pods", "0=a"], "--super_pods means nothing to hostfile, only to 1.2"),
        (["--to", "2.0"], "nothing can be converted to 2.0"),
        (["--to", "nothing"], "'nothing' is not one of"),
        (["--to", "1.2", "--super_pods", "a"], "has no id before its hosts"),
        (["--to", "hostfile", "-o", "no/where"], "create the folder no first"),
    ],
)
def test_wrong_usage_is_said_in_one_line(run, arguments, says):
    status, out, err = run("t.json", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_help_lists_every_format(run):
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert all(name in " ".join(out.split()) for name in (*dialect_names(), "hostfile"))
