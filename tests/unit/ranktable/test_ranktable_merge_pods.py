"""Super pods and groups in a merge."""

from dataclasses import replace

import pytest

from ranktable import (
    Device,
    Group,
    MergeError,
    RankTable,
    Server,
    SuperPod,
    merge_tables,
)


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
