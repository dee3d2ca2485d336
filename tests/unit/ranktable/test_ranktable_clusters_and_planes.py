"""Tables over several clusters, and the network plan of device addresses."""

import pytest
from rank_tables import findings, super_pod_table


def plan_table(address):
    """Return two servers of eight devices whose addresses are `address(server, device)`."""
    table = {**super_pod_table(2, 2, 8), "version": "1.0"}
    del table["super_pod_list"]
    for server, entry in enumerate(table["server_list"]):
        for number, device in enumerate(entry["device"]):
            del device["super_device_id"]
            device["device_ip"] = address(server, number)
    return table


def four_segments(server, number):
    return f"192.{number % 4 + 1}.27.{10 + 2 * server + number // 4}"


def one_segment(server, number):
    return f"192.1.27.{10 + 8 * server + number}"


def segment_per_server(server, number):
    return f"192.1.{server}.{number + 1}"


@pytest.mark.parametrize(
    ("address", "chip", "count"),
    [
        (four_segments, "910a", 0),
        (four_segments, "a2", 12),
        (four_segments, None, 0),
        (one_segment, "a2", 0),
        (one_segment, "910a", 0),
        (segment_per_server, None, 8),
        (segment_per_server, "a3", 8),
        (lambda server, number: f"fd00::{number}:{server}", None, 0),
    ],
)
def test_the_network_plan_is_checked_when_a_prefix_is_given(address, chip, count):
    table = plan_table(address)
    assert [found for found in findings(table, chip=chip) if found[0] == "R23"] == []
    found = [(rule, severity) for rule, severity, _ in findings(table, chip=chip, network_plan=24) if rule == "R23"]
    assert found == [("R23", "warning")] * count


@pytest.mark.parametrize(("bits", "count"), [(16, 0), (31, 8), (32, 8), (33, 0)])
def test_a_prefix_may_be_as_long_as_an_address(bits, count):
    table = plan_table(lambda server, number: f"192.{number}.0.{server * 2}")
    assert len([found for found in findings(table, network_plan=bits) if found[0] == "R23"]) == count


def test_a_device_with_several_addresses_is_placed_by_its_first():
    def two_addresses(server, number):
        return f"{segment_per_server(server, number)},10.{server}.{number}.1"

    found = [problem for problem in findings(plan_table(two_addresses), network_plan=24) if problem[0] == "R23"]
    assert len(found) == 8, "as many as by the first addresses alone"
