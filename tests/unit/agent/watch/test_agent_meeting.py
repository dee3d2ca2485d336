"""Who waits for whom: judged from the progress board alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from msrun import contract
from msrun.agent.watch.job_watch import MeetingWatch
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.cluster.membership import Membership
from msrun.errors import ClusterError, HangTimeout, RendezvousTimeout
from msrun.runtime.progress import ProgressRecord

DESERTED_S = 30.0


class Meeting:
    """Four running workers and their records."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        path = folder / "progress"
        self.board = ProgressBoard(path, 4)
        self.board.create()
        self.records = [ProgressRecord(str(path), rank) for rank in range(4)]
        self.membership = Membership(range(4))
        for rank in range(4):
            self.membership.started(rank, 100 + rank, 0.0)
        self.watch = MeetingWatch(limit_s, DESERTED_S, "node-a", self.board)

    def enter(self, phase: int, *ranks: int) -> None:
        for rank in ranks:
            self.records[rank].enter_phase(phase)

    def look(self, after_s: float) -> ClusterError | None:
        since = max(self.board.read(rank).waiting_since for rank in range(4))
        return self.watch.look(self.membership, since + after_s)

    def close(self) -> None:
        self.board.close()
        self.records.clear()  # a worker keeps its own until it ends


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Callable[[float], Meeting]]:
    """Makes the meeting, with this limit."""
    with ExitStack() as stack:
        yield lambda limit_s: stack.enter_context(closing(Meeting(tmp_path, limit_s)))


@pytest.fixture
def meeting(meet: Callable[[float], Meeting]) -> Meeting:
    return meet(10.0)


def test_workers_without_the_runtime_are_never_judged(meeting: Meeting) -> None:
    meeting.membership.exited(1, 0, 1.0)
    assert meeting.look(1e9) is None


def test_those_who_did_not_come_in_time_are_named_with_those_who_did(meeting: Meeting) -> None:
    meeting.enter(contract.PHASE_JOINING, 0, 1, 3)
    assert meeting.look(9.0) is None
    error = meeting.look(11.0)
    assert isinstance(error, RendezvousTimeout)
    assert "1 of 4 workers have not joined the world, and others wait in init() for 11 s" in str(error)
    assert "missing on node-a: rank 2; came: ranks 0-1, 3" in str(error)
    assert meeting.watch.missing == (2,)
    assert error.exit_code == 124


def test_rank_that_the_others_wait_for_in_their_first_collective_counts_as_missing(meeting: Meeting) -> None:
    meeting.enter(contract.PHASE_JOINED, 0, 1, 3)
    assert meeting.look(11.0) is None, "nobody waits"
    meeting.records[0].begin_wait("the comparison of graphs by 4 ranks")
    error = meeting.look(11.0)
    assert "others wait in the comparison of graphs by 4 ranks for 11 s; missing on node-a: rank 2" in str(error)


def test_no_limit_waits_for_ever(meet: Callable[[float], Meeting]) -> None:
    meeting = meet(-1)
    meeting.enter(contract.PHASE_JOINING, 0)
    assert meeting.look(1e9) is None


def test_worker_that_ended_well_without_joining_is_named_as_soon_as_another_has_come(meeting: Meeting) -> None:
    meeting.membership.exited(1, 0, 1.0)
    meeting.watch.note_done(1)
    assert meeting.watch.is_urgent
    assert meeting.look(1e6) is None, "nobody has joined"
    meeting.enter(contract.PHASE_JOINING, 0, 3)
    meeting.enter(contract.PHASE_PLAIN_TORCH, 2)
    error = meeting.look(0.0)
    assert error is not None
    assert str(error).startswith(
        "rank 1 ended with exit code 0 without joining the world, and ranks 0, 2-3 need it: every rank"
    )
    assert meeting.watch.missing == (1,)
    assert error.exit_code == 3


def test_worker_that_had_joined_may_end(meeting: Meeting) -> None:
    meeting.enter(contract.PHASE_PLAIN_TORCH, 0, 1)
    meeting.enter(contract.PHASE_LEFT, 2)
    for rank in (1, 2):
        meeting.membership.exited(rank, 0, 1.0)
        meeting.watch.note_done(rank)
    assert not meeting.watch.is_urgent
    assert meeting.look(1e6) is None


def test_rank_of_another_host_that_never_came_is_named_until_the_next_attempt(meeting: Meeting) -> None:
    meeting.watch.note_absent((7,))
    meeting.enter(contract.PHASE_JOINED, 0)
    assert str(meeting.look(0.0)).startswith("rank 7 ended with exit code 0 without joining the world, and rank 0 ")
    meeting.watch.reset()
    assert meeting.look(0.0) is None


def test_worker_that_failed_before_joining_is_not_judged_here(meeting: Meeting) -> None:
    meeting.membership.exited(1, signal.SIGKILL, 1.0)
    meeting.enter(contract.PHASE_JOINING, 0, 2, 3)
    assert meeting.look(0.1) is None


def test_all_have_come_but_the_meeting_fails(meeting: Meeting) -> None:
    meeting.enter(contract.PHASE_JOINING, 0, 1, 2, 3)
    error = meeting.look(11.0)
    assert "0 of 4 workers" in str(error)
    assert "missing on node-a: none; came: ranks 0-3" in str(error)
    assert meeting.watch.missing == (0, 1, 2, 3)


def test_ranks_left_alone_in_a_collective_are_found_when_all_of_them_wait(meeting: Meeting) -> None:
    meeting.enter(contract.PHASE_JOINED, 0, 1, 2, 3)
    meeting.membership.exited(1, 0, 1.0)
    for rank in (0, 2):
        meeting.records[rank].begin_wait("all_reduce of 4 ranks")
    assert meeting.look(DESERTED_S + 1) is None, "rank 3 may still come to them"
    meeting.records[3].begin_wait("all_reduce of 4 ranks")
    assert meeting.look(DESERTED_S - 1) is None
    error = meeting.look(DESERTED_S + 1)
    assert isinstance(error, HangTimeout)
    assert "rank 1 on node-a ended with exit code 0 while ranks 0, 2-3 wait in all_reduce of 4 ranks" in str(error)


def test_waiting_for_a_rank_that_runs_is_no_desertion(meeting: Meeting) -> None:
    meeting.enter(contract.PHASE_JOINED, 0, 1, 2, 3)
    for rank in range(4):
        meeting.records[rank].begin_wait("all_reduce of 4 ranks")
    assert meeting.look(1e6) is None
