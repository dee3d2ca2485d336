"""Who watches the workers of a job: for a hang, for ranks that never join, and for processes that linger."""

import os
import time
from contextlib import closing

import pytest
from fake_agents import FakeClock
from plans import plan_of, spec_of

from msrun import contract
from msrun.agent import watch as job_watch
from msrun.agent.attempt import Attempt
from msrun.agent.processes.process_control import Usage
from msrun.agent.processes.progress_board import Progress, ProgressBoard
from msrun.agent.timers import Timers
from msrun.agent.watch import Hang, JobWatch, LingerWatch, Watchdog, find_lagging
from msrun.cluster.membership import Membership
from msrun.errors import HangTimeout, RendezvousTimeout
from msrun.planning.placement.host import HostFacts

ProgressRecord = pytest.importorskip("msrun.runtime.progress", exc_type=ImportError).ProgressRecord

LIMIT_S = 30.0
COMPUTES = '  File "/home/me/train.py", line 41 in step\n'
WAITS = (
    f'  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier\n{COMPUTES}'
)
SILENT = Hang(31.0, (0, 1), {0: "sleeping", 1: "sleeping"})


class Watched:
    """Two workers that run, a watchdog that finds what the test wants, and what the watch has asked to end."""

    def __init__(self, folder, patch, hang_time_out_s=LIMIT_S):
        spec = spec_of(folder, log_dir=folder, hang_time_out_s=hang_time_out_s)
        plan = plan_of(spec, HostFacts("h", "127.0.0.1", (0,)))
        self.folder = folder
        self.found = None
        self.records = {0: Progress(), 1: Progress()}
        self.ended = []
        board = ProgressBoard(folder / "progress", 2)
        patch.setattr(board, "read", lambda rank: self.records[rank])
        patch.setattr(job_watch.Watchdog, "look", lambda *_: self.found)
        patch.setattr(job_watch, "request_stacks", lambda *_: None)
        self.told = []
        self.clock = FakeClock()
        self.timers = Timers(self.clock)
        self.watch = JobWatch(
            plan,
            plan.hosts[0],
            board,
            self.timers,
            lambda error, ranks: self.ended.append((error, ranks)),
            lambda kind, **fields: self.told.append((kind, fields)),
        )
        self.membership = self.watch.membership = Membership(range(2))
        for rank in range(2):
            self.membership.started(rank, os.getpid(), 0.0)

    def start(self):
        self.watch.start()

    def look_for_hang(self):
        _, action = self.timers._due["hang"]
        action()

    def attempt_with_stacks(self, *stacks):
        """Return the attempt that the hang has ended, when its workers have written where they stand."""
        for rank in range(2):
            (self.folder / f"worker_{rank}.log").write_text(f"Thread 0x1 (most recent call first):\n{COMPUTES}")
        self.watch.request_stacks("the job is stuck")
        for rank, text in enumerate(stacks):
            with (self.folder / f"worker_{rank}.log").open("a") as log:
                log.write(f"\nCurrent thread 0x1 (most recent call first):\n{text}")
        error, lagging = self.ended[-1]
        return Attempt(0, self.membership, fault=error, lagging=lagging)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    watched.start()
    watched.found = SILENT
    watched.look_for_hang()
    yield watched


def test_hang_ends_the_job_with_the_limit_and_the_ranks(watched):
    [(error, lagging)] = watched.ended
    assert isinstance(error, HangTimeout) and lagging == (0, 1)
    assert str(error) == "--hang_time_out 30: no progress for 31 s; running: ranks 0-1 (sleeping)"


def test_stacks_tell_which_rank_the_others_wait_for_and_where(watched):
    attempt = watched.attempt_with_stacks(WAITS, COMPUTES)
    assert not watched.watch.do_all_wait()
    found = watched.watch.explain_hang(attempt.fault)
    assert found is not None
    error, *told = found
    assert told == [(1,), {0: "waits in barrier at train.py:41 in step", 1: "at train.py:41 in step"}]
    assert "behind: rank 1 (at train.py:41 in step); rank 0 (waits in barrier" in str(error)


def test_ranks_that_linger_are_told_of_once_and_end_the_job_after_the_limit_which_begins_with_a_pause(watched):
    watched.records = dict.fromkeys(range(2), Progress(name="thread x", ended_at=time.monotonic() - 400.0))
    for pauses in (True, False):
        if pauses:
            watched.watch.note_pause()
        else:
            watched.start()
        watched.clock.advance(1.0)
        watched.timers.run_due()
        assert watched.told == [("lingering", {"global_rank": rank, "what": "thread x"}) for rank in range(2)]
        assert [ranks for _, ranks in watched.ended[1:]] == [(0, 1)] * (not pauses)
        watched.told.clear()


def test_hang_stays_as_it_was_found_where_a_rank_has_written_no_stacks(watched):
    attempt = watched.attempt_with_stacks(WAITS)
    assert watched.watch.explain_hang(attempt.fault) is None


DESERTED_S = 30.0


class Meeting:
    """Four running workers and their records."""

    def __init__(self, folder, limit_s):
        path = folder / "progress"
        self.board = ProgressBoard(path, 4)
        self.board.create()
        self.records = [ProgressRecord(str(path), rank) for rank in range(4)]
        self.membership = Membership(range(4))
        for rank in range(4):
            self.membership.started(rank, 100 + rank, 0.0)
        spec = spec_of(folder, log_dir=folder, cluster_time_out_s=limit_s, exit_time_out_s=DESERTED_S)
        plan = plan_of(spec, HostFacts("node-a", "127.0.0.1", (0,)))
        self.ended = []
        self.clock = FakeClock()
        self.timers = Timers(self.clock)
        self.watch = JobWatch(
            plan, plan.hosts[0], self.board, self.timers, lambda *found: self.ended.append(found), lambda *_, **__: None
        )
        self.watch.membership = self.membership

    def enter(self, phase, *ranks):
        for rank in ranks:
            self.records[rank].enter_phase(phase)

    def look(self, after_s):
        since = max(self.board.read(rank).waiting_since for rank in range(4))
        self.ended.clear()
        self.watch.look_at_meeting(since + after_s)
        return self.ended[0][0] if self.ended else None

    @property
    def missing(self):
        return self.ended[0][1]

    def close(self):
        self.board.close()
        self.records.clear()  # a worker keeps its own until it ends


@pytest.fixture
def meeting(tmp_path):
    with closing(Meeting(tmp_path, 10.0)) as made:
        yield made


def test_those_who_did_not_come_in_time_are_named_with_those_who_did(meeting):
    meeting.enter(contract.PHASE_JOINING, 0, 1, 3)
    assert meeting.look(9.0) is None
    error = meeting.look(11.0)
    assert isinstance(error, RendezvousTimeout)
    assert "1 of 4 workers have not joined the world, and others wait in init() for 11 s" in str(error)
    assert "missing on node-a: rank 2; came: ranks 0-1, 3" in str(error)
    assert meeting.missing == (2,)
    assert error.exit_code == 124


def test_rank_that_the_others_wait_for_in_their_first_collective_counts_as_missing(meeting):
    meeting.enter(contract.PHASE_JOINED, 0, 1, 3)
    assert meeting.look(11.0) is None, "nobody waits"
    meeting.records[0].begin_wait("the comparison of graphs by 4 ranks")
    error = meeting.look(11.0)
    assert "others wait in the comparison of graphs by 4 ranks for 11 s; missing on node-a: rank 2" in str(error)


def test_worker_that_ended_well_without_joining_is_named_as_soon_as_another_has_come(meeting):
    meeting.membership.exited(1, 0, 1.0)
    meeting.watch.note_done(1)
    assert meeting.look(1e6) is None, "nobody has joined"
    meeting.enter(contract.PHASE_JOINING, 0, 3)
    meeting.enter(contract.PHASE_PLAIN_TORCH, 2)
    error = meeting.look(0.0)
    assert error is not None
    assert str(error).startswith(
        "rank 1 ended with exit code 0 without joining the world, and ranks 0, 2-3 need it: every rank"
    )
    assert meeting.missing == (1,)
    assert error.exit_code == 3


@pytest.mark.parametrize("tell", [lambda watch: watch.note_absent((7,)), lambda watch: watch.note_done(1)])
def test_who_joins_a_world_that_somebody_has_left_out_is_found_soon(meeting, tell):
    meeting.membership.exited(1, 0, 1.0)
    tell(meeting.watch)
    meeting.enter(contract.PHASE_JOINED, 0)
    meeting.clock.advance(0.3)
    meeting.timers.run_due()
    assert meeting.ended


def test_rank_of_another_host_that_never_came_is_named_until_the_next_attempt(meeting):
    meeting.watch.note_absent((7,))
    meeting.enter(contract.PHASE_JOINED, 0)
    assert str(meeting.look(0.0)).startswith("rank 7 ended with exit code 0 without joining the world, and rank 0 ")
    meeting.watch.reset()
    meeting.enter(contract.PHASE_JOINED, 0)
    assert meeting.look(0.0) is None


def test_all_have_come_but_the_meeting_fails(meeting):
    meeting.enter(contract.PHASE_JOINING, 0, 1, 2, 3)
    error = meeting.look(11.0)
    assert "0 of 4 workers" in str(error)
    assert "missing on node-a: none; came: ranks 0-3" in str(error)
    assert meeting.missing == (0, 1, 2, 3)


def test_ranks_left_alone_in_a_collective_are_found_when_all_of_them_wait(meeting):
    meeting.enter(contract.PHASE_JOINED, 0, 1, 2, 3)
    for record in meeting.records:
        record.begin_wait("all_reduce of 8 ranks")
    assert meeting.look(DESERTED_S + 1) is None, "nobody has finished: they wait for another host"
    for record in meeting.records:
        record.end_wait()
    meeting.membership.exited(1, 0, 1.0)
    for rank in (0, 2):
        meeting.records[rank].begin_wait("all_reduce of 4 ranks")
    assert meeting.look(DESERTED_S + 1) is None, "rank 3 may still come to them"
    meeting.records[3].begin_wait("all_reduce of 4 ranks")
    assert meeting.look(DESERTED_S - 1) is None
    error = meeting.look(DESERTED_S + 1)
    assert isinstance(error, HangTimeout)
    assert "rank 1 on node-a ended with exit code 0 while ranks 0, 2-3 wait in all_reduce of 4 ranks" in str(error)


LINGER_LIMIT_S, HANG_S = 50.0, 100.0
RUNNING = {0: 100, 1: 101}


class Workers:
    """Two workers: a test says which of them linger, and what they do."""

    def __init__(self, folder, limit_s=LINGER_LIMIT_S):
        self.records = {rank: Progress(contract.PHASE_JOINED) for rank in RUNNING}
        self.cpu_s = dict.fromkeys(RUNNING.values(), 0.0)
        self.logs = {rank: folder / f"{rank}.log" for rank in RUNNING}
        board = self
        logs = {rank: [str(path)] for rank, path in self.logs.items()}
        self.watch, self.watchdog = LingerWatch(board, logs, limit_s), Watchdog(HANG_S, board, logs)
        self.now = 1000.0

    def read(self, rank):
        return self.records[rank]

    def tell(self, rank, step, **more):
        self.records[rank] = Progress(contract.PHASE_JOINED, step, **more)

    def look_on(self, until_s, between=lambda: None):
        """Look for a hang every interval for `until_s` seconds; None when there is none."""
        end = self.now + until_s
        while self.now < end:
            between()
            if (hang := self.watchdog.look(RUNNING, self.now)) is not None:
                return hang
            self.now += self.watchdog.interval_s
        return None

    def linger(self, *ranks, at=1000.0):
        for rank in ranks:
            self.records[rank] = Progress(contract.PHASE_LEFT, name=f"thread {rank}", ended_at=at)


@pytest.fixture
def workers(tmp_path, monkeypatch):
    made = Workers(tmp_path)
    monkeypatch.setattr(job_watch, "session_usage", lambda leaders: {pid: Usage(made.cpu_s[pid]) for pid in leaders})
    return made


def test_ranks_that_all_linger_without_a_sign_of_life_end_the_job(workers):
    workers.linger(0, 1)
    for now in (1001.0, 1000.0 + LINGER_LIMIT_S - 0.1):
        assert workers.watch.look(RUNNING, now)[1] is None
    _, error = workers.watch.look(RUNNING, 1000.0 + LINGER_LIMIT_S)
    assert str(error) == (
        "rank 0 has ended its program and waits for thread 0 (so does rank 1), without a sign of life for 50 s: "
        "end threads and atexit functions, or give more than --exit_time_out 50"
    )


def test_job_goes_on_while_one_rank_runs_its_program(workers):
    workers.linger(0)
    assert workers.watch.look(RUNNING, 1e6)[1] is None
    _, error = workers.watch.look({0: 100}, 1e6)
    assert error is not None and "so do" not in str(error)


def test_log_that_grows_is_a_sign_of_life(workers):
    workers.linger(0, 1)
    workers.watch.look(RUNNING, 1001.0)
    workers.logs[1].write_text("uploading")
    assert workers.watch.look(RUNNING, 1040.0)[1] is None
    assert workers.watch.look(RUNNING, 1040.0 + LINGER_LIMIT_S - 1)[1] is None
    assert workers.watch.look(RUNNING, 1040.0 + LINGER_LIMIT_S)[1] is not None


def test_processor_time_is_a_sign_of_life_where_it_is_more_than_a_trace(workers):
    workers.linger(0, 1)
    workers.watch.look(RUNNING, 1001.0)
    workers.cpu_s[100] = 1.0
    workers.watch.look(RUNNING, 1040.0)
    assert workers.watch.look(RUNNING, 1000.0 + LINGER_LIMIT_S)[1] is None
    workers.cpu_s[100] += 0.001
    assert workers.watch.look(RUNNING, 1040.0 + LINGER_LIMIT_S)[1] is not None


@pytest.mark.parametrize(
    "limit_s, at", [(0.0, 1000.0), (LINGER_LIMIT_S, -1000.0)], ids=["no limit", "its program has failed"]
)
def test_ranks_are_told_of_and_left_alone(tmp_path, monkeypatch, limit_s, at):
    workers = Workers(tmp_path, limit_s)
    workers.linger(0, 1, at=at)
    assert workers.watch.look(RUNNING, 1001.0) == ({0: "thread 0", 1: "thread 1"}, None)
    assert workers.watch.look(RUNNING, 1e9) == ({}, None)


def test_hang_is_found_after_the_limit_and_not_in_the_time_in_which_the_machine_slept(workers):
    assert workers.look_on(HANG_S / 2) is None
    workers.now += 1000 * HANG_S  # a laptop was closed
    assert workers.look_on(HANG_S - workers.watchdog.interval_s) is None
    hang = workers.look_on(3 * workers.watchdog.interval_s)
    assert hang is not None and hang.lagging == (0, 1) and hang.silent_s >= HANG_S
    assert hang.describe().startswith("no progress for 100 s; running: ranks 0-1")


@pytest.mark.parametrize("how", ["writes", "steps", "computes"])
def test_whoever_does_something_keeps_the_job_alive(workers, how):
    def work():
        if how == "writes":
            with workers.logs[1].open("ab") as log:
                log.write(b".")
        elif how == "steps":
            workers.tell(1, workers.records[1].steps + 1)
        else:
            workers.cpu_s[RUNNING[1]] += workers.watchdog.interval_s

    assert workers.look_on(3 * HANG_S, work) is None


@pytest.mark.parametrize(("waiting", "lagging"), [((0, 1), (0, 1)), ((0,), (1,))])
def test_rank_that_computes_for_ever_in_a_collective_or_while_another_waits_does_not(workers, waiting, lagging):
    for rank in RUNNING:
        wait = {"is_waiting": True, "waiting_since": workers.now, "name": "all_reduce of 2 ranks"}
        workers.tell(rank, 41, **(wait if rank in waiting else {}))

    def compute():
        for pid in RUNNING.values():
            workers.cpu_s[pid] += workers.watchdog.interval_s

    hang = workers.look_on(2 * HANG_S, compute)
    assert hang is not None and hang.lagging == lagging
    if lagging == (1,):
        workers.tell(1, 1)
        assert workers.look_on(2 * HANG_S, compute) is None, "in its first step it may"
        assert "behind: rank 1 (step 41); rank 0 (step 41, waits in all_reduce of 2 ranks for" in hang.describe()


def test_stopped_worker_is_the_one_that_holds_the_others_up(workers, monkeypatch):
    monkeypatch.setattr(job_watch, "kernel_state", lambda pid: "stopped by a signal" if pid == 101 else "sleeping")
    hang = workers.look_on(2 * HANG_S)
    assert (
        hang is not None
        and hang.lagging == (1,)
        and "behind: rank 1 (before its first step, stopped by a signal)" in hang.describe()
    )


def test_where_nobody_waits_the_ranks_with_the_fewest_steps_are_behind():
    running = dict.fromkeys(range(3), os.getpid())
    records = {rank: Progress(steps=steps) for rank, steps in enumerate((4, 3, 4))}
    assert find_lagging(records, running) == (1,)
    records[0] = Progress(steps=4, is_waiting=True)
    assert find_lagging(records, running) == (1, 2), "one waits: for all that are in no collective"
