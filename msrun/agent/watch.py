"""Everything that looks at running workers from time to time: for a hang, for who waits for whom, for what lingers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msrun import contract
from msrun.agent.evidence import Place, kernel_state, read_place, request_stacks
from msrun.agent.processes.process_control import session_usage
from msrun.agent.processes.progress_board import Progress, ProgressBoard, request_dumps
from msrun.agent.timers import Timers
from msrun.cluster.membership import Membership, WorkerState, describe_absent
from msrun.errors import ClusterError, HangTimeout, RendezvousTimeout
from msrun.planning.hosts import name_ranks
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.record import Record

LOOKS_PER_LIMIT = 20
MIN_INTERVAL_S = 0.2
ABSENT_LOOK_S = 0.25  # where a rank has left out a world that somebody may join
MAX_INTERVAL_S = 5.0


def _where(waiting: dict[int, Progress]) -> str:
    record = next(iter(waiting.values()))
    return "init()" if record.phase == contract.PHASE_JOINING else record.name or "a collective"


INTERVAL_S = 1.0
BUSY_SHARE = 0.001  # share of a core that is a sign of life: an upload needs little


class LingerWatch:
    """Looks at the progress board from time to time."""

    def __init__(self, board: ProgressBoard, logs: Mapping[int, Sequence[str]], limit_s: float) -> None:
        """`limit_s`: how long workers that linger may show no sign of life; 0 = no limit."""
        self._board, self._logs, self._limit_s = board, logs, limit_s
        self.begin()

    def begin(self) -> None:
        self._told: set[int] = set()
        self._signs: dict[int, tuple[int, float, float]] = {}
        """Global rank -> size of its logs, processor seconds, and when it last showed a sign of life."""
        self.since = 0.0  # when the workers went on after a pause; what was before does not count

    def look(self, running: Mapping[int, int], now: float) -> tuple[dict[int, str], HangTimeout | None]:
        """Return the ranks that have been found to linger since the last look, with what each waits for, and why the
        job is to be ended: all that run linger, and none has done anything for the limit. One whose program has failed
        ends itself, with its own status. `running`: global rank -> pid."""
        records = {rank: self._board.read(rank) for rank in running}
        lingering = {rank: record for rank, record in records.items() if record.ended_at}
        new = {rank: record.name for rank, record in lingering.items() if rank not in self._told}
        self._told.update(new)
        failed = any(record.ended_at < 0 for record in lingering.values())
        if not self._limit_s or failed or not lingering or len(lingering) < len(running):
            return new, None
        used = session_usage(running.values())
        for rank, record in lingering.items():
            size, used_s = sum(map(size_of, self._logs[rank])), used[running[rank]].cpu_s
            old_size, old_s, at = self._signs.get(rank, (-1, 0.0, record.ended_at))
            if size != old_size or used_s - old_s > BUSY_SHARE * (now - at):
                self._signs[rank] = (size, used_s, now if old_size >= 0 else at)
        idle_s = now - max(self.since, *(at for rank, (_, _, at) in self._signs.items() if rank in lingering))
        if idle_s < self._limit_s:
            return new, None
        rank, record = next(iter(lingering.items()))
        others = sorted(lingering.keys() - {rank})
        more = f" (so {'does' if len(others) == 1 else 'do'} {name_ranks(others)})" if others else ""
        return new, HangTimeout(
            f"rank {rank} has ended its program and waits for {record.name}{more}, without a sign of life for "
            f"{idle_s:.0f} s: end threads and atexit functions, or give more than --exit_time_out {self._limit_s:g}"
        )


WORK_SHARE = 0.05  # share of a core that counts as work; the threads of an idle process group use less
HANG_LOOKS_PER_LIMIT = 10


class _Watch(Record, frozen=False):
    """What was seen of one worker, and when it last got on."""

    log_bytes: int
    position: tuple[int, int, int]
    cpu_s: float
    alive_at: float  # last progress of any kind
    told_at: float  # last progress that it told itself: log, step or collective


class Hang(Record):
    """A job without progress."""

    silent_s: float
    lagging: tuple[int, ...]  # ranks that the others wait for; all running ones when that cannot be known
    doing: Mapping[int, str]  # what every running rank is doing, in words

    def describe(self) -> str:
        parts = [f"no progress for {self.silent_s:.0f} s"]
        waiting = [rank for rank in self.doing if rank not in self.lagging]
        name = "behind" if waiting else "running"
        words = {self.doing[rank] for rank in self.lagging}
        parts.append(f"{name}: {name_ranks(self.lagging)}{' (' + words.pop() + ')' if len(words) == 1 else ''}")
        if waiting:
            parts.append(f"{name_ranks(waiting)} ({self.doing[waiting[0]]})")
        return "; ".join(parts)


class Watchdog:
    """Finds out that a job makes no progress any more, and which ranks hold it up. Owned by the agent's event loop.
    Progress of a worker is a longer log, a new step or collective on the board, or processor time of its session. That
    does not count while it waits in a collective (some libraries spin there), nor, past its first step, in which
    networks are captured, while another has been waiting for the whole limit: who computes for ever is stuck, too."""

    def __init__(self, limit_s: float, board: ProgressBoard, logs: Mapping[int, Sequence[str]]) -> None:
        self.interval_s = min(limit_s / HANG_LOOKS_PER_LIMIT, MAX_INTERVAL_S)  # how often `look` wants to be called
        self._limit_s, self._board, self._logs = limit_s, board, logs
        self._watches: dict[int, _Watch] = {}
        self._last_look: float | None = None

    def forget(self) -> None:
        """Forget what was seen: nobody could make progress meanwhile."""
        self._watches.clear()

    def look(self, running: Mapping[int, int], now: float) -> Hang | None:
        """Look once. `running`: global rank -> pid of every worker that runs. `now`: monotonic seconds."""
        used = session_usage(running.values())
        elapsed_s = now - self._last_look if self._last_look is not None else 0.0
        if elapsed_s > 3 * self.interval_s + 1.0:
            self.forget()  # the machine or msrun itself was asleep
        self._last_look = now
        records = {rank: self._board.read(rank) for rank in running}
        for rank, pid in running.items():
            self._compare(rank, records[rank], used[pid].cpu_s, elapsed_s, now)
        if not running or not self._is_hung(records, now):
            return None
        silent_s = now - max(self._watches[rank].told_at for rank in running)
        return Hang(silent_s, find_lagging(records, running), describe_all(records, running, now))

    def _compare(self, rank: int, record: Progress, cpu_s: float, elapsed_s: float, now: float) -> None:
        size = sum(map(size_of, self._logs[rank]))
        position = (record.phase, record.steps, record.collectives)
        watch = self._watches.get(rank)
        if watch is None:
            self._watches[rank] = _Watch(size, position, cpu_s, now, now)
            return
        if size != watch.log_bytes or position != watch.position:
            watch.told_at = watch.alive_at = now
        elif not record.is_waiting and elapsed_s > 0 and (cpu_s - watch.cpu_s) / elapsed_s >= WORK_SHARE:
            watch.alive_at = now
        watch.log_bytes, watch.position, watch.cpu_s = size, position, cpu_s

    def _is_hung(self, records: Mapping[int, Progress], now: float) -> bool:
        watches = [self._watches[rank] for rank in records]
        if any(now - watch.told_at < self._limit_s for watch in watches):
            return False
        if all(now - watch.alive_at >= self._limit_s for watch in watches):
            return True
        if not any(record.is_waiting and now - record.waiting_since >= self._limit_s for record in records.values()):
            return False
        return all(
            record.is_waiting or record.is_past_first_step or now - self._watches[rank].alive_at >= self._limit_s
            for rank, record in records.items()
        )


def find_lagging(records: Mapping[int, Progress], running: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks that the others wait for: stopped ones, else those in no collective, else the ones behind."""
    stopped = [rank for rank, pid in running.items() if kernel_state(pid).startswith("stopped")]
    if stopped:
        return tuple(sorted(stopped))
    away = [rank for rank, record in records.items() if not record.is_waiting]
    if away and len(away) < len(records):
        return tuple(sorted(away))
    places = {rank: (record.steps, record.collectives) for rank, record in records.items()}
    last = min(places.values(), default=(0, 0))
    return tuple(sorted(rank for rank, place in places.items() if place == last))


def describe_all(records: Mapping[int, Progress], running: Mapping[int, int], now: float) -> dict[int, str]:
    """Return what every running rank is doing: by its own record, else by the kernel."""
    words = {}
    for rank, pid in running.items():
        state = kernel_state(pid)
        told = records[rank].describe(now)
        words[rank] = f"{told}, {state}" if told and state.startswith("stopped") else told or state
    return dict(sorted(words.items()))


def size_of(path: str) -> int:
    """Return the bytes in a log; 0 when there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - half the cost of Path.stat, many times a second
    except OSError:
        return 0


class JobWatch:
    """Watches the workers of one attempt at a time. Of plain torch the board tells only who has joined."""

    def __init__(
        self,
        plan: LaunchPlan,
        host: HostPlan,
        board: ProgressBoard,
        timers: Timers,
        on_stuck: Callable[[ClusterError, tuple[int, ...]], None],
        tell: Callable[..., None],
    ) -> None:
        """`on_stuck`: gets the reason and the ranks that others wait for. `tell`: told of ranks that linger."""
        self._plan, self._host, self._board, self._timers = plan, host, board, timers
        self._on_stuck, self._tell = on_stuck, tell
        self.membership = Membership(())  # of the attempt that is watched
        self._logs = {worker.global_rank: worker.last_words_path for worker in host.workers}
        written = {worker.global_rank: worker.log_paths for worker in host.workers}
        self._is_patient = plan.interactive_rank is not None  # a rank may wait for its user, and the others for it
        self._linger = LingerWatch(board, written, plan.exit_time_out_s)
        self._watchdog = Watchdog(plan.hang_time_out_s, board, written)
        self._absent: list[int] = []  # ranks here that have ended with exit code 0 and never joined the world
        self._absent_elsewhere: tuple[int, ...] = ()
        self._since = 0.0  # when the workers went on after a pause; what was before does not count
        self._hang: Hang | None = None  # the newest that was found
        self._stack_begins: dict[int, int] = {}  # global rank -> size of its log when its stacks were requested

    def start(self) -> None:
        """Watch the workers until `stop`."""
        self._linger.begin()
        self._watchdog.forget()
        self._timers.every("linger", INTERVAL_S, self._look_at_ends)
        self._look_at_meeting_often()
        if self._plan.hang_time_out_s > 0 and not self._is_patient:
            self._timers.every("hang", self._watchdog.interval_s, self._look_for_hang)

    def note_pause(self) -> None:
        self._linger.since = self._since = time.monotonic()
        self._watchdog.forget()

    def stop(self) -> None:
        self._timers.cancel("meeting", "hang", "linger")

    def reset(self) -> None:
        """Forget what the workers of the last attempt said."""
        self._board.reset()
        self._absent.clear()
        self._absent_elsewhere = ()

    # -- who has joined the world, and who waits for whom there -------------------------------------------------------

    def note_done(self, global_rank: int) -> None:
        """A rank has ended with exit code 0: look from now on, and at the end, whether others wait for it to join."""
        was_urgent = self._is_urgent
        if not self._board.read(global_rank).has_come:
            self._absent.append(global_rank)
        if self._is_urgent and (self.membership.is_over or not was_urgent) and not self._judge_absent():
            self._look_at_meeting_often()

    def note_absent(self, global_ranks: tuple[int, ...]) -> None:
        """Ranks of other hosts have ended with exit code 0 and never joined the world."""
        self._absent_elsewhere = global_ranks
        if not self._judge_absent():
            self._look_at_meeting_often()

    @property
    def _is_urgent(self) -> bool:
        """Whether somebody has ended and never came: whoever joins the world waits in vain."""
        return bool(self._absent or self._absent_elsewhere)

    def _look_at_meeting_often(self) -> None:
        limit_s = self._plan.cluster_time_out_s
        share_s = limit_s / LOOKS_PER_LIMIT if limit_s >= 0 else MAX_INTERVAL_S
        interval_s = ABSENT_LOOK_S if self._is_urgent else min(max(share_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self._timers.every("meeting", interval_s, lambda: self.look_at_meeting(time.monotonic()))

    def come(self) -> tuple[int, ...]:
        """Return the ranks of this host that have joined the world, or try to."""
        return tuple(rank for rank, record in self._board.records(self.membership.members).items() if record.has_come)

    def has_begun(self) -> bool:
        """Return whether a rank of this host has joined the world, tries to, or has reported progress."""
        records = self._board.records(self.membership.members)
        return any(record.has_come or record.steps for record in records.values())

    def _judge_absent(self) -> bool:
        """End the job where the world can never be whole: somebody has joined it, and not all can still come."""
        if not self._is_urgent or not (come := self.come()):
            return False
        absent = (*self._absent, *self._absent_elsewhere)
        self._on_stuck(ClusterError(describe_absent(absent, come)), tuple(self._absent))
        return True

    def look_at_meeting(self, now: float) -> None:
        """End the job where those who wait will wait for ever. `now`: monotonic seconds."""
        if self._judge_absent() or self._is_patient:
            return
        records = self._board.records(self.membership.members)
        running = {rank: records[rank] for rank in self.membership.running()}
        waiting = {rank: record for rank, record in running.items() if record.is_waiting}
        came = [rank for rank, record in records.items() if record.is_reported]
        missing = tuple(rank for rank in records if rank not in came)
        joining = {rank: record for rank, record in waiting.items() if record.phase == contract.PHASE_JOINING}
        if late := waiting if missing else joining:
            self._judge_late(late, came, missing, now)
        else:
            self._judge_deserted(running, now)

    def _judge_late(self, waiting: dict[int, Progress], came: list[int], missing: tuple[int, ...], now: float) -> None:
        limit_s = self._plan.cluster_time_out_s
        waited_s = now - max(self._since, min(record.waiting_since for record in waiting.values()))
        if limit_s < 0 or waited_s < limit_s:
            return
        text = (
            f"--cluster_time_out {limit_s:g}: {len(missing)} of {len(came) + len(missing)} workers have not joined the "
            f"world, and others wait in {_where(waiting)} for {waited_s:.0f} s; "
            f"missing on {self._host.name}: {name_ranks(missing) if missing else 'none'}; came: {name_ranks(came)}"
        )
        self._on_stuck(RendezvousTimeout(text), missing or tuple(waiting))

    def _judge_deserted(self, records: dict[int, Progress], now: float) -> None:
        done, limit_s = self.membership.ranks_in(WorkerState.DONE), self._plan.exit_time_out_s
        if not limit_s or not done or not records or not all(record.is_waiting for record in records.values()):
            return
        waited_s = now - max(self._since, *(record.waiting_since for record in records.values()))
        if waited_s < limit_s:
            return
        text = (
            f"{name_ranks(done)} on {self._host.name} ended with exit code 0 while {name_ranks(records)} "
            f"wait{'s' if len(records) == 1 else ''} in {_where(records)}, "
            f"for {waited_s:.0f} s already (--exit_time_out {limit_s:g}): every rank has to call the same collectives"
        )
        self._on_stuck(HangTimeout(text), tuple(done))

    # -- who lingers, and who gets on ---------------------------------------------------------------------------------

    def _look_at_ends(self) -> None:
        running = self.membership.running()
        new, error = self._linger.look(running, time.monotonic())
        for rank, what in new.items():
            self._tell("lingering", global_rank=rank, what=what)
        if error is not None:
            self._on_stuck(error, tuple(sorted(running)))

    def _look_for_hang(self) -> None:
        if hang := self._watchdog.look(self.membership.running(), time.monotonic()):
            self._hang = hang
            self._on_stuck(self._hang_error(hang), hang.lagging)

    def _hang_error(self, hang: Hang) -> HangTimeout:
        return HangTimeout(f"--hang_time_out {self._plan.hang_time_out_s:g}: {hang.describe()}")

    def doing(self) -> dict[int, str]:
        """Return what running workers say that they are doing now, and which of them are stopped."""
        running = self.membership.running()
        records = self._board.records(running)
        words = describe_all(records, running, time.monotonic())
        return {rank: text for rank, text in words.items() if records[rank].describe(0.0) or "stopped" in text}

    def left(self) -> frozenset[int]:
        records = self._board.records(self.membership.running())
        return frozenset(rank for rank, record in records.items() if record.phase == contract.PHASE_LEFT)

    def request_stacks(self, headline: str) -> None:
        running = self.membership.running()
        self._stack_begins = {rank: size_of(self._logs[rank]) for rank in running}
        request_stacks({pid: self._logs[rank] for rank, pid in running.items()}, headline)
        if prefix := self._host.common_env.get(contract.MSRUN_FLIGHT_RECORDER):
            request_dumps(prefix, running)

    def explain_hang(self, fault: BaseException | None) -> tuple[HangTimeout, tuple[int, ...], dict[int, str]] | None:
        """Return error, ranks that lag and what each does, by the stacks; None where workers say that themselves."""
        hang, places = self._hang, self._places()
        if hang is None or not isinstance(fault, HangTimeout) or not places or hang.lagging != tuple(places):
            return None  # somebody cannot say where it stands, is stopped, or has reported fewer steps
        doing = {rank: place.describe() or hang.doing[rank] for rank, place in places.items()}
        lagging = tuple(rank for rank, place in places.items() if not place.waits_in) or hang.lagging
        return self._hang_error(replace(hang, lagging=lagging, doing=doing)), lagging, doing

    def do_all_wait(self) -> bool:
        """Return whether all workers here stand in a collective, by their stacks: somebody elsewhere holds them up."""
        places = self._places()
        return bool(places) and all(place.waits_in for place in places.values())

    def _places(self) -> dict[int, Place]:
        """Return where the running workers stand; empty when not all tell, or when they use the runtime."""
        running = sorted(self.membership.running())
        if any(record.is_reported or record.ended_at for record in self._board.records(running).values()):
            return {}
        read = [(rank, read_place(self._logs[rank], self._stack_begins.get(rank, 0))) for rank in running]
        return {rank: place for rank, place in read if place} if all(place for _, place in read) else {}
