"""The agent's event loop: what happens on a host and what its coordinator orders in, what is asked and told out."""

import contextlib
import errno
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
from failure_reports import fault_of
from fake_agents import FakeClock
from supervised_job import Job, kinds

from msrun import contract
from msrun.agent import watch as job_watch
from msrun.agent.attempt import OwnProcesses
from msrun.agent.evidence import MemoryKillWatch, Place
from msrun.agent.processes.progress_board import Progress
from msrun.agent.processes.server_handle import FIRST_SERVER_ID, SCHEDULER_ID
from msrun.agent.timers import Timers
from msrun.agent.watch import Hang
from msrun.cluster.membership import WorkerState
from msrun.errors import ClusterError, OwnProcessLost, PeerFailed
from msrun.planning.program import Program
from msrun.planning.record import encode_record

FAILED, DONE, STOPPED = WorkerState.FAILED, WorkerState.DONE, WorkerState.STOPPED
LOST = f"lose {SCHEDULER_ID} 9"
KILLED = f"lose {SCHEDULER_ID}"
SERVER_LOST = f"lose {FIRST_SERVER_ID} 7"
CTRL_Z, GO_ON = "signal SIGTSTP", "signal SIGCONT"
TWICE, LIMIT, FORWARDS = {"max_restarts": 2}, {"cluster_time_out_s": 60}, {"forward_signals": (signal.SIGUSR1,)}
BEGUN = "ready, scheduler"
LATE = "--cluster_time_out 60: 1 of 2 workers were not started in time on node-a (ranks 1)"

ALONE = [
    # what happens: options, events, what the fork server was asked for, and how the job ends or why it goes on
    ("all workers end well", {}, "run, exit 0, exit 1", "start start", "over: all workers ended"),
    ("a worker fails", {}, "run, exit 0 7", "start start stop", "goes on: rank 0 failed first: exit code 7"),
    ("it starts again", {}, "run, fail, again", "start start stop sweep start", "goes on"),
    ("it fails twice", {}, "run, fail, again, start 0, start 1, fail", "stop", "over: rank 0 failed first"),
    ("there is never one", {}, "run, fail, swept, wait 11", "sweep", "over: cannot start again: the"),
    ("the delay is not over", TWICE, "run, fail, again, start 0, start 1, fail, again", "sweep", "goes on"),
    ("the delay is over", TWICE, "run, fail, again, start 0, start 1, fail, again, wait 1", "sweep start", "goes on"),
    ("nobody sweeps", {}, "run, fail, wait 10", "sweep", "over: the fork server ended"),
    ("somebody survives", {}, "run, fail, swept 4711", "sweep", "over: cannot start again: [4711]"),
    ("interrupted between two attempts", {}, "run, fail, signal SIGINT, swept", "sweep", "over: stopped by"),
    ("interrupted before anything", {}, "signal SIGTERM, ready", "", "over: stopped by SIGTERM"),
    ("interrupted in the start", {}, f"{BEGUN}, signal SIGTERM", "start start stop", "goes on: stopped by SIGTERM"),
    ("interrupted after a failure", {}, "run, exit 0 7, signal SIGTERM, told, exit 1 7", "stop", "over: rank 0 failed"),
    ("one is never started", {}, f"{BEGUN}, signal SIGTERM, start 0, told 1, killed 0 15", "stop", "over: stopped"),
    ("it was told to end", {}, "run, signal SIGTERM, told, fail", "stop", "over: stopped by SIGTERM"),
    ("a signal for workers", FORWARDS, "run, exit 0, signal SIGUSR1", "start signal", "goes on"),
    (
        "a signal comes early",
        FORWARDS,
        f"{BEGUN}, signal SIGUSR1, start 0, start 1",
        "start" + 3 * " signal",
        "goes on",
    ),
    ("workers start too late", LIMIT, f"{BEGUN}, start 0, wait 60", "start stop", f"goes on: {LATE}"),
    ("the limit ends with the last", LIMIT, "run, wait 61", "start", "goes on"),
    ("a stop takes too long", {"grace_s": 5.0}, "run, exit 0 7, wait 8", "prepare", "goes on"),
    ("the fork server ends alone", {"max_restarts": 0}, "run, hangup", "", "over: the fork server ended"),
    ("another takes its place", {}, "run, hangup, ready, scheduler, store", "prepare start start", "goes on"),
    ("the other ends, too, before it begins", {}, "run, hangup, hangup", "", "over: the fork server ended"),
    ("the scheduler ends by itself", {}, f"run, {LOST}, told, fail", "stop", "over: the scheduler ended (exit code 9)"),
    ("the scheduler is killed", {}, f"run, {KILLED}, told, fail", "prepare", "goes on"),
    (
        "it is paused and goes on",
        LIMIT,
        f"{BEGUN}, start 0, {CTRL_Z}, {CTRL_Z}, wait 60, {GO_ON}, {GO_ON}, wait 59",
        "start pause resume",
        "goes on",
    ),
    ("it is paused and ended", {}, f"run, {CTRL_Z}, signal SIGTERM, {GO_ON}", "start pause stop", "goes on: stopped"),
    (
        "SIGCONT is for workers",
        {"forward_signals": (signal.SIGCONT,)},
        f"run, {GO_ON}, {CTRL_Z}, {GO_ON}",
        "start signal pause resume",
        "goes on",
    ),
    ("Ctrl-C comes twice", {}, "run, signal SIGINT, signal SIGINT", "start stop stop", "goes on: stopped by SIGINT"),
    ("a server ends beside them", {}, f"run, {SERVER_LOST}", "stop", "goes on: server 0 "),
    ("a server ends while they are stopped", {}, f"run, signal SIGTERM, {SERVER_LOST}", "stop", "goes on: stopped by"),
]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.fixture
def host(tmp_path):
    """Node 1 of two."""
    made = Job(tmp_path, node_rank=1)
    made.do("run")
    made.heard()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("options", "steps", "asked", "end"), [row[1:] for row in ALONE], ids=[row[0] for row in ALONE]
)
def test_job_of_one_host(options, steps, asked, end, tmp_path):
    job = Job(tmp_path, **options)
    job.do(*steps.split(", "))
    heard = " ".join(kinds(job.heard()))
    assert heard.endswith(asked) and (asked or "start" not in heard)
    state, _, reason = end.partition(": ")
    assert job.loop.is_over == (state == "over")
    assert not reason or job.attempt.end_reason().startswith(reason)
    for kind in ("failed", "ended"):
        told = [one["attempt"] for one in job.told_of(kind)]
        assert told == sorted(set(told)), "once of each attempt"
    job.close()


def test_every_moment_of_a_job_is_told_in_order(job):
    (prepare,) = job.heard()
    told = {"preload": [], "start_method": "auto", "run_dir": job.plan.run_dir, "blas_threads": 1}
    assert prepare == {"type": "prepare", **told}
    job.do("run", "fail", "again")
    failed = {"kind": "exited", "how": "exit code 7", "status": 7 << 8, "state": "failed"}
    reason = "rank 0 failed first: exit code 7"
    assert job.moments.seen == [
        {"kind": "preparing", "preload": []},
        {"kind": "ready", "start_method": "fork", "reason": "", "prepare_s": 0.0},
        {"kind": "scheduler", "pid": 100},
        *({"kind": "started", "global_rank": rank, "pid": 1 << 23} for rank in range(2)),
        {"kind": "running", "world_size": 2},
        {**failed, "global_rank": 0},
        {"kind": "stopping", "reason": "rank 0 ended with exit code 7"},
        {**failed, "global_rank": 1},
        {"kind": "restarting", "attempt": 1, "delay_s": 0.0, "reason": reason, "global_ranks": (0,)},
    ]


def test_words_about_an_attempt_that_is_over_do_not_end_the_next_one(job):
    job.do("run", "fail", "again", "start 0", "start 1")
    job.say("told", attempt=0, not_started=[])
    job.do("exit 1 7")
    assert job.attempt.membership.members[1].state is FAILED, "by itself, not stopped by msrun"


def test_first_failure_stops_the_others_with_their_grace(job):
    for worker in job.plan.workers:
        Path(worker.log_path).write_text("EOFError: EOF when reading a line\n")
    job.do("run", "exit 0 7")
    assert job.heard()[-1] == {"type": "stop", "signum": signal.SIGTERM, "grace_s": job.plan.grace_s, "attempt": 0}
    job.do("told", "killed 1 SIGTERM")
    assert [one.state for one in job.loop.result.attempts[0].membership.members.values()] == [FAILED, STOPPED]
    assert job.loop.result.attempts[0].peak_bytes == {0: 7.0, 1: 7.0}
    first, other = job.loop.result.attempts[0].membership.members.values()
    assert first.hint == "its standard input is empty: --interactive=0 gives it yours" and other.hint == ""


def test_worker_that_is_killed_in_the_end_is_told_of(job):
    job.do("run", "signal SIGINT", "told")
    job.say("killed", process_ids=[0], grace_s=5.0)
    job.do("signal SIGINT")
    assert job.heard()[-1] == {"type": "stop", "signum": signal.SIGKILL, "grace_s": 0.0, "attempt": 0}
    job.say("killed", process_ids=[1], grace_s=0.0)
    hints = [one.hint for one in job.attempt.membership.members.values()]
    assert hints == ["killed: --grace 5 s was over", "killed: by a second signal"]
    assert [moment["text"] for moment in job.moments.of("note")] == [
        "rank 0 killed: --grace 5 s was over; give more, if their work is to end first",
        "rank 1 killed: by a second signal",
    ]


def test_ctrl_z_stops_the_job_and_msrun_itself_until_it_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(job_watch.JobWatch, "note_pause", noted := mock.Mock())
    with contextlib.closing(Job(tmp_path, stop_self=mock.Mock())) as job:
        job.do("run", CTRL_Z)
        assert kinds(job.heard())[-2:] == ["pause", "resume"]
        assert job.stop_self.call_count == noted.call_count == 1


def test_job_that_ends_for_good_says_why_it_does_not_start_again(tmp_path):
    job = Job(tmp_path, restart_on=(9,))
    job.do("run", "fail")
    report = job.loop.result.report
    assert report is not None and report.failure.reason.endswith("not started again: --restart_on does not name 7")
    job.close()


@pytest.mark.parametrize(
    ("start_method", "reason"), [("fork", "threads were started by imports"), ("auto", "asked for")]
)
def test_fork_that_is_not_possible_is_refused_or_exec_takes_its_place(start_method, reason, tmp_path):
    job = Job(tmp_path, start_method=start_method)
    job.heard()
    job.say("ready", start_method="exec", reason=reason, prepare_s=0.0)
    if start_method == "fork":
        assert job.attempt.end_reason() == f"--start_method fork: not possible here: {reason}" and job.loop.is_over
    else:
        assert [process["use_exec"] for process in job.heard()[1]["processes"]] == [True, True]
    job.close()


def test_what_the_fork_server_cannot_do_ends_the_job_in_its_words(job, tmp_path):
    job.do("ready", "start 0")
    job.say("cannot_start", reason="cannot start worker 1: no room")
    assert job.attempt.end_reason() == "cannot start worker 1: no room, on node-a"


def test_process_of_msruns_own_that_stays_stopped_ends_the_attempt(job, monkeypatch):
    monkeypatch.setattr(OwnProcesses, "look_for_stopped", lambda *_: OwnProcessLost("the scheduler has been stopped"))
    job.do("run", f"wait {10**9}")
    assert job.attempt.end_reason() == "the scheduler has been stopped"


def test_end_of_a_worker_that_was_killed_or_runs_no_test_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryKillWatch, "explain", lambda _, pid: f"it took the memory of {pid}")
    with contextlib.closing(Job(tmp_path / "killed")) as job:
        job.do("run", "killed 0 SIGKILL")
        assert job.attempt.membership.members[0].hint == f"it took the memory of {1 << 23}"
    with contextlib.closing(Job(tmp_path, program=Program("module", "pytest"))) as job:
        job.do("run", "exit 0 5")
        assert job.attempt.membership.members[0].hint.startswith("pytest found no test there")
        assert not job.attempt.has_failed


def test_scheduler_that_has_closed_its_channel_is_not_listened_to_any_more(job):
    job.do("run")
    before = len(job.selector.get_map())
    job.scheduler.close()
    job.settle()
    assert len(job.selector.get_map()) == before - 1 and not job.attempt.has_failed


class Unfit(Job):
    def check_again(self, survivors):
        raise ClusterError("no room")


def test_lost_fork_server_is_replaced_only_on_a_host_that_is_fit(tmp_path):
    with contextlib.closing(Job(tmp_path)) as job:
        server, scheduler = job.server, job.scheduler
        job.do("run")
        (tmp_path / "run" / "left").touch()
        job.do("hangup", "ready")
        assert server is not job.server and scheduler.receive() == [] and scheduler.is_closed
        assert {one.state for one in job.loop.result.attempts[0].membership.members.values()} == {STOPPED}
        assert job.told_of("ended")[0]["attempt"] == 0 and len(job.selector.get_map()) == 4
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["progress"]
    with contextlib.closing(Unfit(tmp_path / "unfit")) as job:
        job.do("run", "hangup")
        assert job.attempt.end_reason() == "cannot start again: no room" and job.loop.is_over


def test_terminal_ends_with_its_server_and_where_none_can_be_made_the_job_ends(tmp_path):
    terminal = mock.Mock(global_rank=0)
    terminal.given_to.side_effect = [[], [], OSError(errno.ENOSPC, "No space left on device")]
    with contextlib.closing(Job(tmp_path, terminal=terminal)) as job:
        assert terminal.register.call_args == mock.call(job.selector)
        for step, count in (("run", 0), ("exit 1", 0), ("exit 0", 1)):
            job.do(step)
            assert terminal.end_attempt.call_count == count
    with contextlib.closing(Job(tmp_path / "again", terminal=terminal)) as job:
        job.do("run", "hangup")
        assert terminal.end_attempt.call_count == 2
        job.do("ready", "scheduler", "store")
        words = "--interactive: cannot make a terminal on node-a: No space left on device"
        assert job.attempt.end_reason() == words and job.loop.is_over


def test_run_directory_that_cannot_be_made_is_named(job, tmp_path):
    (tmp_path / "run").touch()
    job.do("ready")
    assert f"cannot make {tmp_path}/run: File exists; set TMPDIR" in job.attempt.end_reason() and job.loop.is_over


# -- a host of several -------------------------------------------------------------------------------------------------


def stop(host, attempt=0, node_rank=0, *, goes_on=False, **more):
    """A host has failed."""
    report = encode_record(fault_of(node_rank, "rank 5 failed", 9, **more))
    host.order("stop", attempt=attempt, report=report, goes_on=goes_on)


def test_failure_here_is_told_and_stops_the_own_workers_at_once(host):
    host.do("exit 0 7")
    assert kinds(host.heard()) == ["stop"], "without an order"
    host.do("exit 1 7")
    (failed,) = host.told_of("failed")
    assert (failed["attempt"], failed["report"]["can_restart"], failed["report"]["is_unfit"]) == (0, True, False)
    assert failed["report"]["failure"]["first_failure"]["global_rank"] == 2
    (ended,) = host.told_of("ended")
    assert ended["report"]["failure"]["exit_code"] == 7 and ended["can_continue"]
    host.do("wait 3")
    assert not host.moments.of("waiting"), "it has not finished"


def test_failure_elsewhere_stops_the_workers_here(host):
    stop(host, attempt=1)
    assert host.heard() == [] and host.attempt.fault is None, "another attempt"
    stop(host)
    assert kinds(host.heard()) == ["stop"] and host.told_of("failed") == []
    fault = host.attempt.fault
    assert isinstance(fault, PeerFailed) and (str(fault), fault.exit_code) == ("rank 5 failed", 9)
    assert host.loop.result.report == fault_of(0, "rank 5 failed", 9)
    host.do("told", "exit 0", "exit 1")
    assert [ended["report"] for ended in host.told_of("ended")] == [None], "it is not this host's"


@pytest.mark.parametrize(
    ("phase", "steps", "has_come", "has_begun"),
    [
        (contract.PHASE_UNKNOWN, 0, False, False),
        (contract.PHASE_UNKNOWN, 1, False, True),
        (contract.PHASE_JOINED, 0, True, True),
    ],
)
def test_workers_that_end_well_are_told_with_whether_they_had_come(host, phase, steps, has_come, has_begun):
    host.board.read = lambda _: Progress(phase, steps)
    host.do("exit 0", "exit 1")
    assert [(done["rank"], done["has_come"]) for done in host.told_of("done")] == [(2, has_come), (3, has_come)]
    come = (2, 3) if has_come else ()
    end = {"can_continue": True, "come": come, "has_begun": has_begun, "report": None}
    assert host.told_of("ended") == [{"type": "ended", "attempt": 0, **end}]
    assert not host.loop.is_over and not host.moments.of("waiting")
    host.do("wait 3")
    assert host.moments.of("waiting"), "for the other hosts"
    host.order("over", report=None)
    assert host.loop.is_over and not host.attempt.has_failed


def test_worker_that_ends_well_after_a_failure_is_no_news(host):
    host.do("exit 0 7", "exit 1")
    assert host.told_of("done") == []


def test_host_that_was_told_to_end_cannot_go_on(host):
    host.do("signal SIGTERM", "told", "fail")
    assert [one["report"]["can_restart"] for one in host.told_of("failed")] == [False]
    assert [one["can_continue"] for one in host.told_of("ended")] == [False]


def test_host_that_prepares_still_when_another_fails_takes_part_in_the_restart(tmp_path):
    host = Job(tmp_path, node_rank=1)
    stop(host, goes_on=True)
    assert host.told_of("ended") == []
    host.do("ready")
    starts = [message for message in host.heard() if message["type"] == "start"]
    assert [process["process_id"] for one in starts for process in one["processes"]] == [SCHEDULER_ID]
    host.do("scheduler")
    assert [(ended["attempt"], ended["can_continue"]) for ended in host.told_of("ended")] == [(0, True)]
    host.order("restart", attempt=1, delay_s=0.0)
    assert kinds(host.heard()) == ["sweep"]
    host.close()


@pytest.mark.parametrize("steps", [[], ["signal SIGTERM", "ready"]])
def test_host_that_prepares_still_ends_where_the_job_or_it_does_not_go_on(steps, tmp_path):
    host = Job(tmp_path, node_rank=1)
    stop(host, goes_on=bool(steps))
    host.do(*steps)
    assert [ended["can_continue"] for ended in host.told_of("ended")] == [False]
    assert "start" not in kinds(host.heard())
    host.close()


def test_restart_waits_for_its_delay_and_for_the_others(host):
    host.do("fail")
    host.order("restart", attempt=1, delay_s=0.5)
    host.do("again")
    assert host.moments.of("restarting")[0]["delay_s"] == 0.5 and not host.told_of("ready")
    host.do("wait 1")
    (ready,) = host.told_of("ready")
    assert ready["attempt"] == 1 and abs(ready["clock_s"] - time.time()) < 60.0
    host.heard()
    host.order("start", attempt=0)
    assert host.heard() == [], "that of the attempt before"
    host.order("start", attempt=1)
    assert kinds(host.heard()) == ["start"]
    host.do("start 0", "start 1", "exit 1 7")
    assert [failed["attempt"] for failed in host.told_of("failed")] == [0, 1]


def test_attempts_are_numbered_from_the_first_on_whatever_hosts_that_was(tmp_path):
    host = Job(tmp_path, node_rank=1, first_attempt=2)
    log = Path(host.plan.hosts[0].workers[0].log_path)
    log.write_text("of this attempt")
    host.do("run", "fail")
    assert [one["attempt"] for one in host.told_of("failed") + host.told_of("ended")] == [2, 2]
    host.order("restart", attempt=3, delay_s=0.0)
    host.do("again")
    assert [moment["attempt"] for moment in host.moments.of("restarting")] == [3]
    assert log.with_name("worker_0.attempt_2.log").read_text() == "of this attempt"
    host.close()


def test_host_that_cannot_start_again_says_that_it_is_the_host(host):
    host.do("fail")
    host.order("restart", attempt=1, delay_s=0.0)
    assert host.loop.result.report is None
    host.do("swept 4711")
    reports = [one["report"] for one in host.told_of("failed")]
    assert [report["is_unfit"] for report in reports] == [False, True]
    assert reports[1]["failure"]["reason"] == "node-a: cannot start again: [4711] run still"


def test_interrupt_between_two_attempts_is_no_fault_of_the_host(host):
    host.do("fail")
    host.order("restart", attempt=1, delay_s=0.0)
    host.do("signal SIGTERM")
    host.order("start", attempt=1)
    assert [one["report"]["is_unfit"] for one in host.told_of("failed")] == [False, False]
    assert "start" not in kinds(host.heard())


@pytest.mark.parametrize("steps", [[], ["signal SIGINT"]])
def test_job_that_is_over_well_has_no_fault_whatever_came_after_the_last_end(steps, host):
    host.do("exit 0", "exit 1", *steps)
    host.order("over", report=None)
    assert host.loop.is_over and host.attempt.fault is None and host.loop.result.report is None


@pytest.mark.parametrize(("steps", "reason"), [(["exit 0", "exit 1"], "host lost"), (["fail"], "rank 2 failed first")])
def test_failure_that_only_the_end_tells_is_the_fault_where_there_was_none(steps, reason, host):
    host.do(*steps)
    host.order("over", report=encode_record(fault_of(0, "host lost", 3)))
    assert host.loop.is_over and host.attempt.end_reason().startswith(reason)


@pytest.mark.parametrize(
    ("steps", "reason", "is_over"),
    [
        ([], "lost the scheduler", False),
        (["exit 0", "exit 1"], "lost the scheduler", True),
        (["fail"], "rank 2 failed first", True),
    ],
)
def test_host_that_loses_the_coordinator_ends_alone(steps, reason, is_over, host):
    host.do(*steps)
    told = len(host.told)
    host.order("lost", reason="lost the scheduler")
    assert host.attempt.end_reason().startswith(reason) and host.loop.is_over == is_over
    if not is_over:
        assert kinds(host.heard()) == ["stop"]
        host.do("told", "fail")
    assert host.loop.is_over and "ended" not in kinds(host.told[told:]), "nobody hears it"


def test_hang_elsewhere_has_the_stacks_written_here_first(host, monkeypatch):
    requested = []
    monkeypatch.setattr(job_watch, "request_stacks", lambda *words: requested.append(words))
    for _ in range(2):
        stop(host, is_hang=True)
    assert host.heard() == [] and len(requested) == 1 and host.attempt.membership.is_stopping
    host.do("wait 9")
    assert kinds(host.heard()) == ["stop"]
    host.do("hangup")
    assert host.told_of("failed") == [], "it is known"


WAITS, RUNS = Progress(contract.PHASE_JOINED, is_waiting=True), Progress(contract.PHASE_JOINED)


@pytest.mark.parametrize(
    ("node_rank", "progress", "when_s", "later_s"),
    [(1, [WAITS, WAITS], 10, 0), (1, [WAITS, RUNS], 0, 0), (None, [WAITS, WAITS], 0, 0), (1, [Progress()] * 2, 0, 10)],
    ids=["all wait", "one runs", "one host", "all wait by their stacks"],
)
def test_hang_of_a_host_whose_ranks_all_wait_is_left_to_the_others_for_a_while(
    node_rank, progress, when_s, later_s, tmp_path, monkeypatch
):
    host = Job(tmp_path, node_rank=node_rank, hang_time_out_s=100.0)
    hang = Hang(100.0, (host.ranks[0],), dict.fromkeys(host.ranks, "waits"))
    monkeypatch.setattr(job_watch.Watchdog, "look", lambda *_: hang)
    monkeypatch.setattr(job_watch, "request_stacks", lambda *_: None)
    monkeypatch.setattr(job_watch, "read_place", lambda *_: Place("all_reduce", "train.py:7"))
    host.board.read = lambda rank: progress[host.ranks.index(rank)]
    host.do("run", "wait 6")
    host.heard()
    if when_s:
        assert not host.attempt.has_failed
        host.do(f"wait {when_s}")
    assert host.attempt.end_reason().startswith("--hang_time_out 100: ") and host.attempt.lagging == (host.ranks[0],)
    assert host.moments.of("hang") and host.heard() == [], "they write their stacks first"
    host.do("wait 9")
    if later_s:
        assert host.heard() == []
        host.do(f"wait {later_s}")
    assert kinds(host.heard()) == ["stop"] and len(host.told_of("failed")) == 1
    host.close()


def test_world_that_a_rank_of_another_host_never_joined_is_given_up(host):
    host.board.read = lambda rank: Progress(contract.PHASE_JOINING)
    host.order("absent", attempt=1, ranks=[5])
    host.order("absent", attempt=0, ranks=[2])
    assert host.attempt.fault is None, "another attempt, and an own rank"
    host.order("absent", attempt=0, ranks=[1, 2])
    assert host.attempt.end_reason().startswith(
        "rank 1 ended with exit code 0 without joining the world, and ranks 2-3"
    )


def test_world_that_could_not_be_whole_ends_the_job_although_nobody_runs_any_more(host):
    host.do("exit 0")
    host.board.read = lambda rank: Progress(contract.PHASE_JOINED if rank == 3 else contract.PHASE_UNKNOWN)
    host.do("exit 1")
    assert host.attempt.end_reason().startswith("rank 2 ended with exit code 0 without joining the world, and rank 3")
    assert [moment["reason"] for moment in host.moments.of("stopping")] == [host.attempt.end_reason()]


@pytest.mark.parametrize("more", [{}, {"report": 7}, {"report": {"failure": {}}}])
def test_order_that_cannot_be_read_ends_the_part_of_this_host(host, more):
    host.order("stop", attempt=0, goes_on=False, **more)
    assert host.attempt.end_reason().startswith("the coordinator says what cannot be read (")
    assert kinds(host.heard()) == ["stop"]


def test_action_can_cancel_what_is_due_with_it():
    timers, done = Timers(), []
    timers.after("first", -2.0, lambda: timers.cancel("second"))
    timers.after("second", -1.0, lambda: done.append("second"))
    timers.run_due()
    assert done == []


def test_moments_come_later_by_what_a_pause_has_lasted():
    clock, done = FakeClock(), []
    timers = Timers(clock)
    timers.after("limit", 5.0, lambda: done.append("limit"))
    clock.advance(4.0)
    timers.pause()
    clock.advance(60.0)
    timers.run_due()
    assert (done, timers.time_left_s()) == ([], None)
    timers.resume()
    timers.run_due()
    assert (done, timers.time_left_s()) == ([], 1.0)
    clock.advance(1.0)
    timers.run_due()
    assert done == ["limit"]


def test_signal_that_comes_when_a_restart_is_decided_ends_the_job(tmp_path):
    job = Job(tmp_path, node_rank=1)
    job.do("run", "fail", "signal SIGTERM")
    job.order("restart", attempt=1, delay_s=0.0)
    assert job.attempt.number == 1 and job.attempt.end_reason() == "stopped by SIGTERM"
    assert [one["can_continue"] for one in job.told_of("ended") if one["attempt"] == 1] == [False]
    job.close()


def test_second_signal_waits_for_no_other_host(host):
    host.do("exit 0", "exit 1", "signal SIGINT")
    assert not host.loop.is_over
    host.do("signal SIGINT")
    assert host.loop.is_over


def test_absent_rank_of_another_host_is_no_matter_where_the_job_ends_already(host):
    host.board.read = lambda rank: Progress(contract.PHASE_JOINING)
    host.do("signal SIGTERM")
    host.order("absent", attempt=0, ranks=[1])
    assert host.attempt.end_reason() == "stopped by SIGTERM"
