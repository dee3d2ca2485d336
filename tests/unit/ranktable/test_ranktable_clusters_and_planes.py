"""Tables over several clusters, and the network plan of device addresses."""

import pytest
from rank_tables import change, findings, super_pod_table


def cluster_table():
    """Return a table of two clusters without a finding."""
    table = super_pod_table()
    del table["super_pod_list"]
    table["version"] = "1.0"
    for server in table["server_list"]:
        server["server_ip"] = f"172.{server['server_id']}".replace("172.10.0", "172.16")
        for entry in server["device"]:
            entry["dpu_ip"] = entry["device_ip"].replace("192.168", "172.17")
            entry["numa_id"] = "0"
            del entry["super_device_id"]
    members = [[{"server_id": f"10.0.0.{n}"} for n in pair] for pair in ((1, 2), (3, 4))]
    table["cluster_list"] = [{"cluster_id": str(n), "server_list": pair} for n, pair in enumerate(members)]
    return table


CLUSTERS = [
    (("cluster_list", 1, "cluster_id"), "0", ["cluster_list[1].cluster_id"]),
    (("cluster_list", 1, "server_list", 0), None, ["server_list[2].server_id"]),
    (
        ("cluster_list", 1, "server_list", 0, "server_id"),
        "10.0.0.1",
        ["server_list[2].server_id", "cluster_list[1].server_list[0].server_id"],
    ),
    (
        ("cluster_list", 1, "server_list", 0, "server_id"),
        "x",
        ["server_list[2].server_id", "cluster_list[1].server_list[0].server_id"],
    ),
]


@pytest.mark.parametrize(("path", "value", "places"), CLUSTERS)
def test_clusters_cover_every_server_once(path, value, places):
    good = cluster_table()
    assert findings(good, chip="a2") == findings(good, chip="a2", reader="mindspore") == []
    assert findings(change(good, (path, value)), chip="a2") == [("P4", "error", place) for place in places]


@pytest.mark.parametrize(
    ("key", "value"), [("dpu_ip", None), ("dpu_ip", "-"), ("dpu_ip", 3), ("numa_id", None), ("server_ip", "dpu0")]
)
def test_what_clusters_need_of_servers_and_devices_is_a_warning(key, value):
    at = ("server_list", 1) if key == "server_ip" else ("server_list", 1, "device", 2)
    place = "server_list[1]" if key == "server_ip" else "server_list[1].device[2]"
    assert findings(change(cluster_table(), ((*at, key), value)), chip="a2") == [("P7", "warning", f"{place}.{key}")]


def test_clusters_of_super_pods_cover_every_pod_once():
    pods = [[{"super_pod_id": "0"}], [{"super_pod_id": "1"}]]
    clusters = [{"cluster_id": str(n), "super_pod_list": pod} for n, pod in enumerate(pods)]
    table = {**super_pod_table(), "version": "1.4", "data_version": 1, "cluster_list": clusters}
    assert findings(table) == [("P1", "warning", "version")]
    pods[1][0]["super_pod_id"] = "0"
    assert findings(table)[1:] == [
        ("P4", "error", "super_pod_list[1].super_pod_id"),
        ("P4", "error", "cluster_list[1].super_pod_list[0].super_pod_id"),
    ]


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
