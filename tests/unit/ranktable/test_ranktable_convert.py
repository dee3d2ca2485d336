"""Between dialects: ranks, ids and addresses survive, the rest is told, and nothing is made up that machines know."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from table_strategies import tables

from ranktable import (
    Device,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    build_table,
    convert_table,
    encode_table,
    parse_table,
    read_table,
    write_table,
)
from ranktable.cli import main
from ranktable.convert import write_hostfile
from ranktable.errors import BuildError
from ranktable.kinds import written_names
from ranktable.report import overview_as_json

CATALOGUE = Path(__file__).parent / "catalogue"
GOOD = [
    path.parent / name
    for path in sorted(CATALOGUE.glob("*/expected.yaml"))
    for name, expected in yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader).items()
    if expected.get("findings") == []
]
PODS = {"0": ["a"], "1": ["b"]}
FIRST = {"0": ["a"]}
IDS = {"a": ["1", "2"], "b": ["3", "4"]}
TABLE = build_table([("a", 2), ("b", 2)])
IN_PODS = convert_table(TABLE, "1.2", super_pods=PODS, super_device_ids=IDS).table


def with_devices(*devices):
    return RankTable("1.0", (Server("a", devices),))


def placements(table):
    """What every conversion must keep."""
    return sorted(
        (device.rank_id, server.server_id, device.device_id, device.device_ip or None)
        for server, device in table.placements
    )


@settings(deadline=None, max_examples=40)
@given(tables())
def test_super_pods_come_and_go_without_a_trace(table):
    ids = {server.server_id: [str(number) for number in range(len(server.devices))] for server in table.servers}
    pods = {f"p{place}": [server.server_id] for place, server in enumerate(table.servers)}
    there = convert_table(table, "1.2", super_pods=pods, super_device_ids=ids)
    read = parse_table(encode_table(there.table))
    assert (placements(read), there.notes) == (placements(table), ())
    assert [device.super_device_id for _, device in read.placements] == [n for each in ids.values() for n in each]
    back = convert_table(read, "1.0")
    assert back.table == table
    assert len(back.notes) == 2


@pytest.mark.parametrize("path", GOOD, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_good_table_of_the_catalogue_is_shown_and_converted_or_refused_in_words(path):
    table = read_table(path)
    assert len(overview_as_json(table)["servers"]) == len(table.servers)
    with suppress(RankTableError):
        assert write_hostfile(table)[0].endswith("\n")
    for to in written_names():
        with suppress(RankTableError):
            read = parse_table(encode_table(convert_table(table, to).table))
            assert read.dialect == to
            assert placements(read) == placements(table)


def test_what_only_one_dialect_says_is_listed():
    device = Device(0, 0, "10.0.0.1", "7", {"device_port": "16666", "pod_name": "p"})
    server = Server("a", (device,), "172.0.0.1", "172.1.0.1", extra={"container_ip": "172.1.0.1"})
    pods = (SuperPod("0", ("a",)),)
    table = RankTable("volcano-job", (server,), super_pods=pods, extra={"data_version": 3})
    to_1_2 = convert_table(table, "1.2")
    assert to_1_2.notes == ("data_version of the table",)
    assert to_1_2.table == RankTable("1.2", (server,), declared_server_count=1, super_pods=pods)
    to_1_0 = convert_table(to_1_2.table, "1.0")
    assert to_1_0.notes == ("super_device_id of 1 device", "super_pod_list of 1 super pod")
    assert to_1_0.table.servers[0].extra == server.extra
    assert convert_table(to_1_0.table, "1.0").table is to_1_0.table


@pytest.mark.parametrize(
    ("table", "to", "wishes", "says"),
    [
        (TABLE, "2.0", (), "nothing can be converted to 2.0; choose one of 1.0, 1.2"),
        (TABLE, "1.2", (), "does not say which servers make a super pod"),
        (TABLE, "1.2", (PODS, {}), "4 devices of the table have no super_device_id"),
        (TABLE, "1.2", ({"0": ["a", "b"], "1": ["a"]}, IDS), "it stands at super_pod_list.0..server_list.0..server_id"),
        (replace(IN_PODS, dialect="volcano-job"), "1.2", (PODS,), "leave --super_pods out"),
        (TABLE, "1.2", ({"0": ["a", "c"]}, IDS), "server_id = .c.: the id is not in server_list"),
        (TABLE, "1.2", (PODS, {"a": ["1"]}), "2 devices, but 1 super device id for them;"),
        (TABLE, "1.2", (PODS, {"c": ["1"]}), "given for 'c'"),
        (build_table([("a", 1)]), "1.2", (FIRST, {"a": ["007"]}), "the id is no decimal number of 32"),
        (with_devices(Device(0, 0, "10.1.0.1", "7")), "1.2", (FIRST, {"a": ["8"]}), "'a' has super device id 7, 8 is"),
        (RankTable("1.2", ()), "1.0", (), "no devices"),
        (with_devices(Device(0, 1)), "1.2", (), "not 0 to 0, each once; run ranktable validate"),
        (
            RankTable("mindie-global", tuple(Server(name, (Device(0, 0),), group=name) for name in "ab")),
            "1.0",
            (),
            "start again",
        ),
    ],
)
def test_what_cannot_be_known_is_refused(table, to, wishes, says):
    with pytest.raises(BuildError, match=says):
        convert_table(table, to, **dict(zip(("super_pods", "super_device_ids"), wishes, strict=False)))


@pytest.fixture
def convert(run):
    def call(*arguments):
        if not Path("t.json").exists():
            write_table("t.json", TABLE)
        return run("convert", *arguments)

    return call


def test_the_command_writes_another_dialect_and_says_what_changed(convert):
    Path("ids.yaml").write_text("a: [4294967295, 0]\nb: [2, 3]\n")
    words = ["t.json", "--to", "1.2", "--super_pods", "0=a,b", "--super-device-ids", "ids.yaml"]
    assert convert(*words, "--device_target", "cpu", "-o", "u.json") == (
        0,
        "",
        "ranktable: wrote u.json: 2 servers, 4 devices\n",
    )
    status, out, err = convert("u.json", "--to", "1.0", "--device_target", "cpu")
    assert (status, out) == (0, Path("t.json").read_text())
    assert err.splitlines() == [
        "ranktable: left out: super_device_id of 4 devices",
        "ranktable: left out: super_pod_list of 1 super pod",
    ]
    status, out, err = convert("u.json", "--to", "1.0", "--strict", "-o", "v.json")
    assert (status, out) == (1, "")
    assert err.endswith("ranktable: nothing is written, because of --strict\n")
    assert not Path("v.json").exists()
    words[4:5] = ["0=a;1=b"]
    assert "the new table has 4 errors (R16), first server_list[0].device[0].device_ip: " in convert(*words)[2]


def test_the_command_writes_a_host_file_that_keeps_the_ranks(convert):
    assert convert("t.json", "--to", "hostfile", "--strict") == (0, "a slots=2\nb slots=2\n", "")
    assert convert("t.json", "--to", "hostfile", "-o", "hosts")[2] == "ranktable: wrote hosts\n"
    assert main(["generate", "--hostfile", "hosts", "-o", "u.json"]) == 0
    assert Path("u.json").read_text() == Path("t.json").read_text()
    write_table("t.json", RankTable("1.0", (Server("b", (Device(0, 0), Device(1, 2))), Server("a", (Device(4, 1),)))))
    status, out, err = convert("t.json", "--to", "hostfile")
    assert (status, out) == (2, "")
    assert "which the ranks of this table do not follow; merge the table alone" in err
