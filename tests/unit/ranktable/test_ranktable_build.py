"""What is built for a target or a chip breaks none of its rules; what cannot be known is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import Device, build_table, encode_table, parse_table, validate_table
from ranktable.errors import BuildError
from ranktable.generate import HostInventory

CHIPS = ("910a", "a2", "a3", "300i-duo")
MAX_ID = {"910a": 7, "a2": 15, "a3": 15, "300i-duo": 31}
MAX_COUNT = {"910a": 8, "a2": 16, "a3": 16, "300i-duo": 32}
QUADS = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 2, 4, 6], [1, 3, 5, 7]]
NAMES = st.from_regex(r"[a-z]{2,6}-[0-9]{1,2}", fullmatch=True) | st.integers(1, 254).map("10.0.0.{}".format)
SERVER_IDS = st.lists(NAMES, min_size=1, max_size=4, unique=True)


def errors_of(table, **options):
    return [problem.rule for problem in validate_table(table, **options) if problem.is_error]


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
    assert errors_of(table, **options) == []
    assert parse_table(encode_table(table)) == table


@settings(deadline=None, max_examples=40)
@given(SERVER_IDS, st.sampled_from(["gpu", "cpu"]), st.integers(1, 12))
def test_tables_without_ascend_have_host_ip_and_no_device_ip(server_ids, target, count):
    table = build_table([(name, count) for name in server_ids], device_target=target)
    assert validate_table(table, device_target=target) == ()
    for server in table.servers:
        assert server.host_ip == (server.server_id if server.server_id.startswith("10.") else None)
        assert all(device.device_ip is None for device in server.devices)


@pytest.mark.parametrize(
    ("servers", "options", "says"),
    [
        (
            hosts_with_addresses("a", [0, 1, 2]),
            {"chip": "910a"},
            "server_list[0].device: the server has 3 devices; a 910A takes 1, 2, 4 or 8 devices (R17 for 910a",
        ),
        (hosts_with_addresses("a", [0, 1, 2, 5]), {"chip": "910a"}, "(R19 for 910a"),
        ([("a", [8])], {"chip": "910a"}, "(R8 for 910a"),
        ([("a", 3)], {"chip": "910a"}, " and 3 more of R16, R17)"),
        ([("a", 17)], {"chip": "a2"}, "(R8 for a2"),
        ([("a", 1), ("b", 1)], {"chip": "a2"}, "(R16 for a2"),
        ([("a", 1)], {"device_target": "ascend", "chip": "300i-duo"}, "(R16 for 300i-duo"),
        (
            [("10.0.0.1", 1), ("fe80::1", 1)],
            {"device_target": "cpu"},
            'server_list[1].host_ip = "fe80::1": the other host addresses are',
        ),
        ([("a", 1)], {"chip": "a5"}, "for a5"),
    ],
)
def test_what_validation_would_find_is_refused_with_its_rule(servers, options, says):
    with pytest.raises(BuildError) as caught:
        build_table(servers, **options)
    assert says in str(caught.value)


def test_addresses_of_devices_are_refused_where_devices_have_none():
    with pytest.raises(BuildError, match="only Ascend devices have a network port"):
        build_table(hosts_with_addresses(["a"], [0]), device_target="gpu")


def test_a_chip_that_is_not_ascend_is_refused():
    with pytest.raises(BuildError):
        build_table([("a", 1)], device_target="gpu", chip="a2")
    with pytest.raises(BuildError, match=r"version '1\.1' cannot be generated; choose one of 1\.0, 1\.2"):
        build_table([("a", 1)], version="1.1")


def test_several_addresses_of_a_device_are_checked_one_by_one():
    two = [HostInventory("a", (Device(0, -1, "10.0.0.1,10.0.0.2"), Device(1, -1, "10.0.0.3,10.0.0.4")))]
    assert errors_of(build_table(two)) == []
    twice = [HostInventory("a", (Device(0, -1, "10.0.0.1,10.0.0.2"), Device(1, -1, "10.0.0.3,10.0.0.1")))]
    with pytest.raises(BuildError, match=r"the same address stands at server_list\[0\]\.device\[0\]"):
        build_table(twice)


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


def test_super_pods_may_be_assigned():
    table = build_table(pods(("a", None, 0), ("b", None, 4)), version="1.2", super_pods={"7": ["a", "b"]}, chip="a3")
    assert [(pod.super_pod_id, pod.server_ids) for pod in table.super_pods] == [("7", ("a", "b"))]


def test_version_1_0_has_no_super_pods():
    table = build_table(pods(("a", "0", 0)))
    assert table.super_pods == ()
    assert [device.super_device_id for _, device in table.placements] == [None, None]


@pytest.mark.parametrize(
    ("entries", "super_pods", "says"),
    [
        ([("a", None, 0)], None, "no super pod of the servers is known, which version 1.2 lists; give --super_pods"),
        (
            [("a", "0", None)],
            None,
            "server_list[0].device[0].super_device_id: the key is missing; a table with super_pod_list needs it (R24",
        ),
        (
            [("a", "0", 0), ("b", "0", 1)],
            None,
            'server_list[1].device[0].super_device_id = "1": the same super_device_id stands at server_list[0]',
        ),
        (
            [("a", "0", 2**32 - 1)],
            None,
            'server_list[0].device[1].super_device_id = "4294967296": the id is no decimal number of 32 bits',
        ),
        ([("a", "", 0)], None, "the id is not of 1 to 127 characters (R25)"),
        ([("a", "p" * 128, 0)], None, "the id is not of 1 to 127 characters (R25)"),
        ([("a", "0", 0)], {"1": ["a"]}, "server 'a' is assigned to super pod '1', but it says '0'"),
        ([("a", None, 0)], {"1": ["a", "z"]}, 'server_list[1].server_id = "z": the id is not in server_list (R25)'),
        (
            [("a", None, 0)],
            {"1": ["a"], "2": ["a"]},
            'server_id = "a": it stands at super_pod_list[0].server_list[0].server_id already (R25)',
        ),
        (
            [("a", None, 0), ("b", None, 4)],
            {"1": ["a"]},
            'server_list[1].server_id = "b": the server is in no super pod of super_pod_list (R25)',
        ),
    ],
)
def test_super_pods_that_cannot_be_known_are_refused(entries, super_pods, says):
    with pytest.raises(BuildError) as caught:
        build_table(pods(*entries), version="1.2", super_pods=super_pods)
    assert says in str(caught.value)
    assert caught.value.remedy
