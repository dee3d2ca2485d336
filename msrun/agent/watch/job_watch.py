"""Everything that looks at running workers from time to time: the watchdog, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from msrun import contract
from msrun.agent.attempt import Attempt
from msrun.agent.timers import Timers
from msrun.agent.watch.linger_watch import INTERVAL_S, LingerWatch
from msrun.agent.watch.meeting import MeetingWatch
from msrun.agent.watch.places import Place, read_place
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.agent.watch.stacks import request_stacks
from msrun.agent.watch.watchdog import Hang, Watchdog, describe_all, size_of
from msrun.cluster.membership import Membership
from msrun.errors import ClusterError, HangTimeout
from msrun.planning.plan import HostPlan, LaunchPlan

ABSENT_LOOK_S = 0.25
"""How often to look whether somebody has joined a world that a rank has left out."""

OnStuck = Callable[[ClusterError, tuple[int, ...]], None]
"""Called with the reason and the ranks that the others wait for."""


class JobWatch:
    """Watches the workers of one attempt at a time. Owned by the agent's event loop."""

    def __init__(self, plan: LaunchPlan, host: HostPlan, board: ProgressBoard, timers: Timers) -> None:
        self._plan = plan
        self._host = host
        self._board = board
        self._timers = timers
        self._logs = {worker.global_rank: worker.log_path for worker in host.workers}
        self._is_patient = plan.interactive_rank is not None
        """A rank may wait for its user, and the others for it."""
        self._meeting = MeetingWatch(
            plan.cluster_time_out_s, plan.exit_time_out_s, host.name, board, is_patient=self._is_patient
        )
        self._linger: LingerWatch | None = None
        self._watchdog: Watchdog | None = None
        self._hang: Hang | None = None
        """The newest that was found."""
        self._stack_begins: dict[int, int] = {}
        """Global rank -> size of its log when its stacks were requested."""

    def start(self, membership: Membership, on_stuck: OnStuck, tell: Callable[..., None]) -> None:
        """Watch these workers until `stop`.

        Args:
            tell: told of every rank whose program has ended and whose process goes on.
        """
        self._watch_end(membership, on_stuck, tell)
        self._watch_meeting(membership, on_stuck)
        if self._plan.hang_time_out_s > 0 and not self._is_patient:
            self._watch_progress(membership, on_stuck)

    def note_done(self, membership: Membership, global_rank: int, on_stuck: OnStuck) -> None:
        """A rank has ended with exit code 0: look from now on, and at the end, whether others wait for it to join."""
        was_urgent = self._meeting.is_urgent
        self._meeting.note_done(global_rank)
        if self._meeting.is_urgent and (membership.is_over or not was_urgent):
            self._look_for_absent(membership, on_stuck)

    def note_absent(self, membership: Membership, global_ranks: tuple[int, ...], on_stuck: OnStuck) -> None:
        """Ranks of other hosts have ended with exit code 0 and never joined the world."""
        self._meeting.note_absent(global_ranks)
        self._look_for_absent(membership, on_stuck)

    def _look_for_absent(self, membership: Membership, on_stuck: OnStuck) -> None:
        error = self._meeting.judge_absent(membership)
        if error is not None:
            on_stuck(error, self._meeting.missing)
        else:
            self._watch_meeting(membership, on_stuck)

    def come(self, membership: Membership) -> tuple[int, ...]:
        """Return the ranks of this host that have joined the world, or try to."""
        return self._meeting.come(membership)

    def has_begun(self, membership: Membership) -> bool:
        """Return whether a rank of this host has joined the world, tries to, or has reported progress."""
        return any(record.has_come or record.steps for record in map(self._board.read, membership.members))

    def _watch_meeting(self, membership: Membership, on_stuck: OnStuck) -> None:
        meeting = self._meeting

        def look_at_meeting() -> None:
            error = meeting.look(membership, time.monotonic())
            if error is not None:
                on_stuck(error, meeting.missing)

        self._timers.every("meeting", ABSENT_LOOK_S if meeting.is_urgent else meeting.interval_s, look_at_meeting)

    def _watch_end(self, membership: Membership, on_stuck: OnStuck, tell: Callable[..., None]) -> None:
        watch = self._linger = LingerWatch(self._board, self._logs, self._plan.exit_time_out_s)

        def look() -> None:
            running = membership.running()
            new, error = watch.look(running, time.monotonic())
            for rank, what in new.items():
                tell("lingering", global_rank=rank, what=what)
            if error is not None:
                on_stuck(error, tuple(sorted(running)))

        self._timers.every("linger", INTERVAL_S, look)

    def _watch_progress(self, membership: Membership, on_stuck: OnStuck) -> None:
        watchdog = self._watchdog = Watchdog(self._plan.hang_time_out_s, self._board, self._logs)

        def look_for_hang() -> None:
            hang = watchdog.look(membership.running(), time.monotonic())
            if hang is not None:
                self._hang = hang
                on_stuck(self._hang_error(hang), hang.lagging)

        self._timers.every("hang", watchdog.interval_s, look_for_hang)

    def note_pause(self) -> None:
        """The workers were stopped for a while, and run again."""
        self._meeting.since = time.monotonic()
        if self._linger is not None:
            self._linger.since = self._meeting.since
        if self._watchdog is not None:
            self._watchdog.forget()

    def stop(self) -> None:
        """Watch nobody any more."""
        self._timers.cancel("meeting", "hang", "linger")

    def doing(self, membership: Membership) -> dict[int, str]:
        """Return what running workers say that they are doing now, and which of them are stopped."""
        running = membership.running()
        records = {rank: self._board.read(rank) for rank in running}
        words = describe_all(records, running, time.monotonic())
        return {rank: text for rank, text in words.items() if records[rank].describe(0.0) or "stopped" in text}

    def left(self, membership: Membership) -> frozenset[int]:
        """Return the running workers that have left the world."""
        return frozenset(rank for rank in membership.running() if self._board.read(rank).phase == contract.PHASE_LEFT)

    def request_stacks(self, membership: Membership, headline: str) -> None:
        """Have every running worker write its stacks into its log."""
        self._stack_begins = {rank: size_of(self._logs[rank]) for rank in membership.running()}
        request_stacks({pid: self._logs[rank] for rank, pid in membership.running().items()}, headline)

    def explain_hang(self, attempt: Attempt) -> None:
        """Name who holds up whom, and where, by the stacks that were requested: for workers that say nothing of it."""
        hang, places = self._hang, self._places(attempt)
        if hang is None or not isinstance(attempt.fault, HangTimeout) or not places or hang.lagging != tuple(places):
            return  # somebody cannot say where it stands, is stopped, or has reported fewer steps
        doing = {rank: place.describe() or hang.doing[rank] for rank, place in places.items()}
        lagging = tuple(rank for rank, place in places.items() if not place.waits_in) or hang.lagging
        attempt.doing, attempt.lagging = doing, lagging
        attempt.fault = self._hang_error(replace(hang, lagging=lagging, doing=doing))

    def do_all_wait(self, attempt: Attempt) -> bool:
        """Return whether all workers here stand in a collective, by their stacks: somebody elsewhere holds them up."""
        places = self._places(attempt)
        return bool(places) and all(place.waits_in for place in places.values())

    def _places(self, attempt: Attempt) -> dict[int, Place]:
        """Return where the running workers stand; empty when not all tell, or when they use the runtime."""
        running = attempt.membership.running()
        records = [self._board.read(rank) for rank in running]
        if any(record.is_reported or record.ended_at for record in records):
            return {}
        read = {rank: read_place(self._logs[rank], self._stack_begins.get(rank, 0)) for rank in sorted(running)}
        places = {rank: place for rank, place in read.items() if place is not None}
        return places if len(places) == len(running) else {}

    def _hang_error(self, hang: Hang) -> HangTimeout:
        return HangTimeout(f"--hang_time_out {self._plan.hang_time_out_s:g}: {hang.describe()}")

    def reset(self) -> None:
        """Forget what the workers of the last attempt said."""
        self._board.reset()
        self._meeting.reset()
