"""Between dialects: ranks, ids and addresses survive, the rest is told, and nothing is made up that machines know.
One table out of several: nothing twice, a stated order, and the parts of a table give it back."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_tables import CATALOGUE, GOOD

from ranktable import (
    Device,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    build_table,
    convert_table,
    encode_table,
    merge_tables,
    parse_table,
    read_table,
    validate_table,
    write_table,
)
from ranktable.cli import main
from ranktable.convert import write_hostfile
from ranktable.errors import (
    BuildError,
    InvalidTableError,
    MergeError,
    NotReadyError,
    UnknownDialectError,
    UnsupportedDialectError,
)
from ranktable.kinds import detect_dialect, dialect_of, written_names
from ranktable.report import overview_as_json
from ranktable.tables import encode_document
from ranktable.values import render_json

SERVER_IDS = st.sampled_from([*(f"10.0.0.{number}" for number in (1, 2, 9, 10, 11)), "node9", "node10", "a", "b"])
EXTRAS = st.dictionaries(
    st.sampled_from(["hardware_type", "note", "zz"]),
    st.sampled_from(["x", "y", 1, True, 1.0, [1, {"k": None}]]),
    max_size=2,
)


@st.composite
def tables(draw, dialect="1.0"):
    """Return a table of distinct servers, device ids, addresses and ranks 0 to n-1, which stand anywhere."""
    server_ids = draw(st.lists(SERVER_IDS, min_size=1, max_size=5, unique=True))
    device_ids = [draw(st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True)) for _ in server_ids]
    size = sum(map(len, device_ids))
    ranks = iter(draw(st.permutations(range(size))))
    has_ips = draw(st.booleans())
    has_pods = dialect == "1.2"
    number = iter(range(1, size + 1))
    servers = tuple(
        Server(
            server_id,
            tuple(
                Device(
                    device_id,
                    next(ranks),
                    f"192.168.1.{place}" if has_ips else None,
                    str(place) if has_pods else None,
                    draw(EXTRAS),
                )
                for device_id, place in zip(ids, number, strict=False)
            ),
            draw(st.none() | st.just("10.9.9.9")),
            extra=draw(EXTRAS),
        )
        for server_id, ids in zip(server_ids, device_ids, strict=True)
    )
    pods = draw(_super_pods(server_ids)) if has_pods else ()
    return RankTable(dialect, servers, declared_server_count=len(servers), super_pods=pods, extra=draw(EXTRAS))


@st.composite
def _super_pods(draw, server_ids):
    """Return pods that hold every server once, in the order of the list."""
    pod_of = [draw(st.integers(0, 2)) for _ in server_ids]
    members = {}
    for server_id, pod in zip(server_ids, pod_of, strict=True):
        members.setdefault(pod, []).append(server_id)
    return tuple(SuperPod(str(pod), tuple(names), draw(EXTRAS)) for pod, names in members.items())


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


WRITTEN = st.sampled_from(["1.0", "1.2"])


def parts_of(table):
    """Return a table for each server, with its super pod and the ranks that it has."""
    for server in table.servers:
        pods = [pod for pod in table.super_pods if server.server_id in pod.server_ids]
        yield replace(
            table,
            servers=(server,),
            declared_server_count=None if table.declared_server_count is None else 1,
            super_pods=tuple(replace(pod, server_ids=(server.server_id,)) for pod in pods),
        )


@pytest.mark.parametrize("path", sorted(CATALOGUE.rglob("good_*.json")), ids=lambda path: path.stem)
def test_the_parts_of_a_good_table_give_it_back_or_are_refused_in_words(path):
    table = read_table(path)
    if table.dialect not in written_names():
        with pytest.raises(BuildError, match=r"cannot be merged; convert it to one of 1\.0, 1\.2 first"):
            merge_tables([table])
        return
    assert encode_table(merge_tables(parts_of(table)).table) == encode_table(table)


@settings(max_examples=25)
@given(WRITTEN.flatmap(tables), st.data())
def test_the_order_of_the_arguments_does_not_matter_to_the_order_of_the_ids(table, data):
    parts = list(parts_of(table))
    merged, other = (merge_tables(mixed).table for mixed in (parts, data.draw(st.permutations(parts))))
    assert merged == other
    assert [rank for server in merged.servers for rank in sorted(server.ranks)] == list(range(table.world_size))
    assert not [problem for problem in validate_table(merged, device_target="cpu") if problem.is_error]
    assert [server.server_id for server in merged.servers] == sorted(server.server_id for server in table.servers)


@settings(max_examples=25)
@given(WRITTEN.flatmap(tables), WRITTEN.flatmap(tables), st.sampled_from(["server_id", "argument"]))
def test_any_tables_give_a_table_or_an_error_of_ours(first, second, order):
    try:
        merge_tables([first, second], order=order)
    except RankTableError as error:
        assert "\n" not in str(error)


ONES = [build_table([(name, 2)]) for name in ("10.0.0.10", "10.0.0.9", "10.0.0.11")]


def test_within_a_table_the_order_of_its_ranks_is_kept():
    """The file lists the server of the ranks 2 and 3 first, and the devices of a server in any order."""
    table = RankTable("1.0", (Server("b", (Device(0, 3), Device(1, 2))), Server("a", (Device(0, 0), Device(1, 1)))))
    merged = merge_tables([build_table([("z", 1)]), table], order="argument").table
    ranks = {(server.server_id, device.device_id): device.rank_id for server, device in merged.placements}
    assert ranks == {("z", 0): 0, ("a", 0): 1, ("a", 1): 2, ("b", 1): 3, ("b", 0): 4}


A, B = build_table([("a", 2)]), build_table([("b", 1)])
CROSSED = RankTable("1.0", (Server("a", (Device(0, 1), Device(1, 2))), Server("b", (Device(0, 0), Device(1, 3)))))


@pytest.mark.parametrize(
    ("given_tables", "order", "says", "says_not"),
    [
        (ONES, "server_id", "servers follow the string order of their ids; rank 0 is on 10.0.0.10", "R11"),
        (ONES, "argument", "warning: R11: server_list[2].server_id", "string order of their ids;"),
        (ONES, "server_id", "table 2: its ranks 0-1 are 4-5 now", "in another order"),
        (ONES[:1], "server_id", "", "rank 0"),
        ([CROSSED], "server_id", "table 1: its ranks 0-3 are 0-3 now, in another order", "warning"),
        ([replace(A, declared_server_count=5), B], "server_id", "said server_count 5 and lists 1 server", "R11"),
    ],
)
def test_the_order_and_what_is_odd_are_said(given_tables, order, says, says_not):
    notes = "\n".join(merge_tables(given_tables, order=order).notes)
    assert says in notes
    assert says_not not in notes


def test_a_table_that_is_not_completed_is_merged_on_demand_only():
    waiting = replace(ONES[1], status="initializing")
    with pytest.raises(NotReadyError, match="table 2 is not ready"):
        merge_tables([ONES[0], waiting])
    merged = merge_tables([ONES[0], waiting], allow_initializing=True)
    assert merged.table.status == "initializing"
    assert 'the status is "initializing": that of table 2 is not "completed"' in merged.notes


@pytest.mark.parametrize(
    ("given_tables", "options", "says"),
    [
        ([], {}, "no table is given"),
        (ONES, {"order": "random"}, "order 'random' is not known; choose one of server_id, argument"),
        ([RankTable("1.0", ())], {}, "table 1 lists no device"),
    ],
)
def test_a_wish_without_a_meaning_is_refused(given_tables, options, says):
    with pytest.raises(BuildError) as caught:
        merge_tables(given_tables, **options)
    assert says in str(caught.value)
    assert caught.value.remedy


IPS = [
    build_table([(name, 2)], device_ips={name: [f"10.1.{place}.1", f"10.1.{place}.2"]})
    for place, name in enumerate("ab")
]


def with_ip(table, address):
    (server,) = table.servers
    return replace(table, servers=(replace(server, devices=(replace(server.devices[0], device_ip=address),)),))


def with_server(server_id, *devices):
    return replace(IPS[1], servers=(Server(server_id, devices),))


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([IPS[0]], ["y0: server a stands in x already"]),
        (
            [with_ip(IPS[1], "10.1.0.2")],
            ['y0: server b: server_list[1].device[0].device_ip = "10.1.0.2": the same address stands at'],
        ),
        ([replace(IPS[1], dialect="1.2")], ["y0: its dialect is 1.2, that of x is 1.0"]),
        ([with_server("b", Device(0, 0), Device(1, 0))], ["y0: device 1 of server b has rank 0"]),
        ([with_ip(IPS[1], "fe80::1")], ["y0: server b: server_list[1].device[0].device_ip", "IPv4 (R15)"]),
        ([with_ip(IPS[1], None)], ["y0: server b: server_list[1].device[0].device_ip: the device has no address"]),
        (
            [replace(IPS[1], extra={"k": 1}), replace(build_table([("c", 1)]), extra={"k": True})],
            ["y1: k is not what y0 says"],
        ),
    ],
)
def test_what_cannot_stand_in_one_table_is_told_with_its_file(others, says):
    names = ["x", *(f"y{place}" for place in range(len(others)))]
    with pytest.raises(MergeError) as caught:
        merge_tables([IPS[0], *others], names=names)
    assert caught.value.exit_code == 1
    for part in says:
        assert part in "\n".join(caught.value.conflicts)


def test_tables_of_hosts_with_many_cores_are_merged_for_their_target():
    many = [build_table([(name, 64)]) for name in ("a", "b")]
    with pytest.raises(MergeError, match="highest device number is 31"):
        merge_tables(many)
    assert merge_tables(many, device_target="cpu").table.world_size == 128


def in_pod(server_id, super_device_ids=("0", "1"), pod_id="0", **extra):
    devices = tuple(Device(n, n, None, sdid) for n, sdid in enumerate(super_device_ids))
    pod = SuperPod(pod_id, (server_id,), extra)
    return RankTable("1.2", (Server(server_id, devices),), declared_server_count=1, super_pods=(pod,))


def test_super_pods_of_equal_ids_are_joined():
    merged = merge_tables([in_pod("a"), in_pod("b", ("2", "3")), in_pod("c", pod_id="1")])
    assert [(pod.super_pod_id, pod.server_ids) for pod in merged.table.super_pods] == [("0", ("a", "b")), ("1", ("c",))]
    with pytest.raises(MergeError, match=r"table 2: server b: .* the same super_device_id stands at"):
        merge_tables([in_pod("a"), in_pod("b")])
    with pytest.raises(MergeError, match="super pod '0' has other keys than in table 1"):
        merge_tables([in_pod("a"), in_pod("b", ("2", "3"), note=1)])


def test_super_pods_whose_servers_are_torn_apart_by_the_order_are_warned_of():
    parts = [in_pod("a"), in_pod("b", pod_id="1"), in_pod("c", ("2", "3"))]
    assert any("R26" in note for note in merge_tables(parts).notes)
    adjacent = merge_tables([parts[1], parts[2], parts[0]], order="argument")
    assert [pod.server_ids for pod in adjacent.table.super_pods] == [("b",), ("c", "a")]


def write(name, hosts):
    """Write a table and return its text."""
    text = encode_table(build_table(hosts))
    Path(name).write_text(text)
    return text


def test_merge_prints_and_says_its_order(run):
    write("b.json", [("10.0.0.9", 1)])
    write("a.json", [("10.0.0.10", 1)])
    for options, ids, says in (
        ([], ["10.0.0.10", "10.0.0.9"], "the string order of their ids; rank 0 is on 10.0.0.10"),
        (["--order", "argument"], ["10.0.0.9", "10.0.0.10"], "the order of the arguments"),
    ):
        status, out, err = run("merge", "b.json", "a.json", *options)
        assert status == 0
        assert [server["server_id"] for server in json.loads(out)["server_list"]] == ids
        assert f"ranktable: servers follow {says}" in err


def test_merge_lists_conflicts_and_leaves_the_file_that_is_there(run):
    write("a.json", [("a", 1), ("b", 1)])
    Path("m.json").write_text("mine")
    status, out, err = run("merge", "a.json", "a.json", "-o", "m.json")
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        "ranktable: error: a.json: server a stands in a.json already; leave one out",
        "ranktable: error: a.json: server b stands in a.json already; leave one out",
        "ranktable: nothing is written",
    ]
    assert Path("m.json").read_text() == "mine"
    write("many.json", [(f"n{number}", 1) for number in range(30)])
    assert "ranktable: and 10 more\n" in run("merge", "many.json", "many.json")[2]


# -- dialects: known by their keys; a table is read back as it was written, and what has no place is refused ----------

HERE = Path(__file__).parent
FILES = sorted([*HERE.glob("changes/*.json"), *HERE.glob("catalogue/*/good_*.json")])
ONE = {"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}
DIALECTS = [
    ({"version": "1.0", "server_list": [ONE]}, "1.0"),
    ({"server_list": [ONE]}, "1.0"),
    ({"version": "1.0", "server_list": [ONE], "super_pod_list": []}, "1.0"),
    ({"version": "1.0", "server_list": [ONE], "cluster_list": [{"server_list": []}]}, "cross-cluster"),
    ({"version": "1.2", "server_list": [ONE]}, "1.2"),
    ({"version": "1.2", "server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}, "local-comm-res"),
    ({"version": "1.2", "server_list": [{"server_id": "a", "device": [{"rankId": "0"}]}]}, "1.2"),
    ({"version": "1.3", "endpoint_list": []}, "local-comm-res"),
    ({"version": "1.3", "server_list": [ONE], "data_version": 2}, "volcano-job"),
    ({"version": "1.4", "server_list": [ONE], "cluster_list": []}, "volcano-global"),
    ({"version": "1.1", "node_list": [{"ranks": []}]}, "1.1"),
    ({"version": "2.0", "rank_count": 1, "rank_list": [{"level_list": [{"net_layer": 0}]}]}, "2.0"),
    ({"version": "2.0", "rank_list": [{"level_list": [{"fabric_type": "x"}]}]}, "2.0-draft"),
    ({"version": "2.0", "server_list": [ONE], "oxc_group_list": []}, "2.0-oxc"),
    ({"group_list": [{"instance_list": []}]}, "template2-cloud"),
    ({"group_list": [], "board_id": "0x0000", "deploy_mode": "lab"}, "template2-lab"),
    ({"group_list": [{"instance_list": [{"rank_id": "0"}]}]}, "template2-lab"),
    ({"group_list": [{"instance_list": [{"rank_id": "0", "pod_name": "p"}]}]}, "template2-cloud"),
    ({"group_list": [], "board_id": "0x0000"}, "template2-cloud"),
    ({"version": "1.1", "node_list": [{"rank_list": []}]}, "1.1"),
    ({"Servers": [], "Clients": []}, "roles"),
    ({"version": "1.0", "server_group_list": []}, "mindie-global"),
    ({"version": "1.2", "prefill_device_list": [], "server_list": []}, "vllm-pd"),
    ({"server_list": [{"pod_name": "p", "device": [{"tor_ip": "1.1.1.1"}]}]}, "tor-list"),
]


@pytest.mark.parametrize(("value", "name"), DIALECTS, ids=[f"{name}-{n}" for n, (_, name) in enumerate(DIALECTS)])
def test_a_dialect_is_known_by_its_keys(value, name):
    detection = detect_dialect(value)
    assert detection.dialect.name == name
    assert detection.evidence
    if dialect_of(name).schema is None:
        with pytest.raises(UnsupportedDialectError) as caught:
            parse_table(json.dumps(value), "t.json")
        assert detection.evidence in str(caught.value)
        assert caught.value.dialect in str(caught.value)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ({}, "has 'server_list' at its top"),
        ({"serverList": []}, "rename 'serverList'"),
        ({"a": 1}, "'server_list'"),
        ({"two\nlines": 1, "\x1b[31m": 2}, r'"two\nlines", "\u001b[31m"'),
    ],
)
def test_json_without_a_telling_key_is_no_rank_table(value, hint):
    with pytest.raises(UnknownDialectError) as caught:
        parse_table(json.dumps(value))
    assert hint in str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}-{path.stem}" for path in FILES])
def test_every_key_of_a_good_file_is_written_back_or_the_kind_is_only_read(path):
    table = parse_table(path.read_text(encoding="utf-8"))
    if table.dialect in written_names():
        assert json.loads(encode_table(table)) == json.loads(path.read_text(encoding="utf-8"))
    else:
        with pytest.raises(BuildError, match=r"cannot be written; convert it to one of 1\.0, 1\.2"):
            encode_table(table)


def read_base(name, **changes):
    return json.loads((HERE / "changes" / f"{name}.json").read_text()) | changes


def test_cloud_ranks_follow_server_ids_as_strings_then_device_ids_over_all_groups():
    def pod(name, server_id, *ids):
        return {"pod_name": name, "server_id": server_id, "devices": [{"device_id": str(each)} for each in ids]}

    first = [pod("p", "10.0.0.9", 1), pod("q", "10.0.0.10", 5, 2)]
    groups = [
        {"group_name": pods[0]["pod_name"], "instance_count": "1", "device_count": "1", "instance_list": pods}
        for pods in (first, [pod("r", "10.0.0.9", 0)])
    ]
    table = parse_table(json.dumps({"status": "completed", "group_count": "2", "group_list": groups}))
    ranks = {(server.server_id, device.device_id): device.rank_id for server, device in table.placements}
    assert ranks == {("10.0.0.10", 2): 0, ("10.0.0.10", 5): 1, ("10.0.0.9", 0): 2, ("10.0.0.9", 1): 3}


def test_what_the_model_says_of_each_dialect():
    pods = parse_table(json.dumps(read_base("super_pods")))
    assert [pod.super_pod_id for pod in pods.super_pods]
    assert [name for pod in pods.super_pods for name in pod.server_ids] == [each.server_id for each in pods.servers]
    version_2 = read_base("v2_0")
    del version_2["status"]
    assert parse_table(json.dumps(version_2)).is_ready
    first = parse_table(json.dumps(read_base("v2_0"))).servers[0]
    assert first.server_id == version_2["rank_list"][0]["level_list"][0]["net_instance_id"]
    service = parse_table(json.dumps(read_base("service")))
    assert {server.group for server in service.servers} >= {"2"}
    assert all(server.server_id for server in service.servers), "a coordinator goes by its server_ip"
    with pytest.raises(BuildError, match="several groups of the table have a rank 0"):
        service.server_of(0)


SERVER = Server("a", (Device(0, 0),))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (RankTable("9.9", ()), r"dialect '9\.9' is not known"),
        (RankTable("1.0", (SERVER,), super_pods=(SuperPod("0", ("a",)),)), "super pods"),
        (RankTable("1.0", (Server("a", (Device(0, 0, super_device_id="1"),)),)), "super device ids"),
    ],
)
def test_what_a_dialect_has_no_place_for_is_not_written(table, says):
    with pytest.raises(BuildError, match=says):
        encode_table(table)


def test_decoding_reports_every_fault_of_the_structure():
    with pytest.raises(InvalidTableError) as caught:
        parse_table('{"version": "1.0", "status": 1, "server_list": [{"device": [{"device_id": "x"}, 3]}]}', "t.json")
    assert [(problem.rule, problem.path) for problem in caught.value.problems] == [
        ("R4", "status"),
        ("R5", "server_list[0].server_id"),
        ("R5", "server_list[0].device[1]"),
        ("R8", "server_list[0].device[0].device_id"),
        ("R5", "server_list[0].device[0].rank_id"),
    ]
    assert "(and 4 more)" in str(caught.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=5), children, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("dialect", ["1.0", "1.2"])
def test_a_table_survives_both_ways(dialect):
    @settings(deadline=None, max_examples=40)
    @given(tables(dialect), JSON_VALUES)
    def check(drawn, extra):
        table = replace(drawn, extra={"x_1": extra}, servers=(replace(drawn.servers[0], extra={"x_2": extra}),))
        value = encode_document(table)
        assert parse_table(json.dumps(value)) == table
        assert encode_document(parse_table(encode_table(table))) == value

    check()


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_the_layout_does_not_change_the_value(value):
    assert json.loads(render_json(value)) == value
