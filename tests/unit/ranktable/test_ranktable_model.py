"""The neutral table answers where a rank lives."""

import dataclasses
import pickle

import pytest

from ranktable import (
    AmbiguousRankError,
    Device,
    Group,
    GroupNotFoundError,
    RankNotFoundError,
    RankTable,
    Server,
    build_table,
)

TABLE = RankTable(
    "1.0",
    (
        Server("late", (Device(0, 2), Device(1, 3))),
        Server("early", (Device(0, 0, "10.0.0.1"), Device(1, 1, "10.0.0.2"))),
    ),
)


def test_the_world_size_counts_devices():
    assert TABLE.world_size == 4
    assert RankTable("1.0", ()).world_size == 0


@pytest.mark.parametrize(
    ("rank", "server", "device", "node"), [(0, "early", 0, 0), (1, "early", 1, 0), (3, "late", 1, 1)]
)
def test_a_rank_is_found_with_its_server_and_device(rank, server, device, node):
    assert TABLE.server_of(rank).server_id == server
    assert TABLE.device_of(rank).device_id == device
    assert TABLE.servers_by_rank.index(TABLE.server_of(rank)) == node


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(RankNotFoundError, match="no device of the table has rank 4; the table has 4 devices"):
        TABLE.server_of(4)
    with pytest.raises(LookupError):
        TABLE.device_of(-1)


def test_readiness_follows_the_status():
    assert TABLE.is_ready
    assert not dataclasses.replace(TABLE, status="initializing").is_ready


def test_a_table_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TABLE.status = "unknown"


def test_a_table_can_be_hashed_copied_and_pickled():
    table = build_table([("a", 2)])
    assert hash(table) == hash(build_table([("a", 2)]))
    assert pickle.loads(pickle.dumps(table)) == table
    assert dataclasses.asdict(table)["servers"][0]["server_id"] == "a"


SERVICE = RankTable(
    "mindie-global",
    tuple(
        Server(f"{name}{node}", (Device(0, node * 2), Device(1, node * 2 + 1)), group=name)
        for name in ("2", "3")
        for node in range(2)
    ),
    groups=(Group("2"), Group("3")),
)


def test_a_rank_that_several_groups_have_is_refused_and_asked_of_one_group():
    assert SERVICE.world_size == 8
    with pytest.raises(AmbiguousRankError, match=r"rank 3 stands in group '2' and again in group '3'; .*of_group"):
        SERVICE.server_of(3)
    part = SERVICE.of_group("3")
    assert (part.world_size, part.groups) == (4, (Group("3"),))
    assert part.server_of(3).server_id == "31"
    assert part.servers_by_rank.index(part.server_of(3)) == 1


def test_a_rank_twice_in_one_group_and_a_group_that_is_not_there_are_refused():
    twice = Server("a", (Device(0, 0), Device(1, 0)), group="2")
    table = dataclasses.replace(SERVICE, groups=(Group("2"),), servers=(twice,))
    with pytest.raises(AmbiguousRankError, match="rank 0 stands twice in group '2'"):
        table.device_of(0)
    with pytest.raises(GroupNotFoundError, match="the table has no group '7'; its groups are '2'"):
        table.of_group("7")
