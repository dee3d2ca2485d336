"""The agent's event loop on a host of a job, against a coordinator that says what the test wants."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from failure_reports import fault_of
from supervised_job import FAILED, HostJob, kinds

from msrun import contract
from msrun.agent.processes.process_spec import SCHEDULER_ID
from msrun.agent.watch.progress_board import Progress
from msrun.cluster.membership import WorkerState
from msrun.errors import ClusterError, HangTimeout, PeerFailed
from msrun.planning.record_json import encode_record


@pytest.fixture
def job(tmp_path: Path) -> Iterator[HostJob]:
    made = HostJob(tmp_path)
    yield made
    made.close()


def run(job: HostJob) -> None:
    """Come so far that both workers run."""
    job.begin()
    job.start()
    job.heard()


def restart(job: HostJob) -> None:
    """Fail, and be told to start again."""
    run(job)
    job.fail()
    job.hear("restart", attempt=1, delay_s=0.5)


def test_failure_here_is_told_once_and_stops_the_own_workers_at_once(job: HostJob) -> None:
    run(job)
    job.end(0, FAILED)
    assert kinds(job.heard()) == ["stop"], "without an order"
    job.end(1, FAILED)
    (failed,) = job.told_of("failed")
    assert failed["attempt"] == 0
    assert failed["report"]["failure"]["reason"] == "rank 0 failed first: exit code 7"
    assert failed["report"]["can_restart"] is True


def test_failure_after_a_signal_cannot_be_repeated(job: HostJob) -> None:
    run(job)
    job.loop._on_signal(signal.SIGTERM)
    (failed,) = job.told_of("failed")
    assert failed["report"]["can_restart"] is False


def test_failure_of_another_host_stops_the_workers_here(job: HostJob) -> None:
    run(job)
    job.hear_stop()
    assert kinds(job.heard()) == ["stop"]
    fault = job.attempt.fault
    assert isinstance(fault, PeerFailed) and (str(fault), fault.exit_code) == ("rank 5 failed", 9)
    assert job.told_of("failed") == [], "it is not this host's"
    assert job.loop.report == fault_of(0, "rank 5 failed", 9)


def test_failure_in_another_attempt_stops_nobody(job: HostJob) -> None:
    run(job)
    job.hear_stop(attempt=1)
    assert job.heard() == [] and job.attempt.fault is None


def test_own_failure_that_comes_back_changes_nothing(job: HostJob) -> None:
    run(job)
    job.end(0, FAILED)
    job.hear_stop(node_rank=1)
    assert job.attempt.fault is None
    assert job.loop.report is not None and job.loop.report.node_rank == 1


def test_failure_that_is_heard_of_after_the_own_end_stops_nothing(job: HostJob) -> None:
    run(job)
    job.end(0)
    job.end(1)
    job.heard()
    job.hear_stop()
    assert job.heard() == [] and not job.loop._over
    assert isinstance(job.attempt.fault, PeerFailed)


@pytest.mark.parametrize(("phase", "has_come"), [(contract.PHASE_UNKNOWN, False), (contract.PHASE_JOINED, True)])
def test_workers_that_end_well_are_told_with_whether_they_had_come(job: HostJob, phase: int, has_come: bool) -> None:
    run(job)
    job.board.read = lambda _: Progress(phase)  # type: ignore[method-assign]
    job.end(0)
    job.end(1)
    assert [(done["rank"], done["has_come"]) for done in job.told_of("done")] == [(0, has_come), (1, has_come)]


def test_worker_that_ends_well_after_a_failure_is_no_news(job: HostJob) -> None:
    run(job)
    job.end(0, FAILED)
    job.end(1)
    assert job.told_of("done") == []


def test_end_of_all_workers_here_is_not_the_end_of_the_job(job: HostJob) -> None:
    run(job)
    job.end(0)
    assert job.told_of("ended") == []
    job.end(1)
    said = {"can_continue": True, "come": (), "has_begun": False}
    assert job.told_of("ended") == [{"type": "ended", "attempt": 0, **said}]
    assert not job.loop._over
    assert job.loop._timers.is_set("others")
    job.run_timer("others")
    assert job.moments.of("waiting")
    job.hear("over", report=None)
    assert job.loop._over and not job.attempt.has_failed


def test_host_that_has_failed_does_not_say_that_it_waits_for_the_others(job: HostJob) -> None:
    run(job)
    job.fail()
    assert [ended["can_continue"] for ended in job.told_of("ended")] == [True]
    assert not job.loop._timers.is_set("others")


def test_failure_elsewhere_ends_the_line_about_waiting(job: HostJob) -> None:
    run(job)
    job.end(0)
    job.end(1)
    job.hear_stop()
    assert not job.loop._timers.is_set("others")


def test_host_that_was_told_to_end_cannot_go_on(job: HostJob) -> None:
    run(job)
    job.loop._on_signal(signal.SIGTERM)
    job.say("told", attempt=0, not_started=[])
    job.fail()
    assert [ended["can_continue"] for ended in job.told_of("ended")] == [False]


def test_host_that_has_lost_its_fork_server_goes_on_with_another_when_all_start_again(job: HostJob) -> None:
    run(job)
    job.server.close()
    job.loop._on_server()
    assert [ended["can_continue"] for ended in job.told_of("ended")] == [True]
    assert not job.loop._over, "the coordinator says when it is over"
    assert [failed["report"]["can_restart"] for failed in job.told_of("failed")] == [True]
    job.hear("restart", attempt=1, delay_s=0.0)
    job.run_timer("renew")
    assert kinds(job.heard()) == ["prepare"]
    job.begin()
    job.run_timer("restart")
    job.has_store(1)
    assert [ready["attempt"] for ready in job.told_of("ready")] == [1]


def hear_early_stop(job: HostJob, *, can_restart: bool = True) -> None:
    """Another host has failed; this one has started nothing yet."""
    report = fault_of(0, "rank 5 failed", 9, can_restart=can_restart)
    job.hear("stop", attempt=0, report=encode_record(report))


def test_host_that_prepares_still_when_another_fails_takes_part_in_the_restart(job: HostJob) -> None:
    """It goes on preparing, starts what workers need, and no worker of the attempt that has failed."""
    hear_early_stop(job)
    assert job.told_of("ended") == []
    job.say("ready", start_method="fork", reason="", prepare_s=0.0)
    (start,) = job.heard()
    assert [process["process_id"] for process in start["processes"]] == [SCHEDULER_ID]
    job.say("started", process_id=SCHEDULER_ID, pid=100, at=0.0)
    assert [(ended["attempt"], ended["can_continue"]) for ended in job.told_of("ended")] == [(0, True)]
    job.hear("restart", attempt=1, delay_s=0.0)
    assert kinds(job.heard()) == ["sweep"]


def test_host_that_prepares_still_ends_at_once_where_the_job_does_not_start_again(tmp_path: Path) -> None:
    job = HostJob(tmp_path)
    hear_early_stop(job, can_restart=False)
    assert [ended["can_continue"] for ended in job.told_of("ended")] == [False]
    job.close()


def test_interrupt_of_a_host_that_prepares_for_the_restart_ends_its_part(job: HostJob) -> None:
    hear_early_stop(job)
    job.loop._on_signal(signal.SIGTERM)
    job.say("ready", start_method="fork", reason="", prepare_s=0.0)
    assert job.heard() == []
    assert [ended["can_continue"] for ended in job.told_of("ended")] == [False]


def test_restart_waits_for_the_others_before_workers_start(job: HostJob) -> None:
    restart(job)
    assert kinds(job.heard())[-1] == "sweep"
    job.say("swept", survivors=[])
    job.has_store(1)
    job.run_timer("restart")
    (ready,) = job.told_of("ready")
    assert ready["attempt"] == 1 and abs(ready["clock_s"] - time.time()) < 60.0
    assert job.heard() == []
    job.hear("start", attempt=0)
    assert job.heard() == [], "that of the attempt before"
    job.hear("start", attempt=1)
    assert kinds(job.heard()) == ["start"]


def test_host_that_cannot_start_again_says_that_it_is_the_host(job: HostJob) -> None:
    """The others may do without it; before that, a failure was the worker's."""
    restart(job)
    job.say("swept", survivors=[4711])
    first, second = job.told_of("failed")
    assert [(one["attempt"], one["report"]["is_unfit"]) for one in (first, second)] == [(0, False), (1, True)]
    assert second["report"]["failure"]["reason"] == "cannot start again: [4711] run still"
    assert job.moments.of("restarting") == []


def test_interrupt_between_two_attempts_is_no_fault_of_the_host(job: HostJob) -> None:
    restart(job)
    job.loop._on_signal(signal.SIGTERM)
    assert [one["report"]["is_unfit"] for one in job.told_of("failed")] == [False, False]


def test_restart_comes_after_the_delay_that_the_coordinator_gives(job: HostJob) -> None:
    restart(job)
    job.say("swept", survivors=[])
    (moment,) = job.moments.of("restarting")
    assert (moment["attempt"], moment["delay_s"]) == (1, 0.5)


def test_start_after_a_failure_is_not_heeded(job: HostJob) -> None:
    restart(job)
    job.say("swept", survivors=[])
    job.heard()
    job.hear_stop(attempt=1)
    job.hear("start", attempt=1)
    assert "start" not in kinds(job.heard())


def test_report_of_the_attempt_before_is_forgotten(job: HostJob) -> None:
    run(job)
    job.hear_stop()
    job.say("told", attempt=0, not_started=[])
    job.fail()
    job.hear("restart", attempt=1, delay_s=0.0)
    assert job.loop.report is None and not job.loop._has_ended


def test_failure_of_the_next_attempt_is_told_too(job: HostJob) -> None:
    restart(job)
    job.say("swept", survivors=[])
    job.has_store(1)
    job.run_timer("restart")
    job.hear("start", attempt=1)
    job.start()
    job.end(1, FAILED)
    assert [failed["attempt"] for failed in job.told_of("failed")] == [0, 1]


def test_job_that_is_over_well_has_no_fault_whatever_came_after_the_last_end(job: HostJob) -> None:
    run(job)
    job.end(0)
    job.end(1)
    job.loop._on_signal(signal.SIGINT)
    assert job.attempt.fault is not None
    job.hear("over", report=None)
    assert job.attempt.fault is None and job.loop.report is None


def test_failure_that_only_the_end_tells_is_the_fault(job: HostJob) -> None:
    run(job)
    job.end(0)
    job.end(1)
    job.hear("over", report=encode_record(fault_of(0, "host lost", 3)))
    assert isinstance(job.attempt.fault, PeerFailed) and str(job.attempt.fault) == "host lost"
    assert job.loop._over


def test_own_failure_stays_the_fault_at_the_end(job: HostJob) -> None:
    run(job)
    job.fail()
    job.hear("over", report=encode_record(fault_of(0, "host lost", 3)))
    assert job.attempt.fault is None and job.attempt.has_failed


def test_host_that_loses_the_coordinator_ends_alone(job: HostJob) -> None:
    run(job)
    job.hear("lost", reason="lost the scheduler")
    assert str(job.attempt.fault) == "lost the scheduler"
    assert kinds(job.heard()) == ["stop"] and not job.loop._over
    told = len(job.told)
    job.say("told", attempt=0, not_started=[])
    job.fail()
    assert job.loop._over and job.loop._attempts.is_last
    assert "ended" not in kinds(job.told[told:]), "nobody hears it"


def test_host_whose_part_has_ended_is_over_when_the_coordinator_goes(job: HostJob) -> None:
    run(job)
    job.end(0)
    job.end(1)
    job.hear("lost", reason="lost the scheduler")
    assert job.loop._over
    assert isinstance(job.attempt.fault, ClusterError) and str(job.attempt.fault) == "lost the scheduler"


def test_own_failure_counts_more_than_the_loss_of_the_coordinator_after_it(job: HostJob) -> None:
    run(job)
    job.fail()
    job.hear("lost", reason="lost the scheduler")
    assert job.attempt.fault is None


def test_second_signal_waits_for_no_other_host(job: HostJob) -> None:
    run(job)
    job.end(0)
    job.end(1)
    job.loop._on_signal(signal.SIGINT)
    assert not job.loop._over
    job.loop._on_signal(signal.SIGINT)
    assert job.loop._over


def test_hang_elsewhere_has_the_stacks_written_here_first(job: HostJob) -> None:
    run(job)
    requested: list[str] = []
    job.loop._watch.request_stacks = lambda _, headline: requested.append(headline)  # type: ignore[method-assign]
    job.hear_stop(is_hang=True)
    assert job.heard() == [] and len(requested) == 1
    assert job.attempt.membership.is_stopping
    job.hear_stop(is_hang=True)
    assert len(requested) == 1, "once"
    job.run_timer("stacks")
    assert kinds(job.heard()) == ["stop"]


def test_hang_of_a_host_whose_ranks_all_wait_is_left_to_the_others_for_a_while(tmp_path: Path) -> None:
    job = HostJob(tmp_path, hang_time_out_s=100.0)
    run(job)
    waiting = Progress(contract.PHASE_JOINED, is_waiting=True)
    job.board.read = lambda _: waiting  # type: ignore[method-assign]
    assert job.loop._patience_s == 10.0
    job.loop._watch.request_stacks = lambda *_: None  # type: ignore[method-assign]
    job.loop._end_stuck(HangTimeout("rank 0 waits"), (0,))
    assert job.attempt.fault is None and job.loop._timers.is_set("elsewhere")
    assert not job.loop._timers.is_set("hang"), "it is found once"
    job.run_timer("elsewhere")
    assert str(job.attempt.fault) == "rank 0 waits"
    job.close()


def test_hang_of_the_only_host_is_left_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostJob, "fleet", ())
    job = HostJob(tmp_path, hang_time_out_s=100.0)
    assert job.loop._patience_s == 0.0
    job.close()


def test_hang_with_a_rank_that_waits_for_nobody_is_this_hosts(job: HostJob) -> None:
    run(job)
    job.board.read = lambda rank: Progress(contract.PHASE_JOINED, is_waiting=rank == 0)  # type: ignore[method-assign]
    job.loop._watch.request_stacks = lambda *_: None  # type: ignore[method-assign]
    job.loop._end_stuck(HangTimeout("rank 1 is late"), (1,))
    assert str(job.attempt.fault) == "rank 1 is late" and job.attempt.lagging == (1,)


@pytest.mark.parametrize("do_all_wait", [True, False])
def test_hang_of_plain_torch_is_left_to_the_others_while_all_stacks_here_wait(job: HostJob, do_all_wait: bool) -> None:
    run(job)
    job.board.read = lambda _: Progress(contract.PHASE_JOINED)  # type: ignore[method-assign]
    job.loop._watch.request_stacks = lambda *_: None  # type: ignore[method-assign]
    job.loop._watch.do_all_wait = lambda _: do_all_wait  # type: ignore[method-assign]
    job.loop._end_stuck(HangTimeout("nobody moves"), ())
    job.run_timer("stacks")
    if do_all_wait:
        assert job.heard() == []
        job.run_timer("elsewhere")
    assert kinds(job.heard()) == ["stop"]


def test_report_ends_the_patience_with_the_others(job: HostJob) -> None:
    run(job)
    job.board.read = lambda _: Progress(contract.PHASE_JOINED, is_waiting=True)  # type: ignore[method-assign]
    job.loop._end_stuck(HangTimeout("rank 0 waits"), (0,))
    job.hear_stop()
    assert not job.loop._timers.is_set("elsewhere")


def test_world_that_a_rank_of_another_host_never_joined_is_given_up(job: HostJob) -> None:
    run(job)
    job.board.read = lambda rank: Progress(contract.PHASE_JOINING)  # type: ignore[method-assign]
    job.hear("absent", attempt=1, ranks=[5])
    assert job.attempt.fault is None
    job.hear("absent", attempt=0, ranks=[1, 5])
    assert str(job.attempt.fault).startswith("rank 5 ended with exit code 0 without joining the world, and ranks 0-1 ")


def test_absent_rank_of_another_host_is_no_matter_where_the_job_ends_already(job: HostJob) -> None:
    run(job)
    job.board.read = lambda rank: Progress(contract.PHASE_JOINING)  # type: ignore[method-assign]
    job.loop._on_signal(signal.SIGTERM)
    fault = job.attempt.fault
    job.hear("absent", attempt=0, ranks=[5])
    assert job.attempt.fault is fault
    assert job.attempt.membership.members[0].state is WorkerState.RUNNING


@pytest.mark.parametrize("more", [{}, {"report": 7}, {"report": {"failure": {}}}])
def test_order_that_cannot_be_read_ends_the_part_of_this_host(job: HostJob, more: dict[str, object]) -> None:
    run(job)
    job.hear("stop", attempt=0, **more)
    assert str(job.attempt.fault).startswith("the coordinator says what cannot be read (")
    assert kinds(job.heard()) == ["stop"]
