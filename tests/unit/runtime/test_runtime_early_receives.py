"""Receives that are started before their value is needed."""

from __future__ import annotations

import itertools

import pytest

from msrun.runtime.parallel.pipeline.schedule import Action, build_schedule, default_chunks, receive_early

SCHEDULES = [
    (name, ranks, ranks * times)
    for name in ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
    for ranks in (2, 3, 4)
    for times in (2, 3)
]


def rows(name: str, ranks: int, micro_size: int) -> tuple[tuple[Action, ...], ...]:
    return build_schedule(name, ranks, default_chunks(name, interleave=False), micro_size).actions


def is_receive(action: Action) -> bool:
    return action.kind.startswith("RECV")


def computed_between(row: tuple[Action, ...], receive: Action) -> int:
    """Return how many actions are computed between a receive and the action that reads it."""
    begin = row.index(receive)
    readers = ("F",) if receive.kind == "RECV_F" else ("B", "I")
    here = (receive.stage, receive.micro_batch)
    end = next(i for i, a in enumerate(row) if a.kind in readers and (a.stage, a.micro_batch) == here)
    assert begin < end
    return sum(action.computes for action in row[begin:end])


@pytest.mark.parametrize(("name", "ranks", "micro_size"), SCHEDULES)
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_only_receives_move_and_only_forward_in_time(name: str, ranks: int, micro_size: int, ahead: int) -> None:
    for row in rows(name, ranks, micro_size):
        early = receive_early(row, ahead)
        assert [a for a in early if not is_receive(a)] == [a for a in row if not is_receive(a)]
        assert [a for a in early if is_receive(a)] == [a for a in row if is_receive(a)]
        for receive in filter(is_receive, row):
            assert computed_between(early, receive) >= computed_between(row, receive)


@pytest.mark.parametrize(("name", "ranks", "micro_size"), SCHEDULES)
def test_receive_stands_so_many_computing_actions_ahead_unless_another_one_does(
    name: str, ranks: int, micro_size: int
) -> None:
    for row in rows(name, ranks, micro_size):
        early = receive_early(row, 4)
        gained = [computed_between(early, r) - computed_between(row, r) for r in filter(is_receive, row)]
        assert all(0 <= more <= 4 for more in gained)
        for before, here in itertools.pairwise(i for i, a in enumerate(early) if is_receive(a)):
            distance = sum(action.computes for action in early[before:here])
            assert distance == 0 or computed_between(early, early[here]) >= 4


def test_a_pair_of_ranks_asks_for_what_will_be_sent_at_the_beginning() -> None:
    (first, second) = rows("eager_1f1b", 2, 8)
    assert " ".join(a.kind for a in receive_early(first)[:4]) == "RECV_B RECV_B F SEND_F"
    assert [a.micro_batch for a in itertools.takewhile(is_receive, receive_early(second))] == [0, 1, 2, 3]
