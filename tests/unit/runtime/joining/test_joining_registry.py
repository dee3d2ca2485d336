"""Who has come to a meeting, and who gets which rank."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.runtime.joining.registrar import Refused, Registry, Request, Seat, describe_ranks

ASKS_NOTHING = Request("job", 4, -1, "pid 7 on vm")


def test_assigned_ranks_stand_together_by_host_in_order_of_numeric_addresses() -> None:
    registry = Registry("job", 4)
    for number, address in enumerate(["10.0.0.10", "10.0.0.9", "10.0.0.10", "10.0.0.9"], start=1):
        registry.admit(number, ASKS_NOTHING, address)
    assert registry.is_complete
    assert registry.assign() == {2: Seat(0, 0, 2), 4: Seat(1, 1, 2), 1: Seat(2, 0, 2), 3: Seat(3, 1, 2)}
    assert registry.describe(1) == "rank 2 (pid 7 on vm, 10.0.0.10)"


@given(
    asked=st.lists(st.booleans(), min_size=1, max_size=8),
    addresses=st.lists(st.sampled_from(["10.0.0.9", "10.0.0.10", "fd00::1"]), min_size=8, max_size=8),
    seed=st.randoms(use_true_random=False),
)
def test_every_rank_is_given_once_and_who_asked_has_its_own(
    asked: list[bool], addresses: list[str], seed: object
) -> None:
    size = len(asked)
    ranks = list(range(size))
    seed.shuffle(ranks)  # type: ignore[attr-defined]
    registry = Registry("job", size)
    for number in range(size):
        rank = ranks[number] if asked[number] else -1
        registry.admit(number, replace(ASKS_NOTHING, world_size=size, global_rank=rank), addresses[number])
    seats = registry.assign()
    assert sorted(seat.global_rank for seat in seats.values()) == list(range(size))
    assert all(seats[number].global_rank == ranks[number] for number in range(size) if asked[number])
    for address in set(addresses[:size]):
        local = [seats[number] for number in range(size) if addresses[number] == address]
        local.sort(key=lambda seat: seat.global_rank)
        assert [seat.local_rank for seat in local] == list(range(len(local)))
        assert {seat.local_world_size for seat in local} == {len(local)}
    free = [(ipaddress.ip_address(addresses[n]).packed.rjust(16, b"\0"), seats[n].global_rank) for n in range(size)]
    given_out = [pair for pair, is_asked in zip(free, asked, strict=True) if not is_asked]
    assert sorted(given_out, key=lambda pair: pair[1]) == sorted(given_out)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (replace(ASKS_NOTHING, world_size=3), "the world has 3 ranks, but here it has 4"),
        (replace(ASKS_NOTHING, key="other"), "another job, which should have a port of its own"),
        (replace(ASKS_NOTHING, global_rank=4), "its rank is 4, but here ranks are 0 to 3"),
        (replace(ASKS_NOTHING, global_rank=-2), "its rank is -2"),
        (replace(ASKS_NOTHING, global_rank=1), "rank 1 is taken by rank 1 (pid 8 on vm, 10.0.0.9)"),
    ],
)
def test_who_does_not_belong_is_refused(request_: Request, reason: str) -> None:
    registry = Registry("job", 4)
    registry.admit(1, replace(ASKS_NOTHING, global_rank=1, name="pid 8 on vm"), "10.0.0.9")
    with pytest.raises(Refused) as caught:
        registry.admit(2, request_, "10.0.0.9")
    assert reason in str(caught.value)
    registry.admit(2, ASKS_NOTHING, "10.0.0.9")


def test_extra_worker_is_refused_and_one_that_has_gone_leaves_room() -> None:
    registry = Registry("job", 1)
    only = replace(ASKS_NOTHING, world_size=1)
    registry.admit(1, only, "10.0.0.9")
    with pytest.raises(Refused, match="an extra worker: all 1 have come"):
        registry.admit(2, only, "10.0.0.9")
    assert registry.remove(1) == "a worker (pid 7 on vm, 10.0.0.9)"
    registry.admit(3, only, "10.0.0.9")


def test_parameter_servers_are_counted_apart_and_numbered_from_0() -> None:
    registry, server = Registry("job", 1, servers=2), Request("job", 1, -1, "pid 9 on vm", role="MS_PSERVER")
    registry.admit(1, server, "10.0.0.9")
    assert registry.describe_missing().startswith(
        "1 of 3 registered, missing: 1 more worker and 1 more parameter server;"
    )
    registry.admit(2, replace(ASKS_NOTHING, world_size=1), "10.0.0.9")
    registry.admit(3, server, "10.0.0.9")
    assert registry.is_complete
    assert registry.assign() == {2: Seat(0, 0, 1), 1: Seat(0, 0, 2), 3: Seat(1, 1, 2)}
    assert registry.describe(3) == "parameter server 1 (pid 9 on vm, 10.0.0.9)"
    assert [registry.is_worker(number) for number in (1, 2, 3)] == [False, True, False]
    with pytest.raises(Refused, match="an extra parameter server: all 2 have come"):
        registry.admit(4, server, "10.0.0.9")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "0 of 6 registered, missing: 6 more workers"),
        ([2, 0], "2 of 6 registered, missing: ranks 1, 3-5; came: 10.0.0.9 with 1, 10.0.0.10 with 1"),
        ([0, 1, 2, 3, 4], "5 of 6 registered, missing: rank 5; came: 10.0.0.9 with 3, 10.0.0.10 with 2"),
        ([0, -1, 2, 3, 4], "5 of 6 registered, missing: 1 more worker; came: 10.0.0.9 with 3, 10.0.0.10 with 2"),
    ],
)
def test_missing_are_named_by_rank_where_ranks_are_known(ranks: list[int], text: str) -> None:
    registry = Registry("job", 6)
    for number, rank in enumerate(ranks):
        registry.admit(number, Request("job", 6, rank, "x"), ["10.0.0.9", "10.0.0.10"][number % 2])
    assert registry.describe_missing() == text


def test_many_hosts_are_counted_not_listed() -> None:
    registry = Registry("job", 20)
    for number in range(10):
        registry.admit(number, Request("job", 20, number, "x"), f"10.0.0.{number + 1}")
    assert registry.describe_missing().endswith("10.0.0.8 with 1 and 2 more")


def test_ranks_are_told_in_runs() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([5, 0, 4, 7, 6]) == "ranks 0, 4-7"


@pytest.mark.parametrize(
    "message",
    [{}, {"protocol": 2}, {"protocol": 1, "key": "job"}, {**ASKS_NOTHING.to_json(), "global_rank": "0"}],
    ids=str,
)
def test_message_of_a_stranger_is_no_request(message: dict[str, object]) -> None:
    with pytest.raises(Refused):
        Request.from_json(message)
    assert Request.from_json(ASKS_NOTHING.to_json()) == ASKS_NOTHING
