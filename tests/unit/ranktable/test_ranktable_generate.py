"""The generator: contiguous ranks, a stated order, and a table that passes its own validation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable import build_table, validate_table
from ranktable.commands.generate import read_super_device_ids
from ranktable.errors import BuildError
from ranktable.generate import SERVER_ORDERS, default_file_name, expand_pattern

SERVER_IDS = st.from_regex(r"[a-z]{2,8}-[0-9]{1,3}", fullmatch=True) | st.ip_addresses(v=4).map(str).filter(
    lambda text: not text.startswith(("127.", "0.0.0.0"))
)
DEVICES = st.integers(1, 16) | st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True)
SERVERS = st.lists(st.tuples(SERVER_IDS, DEVICES), min_size=1, max_size=6, unique_by=lambda server: server[0])


@given(SERVERS, st.sampled_from(SERVER_ORDERS))
def test_a_generated_table_is_valid_without_accelerators(servers, order):
    assert validate_table(build_table(servers, order=order), device_target="cpu") == ()


@given(st.lists(SERVER_IDS, min_size=1, max_size=6, unique=True))
def test_a_generated_table_with_addresses_is_valid_on_ascend(server_ids):
    addresses = {
        name: [f"192.168.{place}.{device + 1}" for device in range(8)] for place, name in enumerate(server_ids)
    }
    table = build_table([(name, 8) for name in server_ids], device_ips=addresses)
    assert validate_table(table, chip="910a") == ()


@given(SERVERS, st.sampled_from(SERVER_ORDERS))
def test_ranks_are_contiguous_over_the_servers(servers, order):
    table = build_table(servers, order=order)
    assert [device.rank_id for _, device in table.placements] == list(range(table.world_size))
    assert table.declared_server_count == len(servers)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("server_id", ["10.0.0.10", "10.0.0.9", "node10", "node9"]),
        ("given", ["node9", "10.0.0.9", "node10", "10.0.0.10"]),
    ],
)
def test_the_order_decides_who_has_rank_zero(order, expected):
    table = build_table([("node9", 1), ("10.0.0.9", 1), ("node10", 1), ("10.0.0.10", 1)], order=order)
    assert [server.server_id for server in table.servers] == expected


def test_device_ids_are_sorted_unless_their_order_is_given():
    assert [device.device_id for device in build_table([("a", [5, 4])]).servers[0].devices] == [4, 5]
    assert [device.device_id for device in build_table([("a", [5, 4])], order="given").servers[0].devices] == [5, 4]


def test_addresses_go_with_the_devices_as_given():
    table = build_table([("a", [5, 4])], device_ips={"a": ["10.0.0.5", "10.0.0.4"]})
    assert [(device.device_id, device.device_ip) for device in table.servers[0].devices] == [
        (4, "10.0.0.4"),
        (5, "10.0.0.5"),
    ]


def test_no_address_is_invented():
    assert all(device.device_ip is None for _, device in build_table([("127.0.0.1", 8)]).placements)


def test_the_default_name_counts_the_devices():
    assert default_file_name(build_table([("a", 8), ("b", 8)])) == "rank_table_16pcs.json"


@pytest.mark.parametrize(
    ("servers", "device_ips", "says"),
    [
        ([], None, "no server is given"),
        ([("a", 1), ("a", 1)], None, 'server_list[1].server_id = "a": the same server_id'),
        ([("a", 0)], None, "'a' has 0 devices"),
        ([("a", -3)], None, "'a' has -3 devices"),
        ([("a", 10**9)], None, "has 1000000000 devices"),
        ([("a", [])], None, "'a' has 0 devices"),
        ([("a", [1, 1])], None, 'server_list[0].device[1].device_id = "1": the same device_id'),
        ([("a", [-1])], None, 'device_id = "-1"'),
        ([("", 1)], None, "the id is empty"),
        ([("10.*.*.*", 1)], None, "is a mask"),
        ([("<ip>", 1)], None, "is a placeholder"),
        ([("a" * 65, 1)], None, "has 65 characters"),
        ([("a", 2)], {"a": ["10.0.0.1"]}, "2 devices, but 1 address for them"),
        ([("a", 1)], {"b": ["10.0.0.1"]}, "'b', which is not one of the servers"),
        ([("a", 2)], {"a": ["10.0.0.1", "10.0.0.1"]}, "the same address stands at server_list[0].device[0].device_ip"),
        ([("a", 2)], {"a": ["10.0.0.1", "fe80::1"]}, "the other addresses are IPv4"),
        ([("a", 1)], {"a": ["10.0.0.256"]}, "not an IPv4 or IPv6 address"),
        ([("a", 1)], {"a": ["-.-.-.-"]}, "tool that could not read"),
        ([("a", 1)], {"a": ["0.0.0.0"]}, "cannot belong to a network port"),
    ],
)
def test_input_that_makes_no_valid_table_is_refused(servers, device_ips, says):
    with pytest.raises(BuildError) as caught:
        build_table(servers, device_ips=device_ips)
    assert says in str(caught.value)
    assert caught.value.remedy
    assert isinstance(caught.value, ValueError)


def test_an_unknown_order_is_refused():
    with pytest.raises(BuildError, match="order 'random' is not known; choose one of server_id, given"):
        build_table([("a", 1)], order="random")


def test_a_pattern_is_filled_for_each_device():
    filled = expand_pattern("192.168.{device+1}.{server+10}", [("a", [0, 1]), ("b", [4])])
    assert filled == {"a": ["192.168.1.10", "192.168.2.10"], "b": ["192.168.5.11"]}


@pytest.mark.parametrize("pattern", ["10.0.0.{rank}", "10.0.0.{device-1}", "10.{server.1"])
def test_an_unknown_field_of_a_pattern_is_refused(pattern):
    with pytest.raises(BuildError, match="unknown field"):
        expand_pattern(pattern, [("a", [0])])


def test_lists_are_read_from_yaml(tmp_path):
    path = tmp_path / "ips.yaml"
    path.write_text("a: [7, '8']\nb:\n  - 9\n")
    assert read_super_device_ids(str(path)) == {"a": ["7", "8"], "b": ["9"]}


@pytest.mark.parametrize("text", ["a: 10.0.0.1", "- a", "a: [1.5]", "a: [", "", "\x00", "!!python/object:os.system {}"])
def test_a_file_that_is_no_map_of_addresses_is_refused(tmp_path, text):
    path = tmp_path / "ips.yaml"
    path.write_text(text)
    with pytest.raises(BuildError, match=r"ips\.yaml"):
        read_super_device_ids(str(path))
