"""What is built is valid for its target and chip, in a stated order of ranks; what cannot be known is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import Device, build_table, encode_table, parse_table, validate_table
from ranktable.commands.generate import read_super_device_ids
from ranktable.errors import BuildError
from ranktable.generate import HostInventory


@pytest.mark.parametrize(
    ("order", "expected", "device_ids"),
    [
        ("server_id", ["10.0.0.10", "10.0.0.9", "node10", "node9"], [4, 5]),
        ("given", ["node9", "10.0.0.9", "node10", "10.0.0.10"], [5, 4]),
    ],
)
def test_the_order_decides_who_has_rank_zero(order, expected, device_ids):
    table = build_table([("node9", [5, 4]), ("10.0.0.9", 1), ("node10", 1), ("10.0.0.10", 1)], order=order)
    assert [server.server_id for server in table.servers] == expected
    assert [device.device_id for device in table.servers[expected.index("node9")].devices] == device_ids


@pytest.mark.parametrize(
    ("servers", "device_ips", "says"),
    [
        ([], None, "no server is given"),
        ([("a", 1), ("a", 1)], None, 'server_list[1].server_id = "a": the same server_id'),
        ([("a", 0)], None, "'a' has 0 devices"),
        ([("a", 10**9)], None, "has 1000000000 devices"),
        ([("a", [1, 1])], None, 'server_list[0].device[1].device_id = "1": the same device_id'),
        ([("a", [-1])], None, 'device_id = "-1"'),
        ([("", 1)], None, "the id is empty"),
        ([("10.*.*.*", 1)], None, "is a mask"),
        ([("a" * 65, 1)], None, "has 65 characters"),
        ([("a", 2)], {"a": ["10.0.0.1"]}, "2 devices, but 1 address for them"),
        ([("a", 1)], {"b": ["10.0.0.1"]}, "'b', which is not one of the servers"),
        ([("a", 2)], {"a": ["10.0.0.1", "10.0.0.1"]}, "the same address stands at server_list[0].device[0].device_ip"),
        ([("a", 1)], {"a": ["10.0.0.256"]}, "not an IPv4 or IPv6 address"),
    ],
)
def test_input_that_makes_no_valid_table_is_refused(servers, device_ips, says):
    with pytest.raises(BuildError) as caught:
        build_table(servers, device_ips=device_ips)
    assert says in str(caught.value)
    assert caught.value.remedy
    assert isinstance(caught.value, ValueError)


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


CHIPS = ("910a", "a2", "a3", "300i-duo")
MAX_ID = {"910a": 7, "a2": 15, "a3": 15, "300i-duo": 31}
MAX_COUNT = {"910a": 8, "a2": 16, "a3": 16, "300i-duo": 32}
QUADS = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 2, 4, 6], [1, 3, 5, 7]]
NAMES = st.from_regex(r"[a-z]{2,6}-[0-9]{1,2}", fullmatch=True) | st.integers(1, 254).map("10.0.0.{}".format)
SERVER_IDS = st.lists(NAMES, min_size=1, max_size=4, unique=True)


def hosts_with_addresses(server_ids, device_ids):
    return [
        HostInventory(name, tuple(Device(number, -1, f"172.{place}.{number}.9") for number in device_ids))
        for place, name in enumerate(server_ids)
    ]


@st.composite
def right_devices(draw, chip, num_servers):
    """Draw device ids that the chip takes on each of so many servers."""
    if chip == "910a":
        return list(range(8)) if num_servers > 1 else draw(st.sampled_from([[3], [0, 1], [5, 7], *QUADS, [*range(8)]]))
    ids = st.lists(st.integers(0, MAX_ID[chip]), min_size=1, max_size=MAX_COUNT[chip], unique=True)
    return draw(ids)


@settings(deadline=None, max_examples=60)
@given(st.data(), SERVER_IDS, st.sampled_from(CHIPS), st.sampled_from(["server_id", "given"]))
def test_what_suits_a_chip_is_built_and_valid(data, server_ids, chip, order):
    device_ids = data.draw(right_devices(chip, len(server_ids)))
    hosts = hosts_with_addresses(server_ids, device_ids)
    table = build_table(hosts, order=order, chip=chip, device_target="ascend")
    problems = validate_table(table, chip=chip)
    assert [problem for problem in problems if problem.is_error] == []
    if order == "server_id":
        assert not {problem.rule for problem in problems} & {"R10", "R11", "R12"}


@settings(deadline=None, max_examples=120)
@given(
    st.data(),
    SERVER_IDS,
    st.sampled_from([None, *CHIPS]),
    st.sampled_from(["ascend", "gpu", "cpu"]),
    st.booleans(),
    st.sampled_from(["1.0", "1.2"]),
)
def test_whatever_is_asked_for_is_refused_or_valid(data, server_ids, chip, target, has_addresses, version):
    ids = st.lists(st.integers(0, 35), min_size=1, max_size=9, unique=True)
    hosts = [
        HostInventory(
            name,
            tuple(
                Device(number, -1, f"172.{place}.{number}.9" if has_addresses else None, str(place * 64 + number))
                for number in data.draw(ids)
            ),
            super_pod_id=data.draw(st.sampled_from(["0", "1", None])),
        )
        for place, name in enumerate(server_ids)
    ]
    options = {"device_target": target, "chip": chip if target == "ascend" else None}
    try:
        table = build_table(hosts, version=version, **options)
    except BuildError as error:
        assert error.remedy
        return
    assert not [problem for problem in validate_table(table, **options) if problem.is_error]
    assert parse_table(encode_table(table)) == table


def test_tables_without_ascend_have_host_ip_and_no_device_ip():
    for server in build_table([("10.0.0.1", 2), ("node-1", 2)], device_target="gpu").servers:
        assert server.host_ip == (server.server_id if server.server_id == "10.0.0.1" else None)
        assert all(device.device_ip is None for device in server.devices)


@pytest.mark.parametrize(
    ("servers", "options", "says"),
    [
        (hosts_with_addresses("a", [0, 1, 2]), {"chip": "910a"}, "a 910A takes 1, 2, 4 or 8 devices (R17 for 910a"),
        ([("a", 3)], {"chip": "910a"}, " and 3 more of R16, R17)"),
        ([("a", 1)], {"device_target": "ascend", "chip": "300i-duo"}, "(R16 for 300i-duo"),
        ([("10.0.0.1", 1), ("fe80::1", 1)], {"device_target": "cpu"}, "the other host addresses are"),
        ([("a", 1)], {"chip": "a5"}, "for a5"),
        (hosts_with_addresses("a", [0]), {"device_target": "gpu"}, "only Ascend devices have a network port"),
    ],
)
def test_what_validation_would_find_is_refused_with_its_rule(servers, options, says):
    with pytest.raises(BuildError) as caught:
        build_table(servers, **options)
    assert says in str(caught.value)


def pods(*entries):
    """Return hosts of two devices: (server id, super pod id, first SDID)."""
    return [
        HostInventory(
            name,
            tuple(Device(number, -1, None, None if first is None else str(first + number)) for number in (0, 1)),
            super_pod_id=pod_id,
        )
        for name, pod_id, first in entries
    ]


def test_super_pods_are_listed_in_the_order_of_their_ranks():
    table = build_table(pods(("c", "0", 0), ("a", "1", 0), ("b", "1", 4)), version="1.2")
    assert [(pod.super_pod_id, pod.server_ids) for pod in table.super_pods] == [("1", ("a", "b")), ("0", ("c",))]
    assert [device.super_device_id for _, device in table.placements] == ["0", "1", "4", "5", "0", "1"]
    assert table.dialect == "1.2"


@pytest.mark.parametrize(
    ("entries", "super_pods", "says"),
    [
        ([("a", None, 0)], None, "no super pod of the servers is known, which version 1.2 lists; give --super_pods"),
        ([("a", "0", None)], None, "the key is missing; a table with super_pod_list needs it (R24"),
        ([("a", "0", 0), ("b", "0", 1)], None, "the same super_device_id stands at server_list[0]"),
        ([("a", "0", 2**32 - 1)], None, '"4294967296": the id is no decimal number of 32 bits'),
        ([("a", "p" * 128, 0)], None, "the id is not of 1 to 127 characters (R25)"),
        ([("a", "0", 0)], {"1": ["a"]}, "server 'a' is assigned to super pod '1', but it says '0'"),
        ([("a", None, 0)], {"1": ["a", "z"]}, "the id is not in server_list (R25)"),
    ],
)
def test_super_pods_that_cannot_be_known_are_refused(entries, super_pods, says):
    with pytest.raises(BuildError) as caught:
        build_table(pods(*entries), version="1.2", super_pods=super_pods)
    assert says in str(caught.value)
    assert caught.value.remedy
