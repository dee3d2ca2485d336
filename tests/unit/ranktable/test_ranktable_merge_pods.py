"""Super pods, groups and clusters in a merge, and Volcano's table of several clusters."""

from dataclasses import replace

import pytest

from ranktable import (
    Cluster,
    ClusterPart,
    Device,
    EditError,
    Group,
    MergeError,
    NotReadyError,
    RankTable,
    Server,
    SuperPod,
    build_table,
    merge_clusters,
    merge_tables,
    parse_table,
)
from ranktable.codec import encode_table


def _pod_table(server_id, super_device_ids=("0", "1"), pod_id="0", **extra):
    devices = tuple(Device(n, n, None, sdid) for n, sdid in enumerate(super_device_ids))
    pod = SuperPod(pod_id, (server_id,), extra)
    return RankTable("1.2", (Server(server_id, devices),), declared_server_count=1, super_pods=(pod,))


def test_super_pods_of_equal_ids_are_joined():
    merged = merge_tables([_pod_table("a"), _pod_table("b", ("2", "3")), _pod_table("c", pod_id="1")])
    assert [(pod.super_pod_id, pod.server_ids) for pod in merged.table.super_pods] == [("0", ("a", "b")), ("1", ("c",))]
    assert "super pod 0 is joined out of table 1, table 2" in merged.notes


def test_super_pods_whose_servers_are_torn_apart_by_the_order_are_warned_of():
    parts = [_pod_table("a"), _pod_table("b", pod_id="1"), _pod_table("c", ("2", "3"))]
    assert any("R26" in note for note in merge_tables(parts).notes)
    adjacent = merge_tables(parts, order="host_file", hosts=["b", "c", "a"])
    assert not any("R26" in note for note in adjacent.notes)
    assert [(pod.super_pod_id, pod.server_ids) for pod in adjacent.table.super_pods] == [
        ("1", ("b",)),
        ("0", ("c", "a")),
    ]


def test_lists_keep_their_own_order_where_the_ranks_do():
    table = _pod_table("a", pod_id="1")
    table = replace(
        table, servers=(*table.servers, replace(_pod_table("b").servers[0], devices=(Device(0, 2, None, "5"),)))
    )
    table = replace(table, declared_server_count=2, super_pods=(SuperPod("0", ("b",)), *table.super_pods))
    assert merge_tables([table], order="rank").table == table
    assert [pod.super_pod_id for pod in merge_tables([table]).table.super_pods] == ["1", "0"]


def test_groups_of_equal_names_are_joined():
    def table(server_id, *names):
        servers = tuple(
            Server(server_id, (Device(n, n, f"10.0.0.{ord(server_id) + n}"),), group=name)
            for n, name in enumerate(names)
        )
        extra = {"deploy_mode": "lab", "para_plane_nic_location": "device"}
        return RankTable("template2-lab", servers, groups=tuple(Group(name) for name in names), extra=extra)

    merged = merge_tables([table("a", "g", "x"), table("d", "g", "y")]).table
    assert [group.name for group in merged.groups] == ["g", "x", "y"]
    assert [(server.server_id, server.group) for server in merged.servers] == [
        ("a", "g"), ("a", "x"), ("d", "g"), ("d", "y"),
    ]  # fmt: skip
    with pytest.raises(MergeError, match="server a stands in table 1 already"):
        merge_tables([table("a", "g"), table("a", "g")])


def test_super_pods_that_only_share_their_id_are_told_apart_by_their_devices():
    with pytest.raises(MergeError, match="the same super_device_id stands at device 0 of server a in table 1"):
        merge_tables([_pod_table("a"), _pod_table("b")])
    with pytest.raises(MergeError, match="super pod '0' has other keys than in table 1"):
        merge_tables([_pod_table("a"), _pod_table("b", ("2", "3"), note=1)])


def _part(cluster_id, job, table, **changes):
    return ClusterPart(cluster_id, job, replace(table, **changes), f"{cluster_id}-{job}.json")


def test_the_tables_of_several_clusters_make_a_global_table():
    parts = [
        _part("west", "1", _pod_table("c", pod_id="2")),
        _part("east", "2", _pod_table("a", ("2", "3")), extra={"data_version": 4}),
        _part("east", "10", _pod_table("b")),
    ]
    parts = [replace(part, table=replace(part.table, extra={"data_version": n})) for n, part in enumerate(parts)]
    merged = merge_clusters(parts)
    table = merged.table
    assert (table.dialect, table.extra, table.status) == ("volcano-global", {"data_version": 3}, "completed")
    assert [server.server_id for server in table.servers] == ["b", "a", "c"]
    assert [device.rank_id for _, device in table.placements] == list(range(6))
    assert table.clusters == (Cluster("east", (), ("0",)), Cluster("west", (), ("2",)))
    assert [(pod.super_pod_id, pod.server_ids) for pod in table.super_pods] == [("0", ("b", "a")), ("2", ("c",))]
    assert "data_version is 3, one more than the highest of the parts" in merged.notes
    assert not any("the highest of the tables" in note for note in merged.notes)
    assert "clusters and jobs in order: east-10.json, east-2.json, west-1.json" in merged.notes
    assert parse_table(encode_table(table)) == table
    assert merge_clusters(reversed(parts)) == merged


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            [_part("e", "", build_table([("a", 1)]))],
            "e-.json: its dialect is 1.0, that of a part is 1.2 or volcano-job",
        ),
        ([_part("e", "", _pod_table("a"), super_pods=())], "it has no super pods"),
        (
            [_part("e", "", _pod_table("a")), _part("f", "", _pod_table("b", ("2", "3")))],
            "super pod 0 is of cluster f and",
        ),
        (
            [_part("e", "j", _pod_table("a")), _part("e", "j", _pod_table("b", ("2", "3")))],
            "job 'j' of cluster e is given",
        ),
        ([_part("e", "", _pod_table("a")), _part("f", "", _pod_table("a", pod_id="1"))], "server a stands in e-.json"),
    ],
)
def test_parts_that_make_no_global_table_are_refused(parts, says):
    with pytest.raises(MergeError) as caught:
        merge_clusters(parts)
    assert says in "\n".join(caught.value.conflicts)


def test_a_global_table_waits_for_its_parts():
    parts = [_part("e", "", _pod_table("a"), status="initializing"), _part("f", "", _pod_table("b", pod_id="1"))]
    with pytest.raises(NotReadyError, match=r"e-\.json"):
        merge_clusters(parts)
    assert merge_clusters(parts, allow_initializing=True).table.status == "initializing"
    with pytest.raises(MergeError, match="the value must be a JSON integer"):
        merge_clusters([_part("e", "", _pod_table("a"), extra={"data_version": "4"})])
    with pytest.raises(EditError, match="no table is given"):
        merge_clusters([])
