"""Version 2.0: to the model and back, integers in place of strings, and each limit of rule R30."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import BuildError, Device, RankTable, Server, encode_table, parse_table
from ranktable.dialects.v2_0 import check_version_2
from ranktable.kinds import Survey
from ranktable.profile import build_profile
from ranktable.reading.document import parse_document
from ranktable.tables import encode_document
from ranktable.validate import validate_document

EXTRAS = st.dictionaries(st.text(min_size=1).map(lambda key: "x_" + key), st.text() | st.integers(), max_size=2)
NUMBERS = st.integers(0, 2**32 - 1)
ADDRESSES = st.fixed_dictionaries(
    {"addr_type": st.text(), "addr": st.text(), "ports": st.lists(st.text(), max_size=2)},
    optional={"plane_id": st.text(), "backup_addr": st.lists(st.text(), max_size=2)},
)
CONTROLS = st.fixed_dictionaries({"addr_type": st.text(), "addr": st.text(), "listen_port": NUMBERS})


@st.composite
def tables(draw):
    servers = []
    for server_id in draw(st.lists(st.text(max_size=5), min_size=1, max_size=3, unique=True)):
        devices = []
        for _ in range(draw(st.integers(1, 2))):
            layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
            levels = [
                {
                    "net_layer": layer,
                    "net_instance_id": server_id if layer == min(layers) else draw(st.text(max_size=3)),
                    "rank_addr_list": draw(st.lists(ADDRESSES, max_size=1)),
                }
                for layer in layers
            ]
            control = {"control_plane": draw(CONTROLS)} if draw(st.booleans()) else {}
            extra = {"local_id": draw(NUMBERS), "level_list": levels} | control | draw(EXTRAS)
            devices.append(Device(draw(NUMBERS), draw(NUMBERS), extra=extra))
        servers.append(Server(server_id, tuple(devices)))
    return RankTable("2.0", tuple(servers), draw(st.text()), extra=draw(EXTRAS))


@settings(max_examples=30)
@given(tables())
def test_a_table_survives_both_ways(table):
    value = encode_document(table)
    assert parse_table(json.dumps(value)) == table
    assert encode_document(parse_table(encode_table(table))) == value


def address(number, kind="IPV4"):
    text = {"IPV4": f"192.168.100.{number + 10}", "IPV6": f"fd00::{number + 10:x}", "EID": f"{number:032x}"}[kind]
    return {"addr_type": kind, "addr": text, "ports": [f"0/{number}"]}


def rank(number, instance="az0-rack0"):
    levels = [
        {
            "net_layer": 0,
            "net_instance_id": instance,
            "net_type": "TOPO_FILE_DESC",
            "net_attr": "",
            "rank_addr_list": [address(number)],
        },
        {"net_layer": 1, "net_instance_id": "az0", "net_type": "CLOS", "rank_addr_list": [address(number, "EID")]},
    ]
    control = {"addr_type": "IPV6", "addr": f"fd00::{number}", "listen_port": 16666}
    return {"rank_id": number, "local_id": number, "device_id": number, "level_list": levels, "control_plane": control}


def good():
    ranks = [rank(0), rank(1), rank(2, "az0-rack1"), rank(3, "az0-rack1")]
    return {"version": "2.0", "status": "completed", "detour": "false", "rank_count": 4, "rank_list": ranks}


def findings(value):
    report = validate_document(parse_document(json.dumps(value).encode(), "t.json"), build_profile())
    return [(problem.rule, problem.severity, problem.path) for problem in report.problems]


def change(path, value):
    changed = copy.deepcopy(good())
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def test_the_ranks_of_a_sub_network_of_layer_0_are_a_server():
    table = parse_table(json.dumps(good()))
    assert [(server.server_id, server.ranks) for server in table.servers] == [
        ("az0-rack0", (0, 1)),
        ("az0-rack1", (2, 3)),
    ]
    assert table.device_of(3).extra["local_id"] == 3


def test_a_missing_status_is_written_as_completed():
    table = parse_table(json.dumps(change(("status",), None)))
    assert table.is_ready
    assert encode_document(table) == good()


LEVEL = ("rank_list", 1, "level_list", 0)
FIRST_ADDRESS = (*LEVEL, "rank_addr_list", 0)


def path_of(steps):
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def test_too_many_levels_are_refused():
    table = good()
    template = table["rank_list"][0]["level_list"][1]
    table["rank_list"][0]["level_list"] += [template | {"net_layer": layer} for layer in range(2, 9)]
    assert findings(table) == [
        ("R30", "error", "rank_list[0].level_list"),
        ("R30", "error", "rank_list[0].level_list[8].net_layer"),
    ]


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (Server("a", (Device(0, 0),)), "device 0 of server 'a' has no level_list; .* cannot be invented"),
        (
            Server("a", (Device(0, 0, extra={"level_list": [{"net_layer": 0, "net_instance_id": "b"}]}),)),
            "lowest layer of device 0 of server 'a' is in the sub-network 'b'",
        ),
        (
            Server("a", (Device(0, 0, "1.1.1.1", extra={"level_list": [{"net_layer": 0, "net_instance_id": "a"}]}),)),
            "device 0 of server 'a' has device_ip",
        ),
    ],
)
def test_what_this_version_cannot_say_is_not_written(server, says):
    with pytest.raises(BuildError, match=says):
        encode_table(RankTable("2.0", (server,)))


def test_long_lists_of_wrong_items_are_counted():
    found = findings(change((*FIRST_ADDRESS, "ports"), [0] * 1000))
    ports = path_of((*FIRST_ADDRESS, "ports"))
    assert len(found) == 102
    assert found.count(("R4", "error", ports)) == found.count(("R30", "error", ports)) == 1


def test_more_ranks_than_hccl_reads_are_refused():
    survey = Survey("", {"rank_count": 65537, "rank_list": [{}] * 65537}, dialect="2.0")
    first = next(check_version_2(survey, build_profile()))
    assert (first.path, first.message) == ("rank_count", "HCCL reads at most 65536 ranks")


def test_a_wrong_rank_count_is_kept_until_somebody_corrects_it():
    value = change(("rank_count",), 9)
    table = parse_table(json.dumps(value))
    assert table.extra["rank_count"] == 9
    assert encode_document(table) == value
    assert "rank_count" not in parse_table(json.dumps(good())).extra


@pytest.mark.parametrize(("count", "errors"), [(24, 0), (25, 2)])
def test_a_level_has_at_most_24_addresses(count, errors):
    table = good()
    for place, entry in enumerate(table["rank_list"][:2]):
        numbers = range(50 + place * 50, 50 + place * 50 + count)
        entry["level_list"][0]["rank_addr_list"] = [address(number) for number in numbers]
    assert len(findings(table)) == errors
