"""Ranks that wait for others who will not come: at the start, and after a rank has ended too early."""

from __future__ import annotations

from msrun import contract
from msrun.agent.watch.progress_board import Progress, ProgressBoard
from msrun.cluster.membership import Membership, WorkerState, describe_absent
from msrun.errors import ClusterError, HangTimeout, RendezvousTimeout
from msrun.planning.ranks import name_ranks

LOOKS_PER_LIMIT = 20
MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 5.0


class MeetingWatch:
    """Looks at the progress board from time to time. Of plain torch it knows only who has joined."""

    def __init__(
        self, limit_s: float, deserted_s: float, host_name: str, board: ProgressBoard, *, is_patient: bool = False
    ) -> None:
        """
        Args:
            limit_s: how long a rank may wait for the others in init(); negative = for ever.
            deserted_s: how long all running ranks may wait in a collective after another has finished; 0 = for ever.
            is_patient: nobody waits too long for a rank that runs.
        """
        self._is_patient = is_patient
        self.interval_s = MAX_INTERVAL_S
        if limit_s >= 0:
            self.interval_s = min(max(limit_s / LOOKS_PER_LIMIT, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self._limit_s, self._deserted_s = limit_s, deserted_s
        self._host_name = host_name
        self._board = board
        self._absent: list[int] = []
        self._absent_elsewhere: tuple[int, ...] = ()
        self.since = 0.0
        """When the workers went on after a pause; what was before does not count."""
        self.missing: tuple[int, ...] = ()
        """After an error: the ranks of this host that did not come."""

    def reset(self) -> None:
        """Forget the last attempt."""
        self._absent.clear()
        self._absent_elsewhere = ()

    def note_done(self, global_rank: int) -> None:
        """A rank of this host has ended with exit code 0."""
        if not self._board.read(global_rank).has_come:
            self._absent.append(global_rank)

    def note_absent(self, global_ranks: tuple[int, ...]) -> None:
        """Ranks of other hosts have ended with exit code 0 and never joined the world."""
        self._absent_elsewhere = global_ranks

    @property
    def is_urgent(self) -> bool:
        """Whether somebody has ended and never came: whoever joins the world waits in vain."""
        return bool(self._absent or self._absent_elsewhere)

    def come(self, membership: Membership) -> tuple[int, ...]:
        """Return the ranks of this host that have joined the world, or try to."""
        return tuple(rank for rank in membership.members if self._board.read(rank).has_come)

    def judge_absent(self, membership: Membership) -> ClusterError | None:
        """Return why the world can never be whole; None as long as nobody has joined it, or all can still come."""
        if not self.is_urgent or not (come := self.come(membership)):
            return None
        self.missing = tuple(self._absent)
        return ClusterError(describe_absent((*self._absent, *self._absent_elsewhere), come))

    def look(self, membership: Membership, now: float) -> ClusterError | None:
        """Return why those who wait will wait for ever, or None."""
        if error := self.judge_absent(membership):
            return error
        if self._is_patient:
            return None
        records = {rank: self._board.read(rank) for rank in membership.members}
        waiting = {rank: records[rank] for rank in membership.running() if records[rank].is_waiting}
        came = [rank for rank, record in records.items() if record.is_reported]
        missing = tuple(rank for rank in records if rank not in came)
        if waiting and missing:
            return self._judge_late(waiting, came, missing, now)
        joining = {rank: record for rank, record in waiting.items() if record.phase == contract.PHASE_JOINING}
        if joining:
            return self._judge_late(joining, came, (), now)
        return self._judge_deserted(membership, {rank: records[rank] for rank in membership.running()}, now)

    def _judge_late(
        self, waiting: dict[int, Progress], came: list[int], missing: tuple[int, ...], now: float
    ) -> ClusterError | None:
        waited_s = now - max(self.since, min(record.waiting_since for record in waiting.values()))
        if self._limit_s < 0 or waited_s < self._limit_s:
            return None
        self.missing = missing or tuple(waiting)
        size = len(came) + len(missing)
        return RendezvousTimeout(
            f"--cluster_time_out {self._limit_s:g}: {len(missing)} of {size} workers have not joined the world, and "
            f"others wait in {_where(waiting)} for {waited_s:.0f} s; "
            f"missing on {self._host_name}: {name_ranks(missing) if missing else 'none'}; came: {name_ranks(came)}"
        )

    def _judge_deserted(self, membership: Membership, records: dict[int, Progress], now: float) -> ClusterError | None:
        done = membership.ranks_in(WorkerState.DONE)
        if not self._deserted_s or not done or not records or not all(record.is_waiting for record in records.values()):
            return None
        waited_s = now - max(self.since, *(record.waiting_since for record in records.values()))
        if waited_s < self._deserted_s:
            return None
        self.missing = tuple(done)
        return HangTimeout(
            f"{name_ranks(done)} on {self._host_name} ended with exit code 0 while {name_ranks(records)} "
            f"wait{'s' if len(records) == 1 else ''} in {_where(records)}, "
            f"for {waited_s:.0f} s already (--exit_time_out {self._deserted_s:g}): every rank has to call the same "
            "collectives"
        )


def _where(waiting: dict[int, Progress]) -> str:
    """Return what the first of them waits in."""
    record = next(iter(waiting.values()))
    return "init()" if record.phase == contract.PHASE_JOINING else record.name or "a collective"
