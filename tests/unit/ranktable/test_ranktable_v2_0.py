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


def test_a_good_table_has_no_finding():
    assert findings(good()) == []
    assert findings(change(("status",), None)) == []
    assert findings(change(("rank_list", 0, "control_plane"), None)) == []


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
EID = ("rank_list", 1, "level_list", 1, "rank_addr_list", 0)
CONTROL = ("rank_list", 1, "control_plane")


def path_of(steps):
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


BROKEN = [
    ((("version",), "1.2"), "R2", "version"),
    ((("status",), "unknown"), "R3", "status"),
    ((("rank_count",), "4"), "R4", "rank_count"),
    ((("rank_count",), 5), "R30", "rank_count"),
    ((("rank_count",), True), "R4", "rank_count"),
    ((("rank_count",), None), "R5", "rank_count"),
    ((("detour",), "yes"), "R30", "detour"),
    ((("rank_list", 1, "rank_id"), "1"), "R4", "rank_list[1].rank_id"),
    ((("rank_list", 1, "rank_id"), 1.0), "R4", "rank_list[1].rank_id"),
    ((("rank_list", 1, "rank_id"), -1), "R30", "rank_list[1].rank_id"),
    ((("rank_list", 1, "rank_id"), 0), "R30", "rank_list[1].rank_id"),
    ((("rank_list", 1, "rank_id"), 4), "R30", "rank_list[1].rank_id"),
    ((("rank_list", 1, "local_id"), 65), "R30", "rank_list[1].local_id"),
    ((("rank_list", 1, "local_id"), 64), "R30", "rank_list[1].replaced_local_id"),
    ((("rank_list", 1, "device_id"), 65), "R30", "rank_list[1].device_id"),
    ((("rank_list", 1, "device_port"), 0), "R30", "rank_list[1].device_port"),
    ((("rank_list", 1, "host_port"), 65536), "R30", "rank_list[1].host_port"),
    ((("rank_list", 1, "level_list"), []), "R5", "rank_list[1].level_list"),
    (((*LEVEL, "net_layer"), 1), "R30", "rank_list[1].level_list[1].net_layer"),
    (((*LEVEL, "net_layer"), 8), "R30", path_of((*LEVEL, "net_layer"))),
    (((*LEVEL, "net_instance_id"), ""), "R30", path_of((*LEVEL, "net_instance_id"))),
    (((*LEVEL, "net_instance_id"), "n" * 1025), "R30", path_of((*LEVEL, "net_instance_id"))),
    (((*LEVEL, "net_type"), "RING"), "R30", path_of((*LEVEL, "net_type"))),
    (((*LEVEL, "rank_addr_list"), []), "R30", path_of((*LEVEL, "rank_addr_list"))),
    (((*LEVEL, "rank_addr_list"), [address(n + 5) for n in range(25)]), "R30", path_of((*LEVEL, "rank_addr_list"))),
    (((*FIRST_ADDRESS, "addr_type"), "ipv4"), "R30", path_of((*FIRST_ADDRESS, "addr_type"))),
    (((*FIRST_ADDRESS, "addr"), "fd00::1"), "R30", path_of((*FIRST_ADDRESS, "addr"))),
    (((*FIRST_ADDRESS, "addr"), "fd00::1%" + "e" * 300), "R30", path_of((*FIRST_ADDRESS, "addr"))),
    (((*CONTROL, "addr"), "fd00::1%" + "e" * 300), "R30", path_of((*CONTROL, "addr"))),
    (((*FIRST_ADDRESS, "addr"), ""), "R30", path_of((*FIRST_ADDRESS, "addr"))),
    (((*EID, "addr"), "0" * 31), "R30", path_of((*EID, "addr"))),
    (((*EID, "addr"), "g" * 32), "R30", path_of((*EID, "addr"))),
    (((*EID, "backup_addr"), ["0" * 32]), "R30", path_of((*EID, "backup_addr"))),
    (((*FIRST_ADDRESS, "backup_addr"), ["fd00::1"]), "R30", path_of((*FIRST_ADDRESS, "backup_addr", 0))),
    (((*FIRST_ADDRESS, "backup_addr"), ["10.0.0.1"] * 17), "R30", path_of((*FIRST_ADDRESS, "backup_addr"))),
    (((*FIRST_ADDRESS, "ports"), []), "R30", path_of((*FIRST_ADDRESS, "ports"))),
    (((*FIRST_ADDRESS, "ports"), [f"0/{n}" for n in range(17)]), "R30", path_of((*FIRST_ADDRESS, "ports"))),
    (((*FIRST_ADDRESS, "ports"), [""]), "R30", path_of((*FIRST_ADDRESS, "ports", 0))),
    (((*FIRST_ADDRESS, "ports"), [3]), "R4", path_of((*FIRST_ADDRESS, "ports", 0))),
    (((*FIRST_ADDRESS, "ports"), "0/1"), "R4", path_of((*FIRST_ADDRESS, "ports"))),
    (((*FIRST_ADDRESS, "plane_id"), "p" * 1025), "R30", path_of((*FIRST_ADDRESS, "plane_id"))),
    (((*CONTROL, "addr"), "10.0.0.1"), "R30", path_of((*CONTROL, "addr"))),
    (((*CONTROL, "listen_port"), 65537), "R30", path_of((*CONTROL, "listen_port"))),
    (((*CONTROL, "listen_port"), None), "R5", path_of((*CONTROL, "listen_port"))),
    ((CONTROL, []), "R4", path_of(CONTROL)),
]


@pytest.mark.parametrize(
    ("changed", "rule", "path"), BROKEN, ids=[f"{n}-{path}" for n, (_, _, path) in enumerate(BROKEN)]
)
def test_a_broken_limit_is_found_where_it_is_broken(changed, rule, path):
    found = findings(change(*changed))
    assert (rule, "error", path) in found
    assert len([entry for entry in found if entry[1] == "error"]) <= 2


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ((*LEVEL, "net_type"), "CLOS", path_of((*LEVEL, "net_type"))),
        (("rank_list", 1, "level_list", 1, "net_type"), "2DMESH", "rank_list[1].level_list[1].net_type"),
        (("rank_list", 1, "replaced_local_id"), 10, "rank_list[1].replaced_local_id"),
        (("rank_list", 1, "local_id"), 0, "rank_list[1].local_id"),
        ((*FIRST_ADDRESS, "addr"), "192.168.100.10", path_of((*FIRST_ADDRESS, "addr"))),
    ],
)
def test_what_the_parser_lets_through_and_can_only_be_a_slip_is_a_warning(path, value, place):
    assert findings(change(path, value)) == [("R30", "warning", place)]


def test_a_port_at_either_end_is_good():
    for port in (1, 65535):
        assert findings(change(("rank_list", 1, "device_port"), port)) == []
    for port in (1, 65536):
        assert findings(change((*CONTROL, "listen_port"), port)) == []


def spare(table, place, replaced):
    table["rank_list"][place] |= {"local_id": 64, "device_id": 64, "replaced_local_id": replaced}
    return table


def test_a_spare_card_stands_in_for_one_that_has_no_rank():
    assert findings(spare(good(), 1, 1)) == []
    replaced = "rank_list[1].replaced_local_id"
    assert findings(spare(good(), 1, 0)) == [("R30", "error", replaced)]
    assert findings(spare(good(), 1, 64)) == [("R30", "error", replaced)]
    assert findings(spare(spare(good(), 1, 1), 2, 2)) == [("R30", "error", "rank_list[2].local_id")]


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


def test_port_names_have_a_length():
    for name in ("", "p" * 33):
        assert findings(change((*FIRST_ADDRESS, "ports"), ["0/1", name])) == [
            ("R30", "error", path_of((*FIRST_ADDRESS, "ports", 1)))
        ]
    assert findings(change((*FIRST_ADDRESS, "ports"), ["p" * 32])) == []


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


def test_an_integer_has_32_bits():
    place = "rank_list[1].replaced_local_id"
    assert findings(change(("rank_list", 1, "replaced_local_id"), 2**32 - 1)) == [("R30", "warning", place)]
    assert ("R30", "error", place) in findings(change(("rank_list", 1, "replaced_local_id"), 2**32))


@pytest.mark.parametrize("name", ["n", "n" * 1024])
def test_an_instance_id_of_1_to_1024_bytes_is_fine(name):
    value = good()
    for entry in value["rank_list"]:
        entry["level_list"][0]["net_instance_id"] = name
    assert [finding for finding in findings(value) if "net_instance_id" in str(finding)] == []
