"""The agent's event loop against a fork server that says what the test wants."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised_job import FAILED, Job, kinds

from msrun import contract
from msrun.agent import supervisor
from msrun.agent.processes.process_spec import FIRST_SERVER_ID, SCHEDULER_ID
from msrun.agent.watch.progress_board import Progress
from msrun.cluster.membership import WorkerState
from msrun.errors import ClusterError, HangTimeout, Interrupted


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def test_words_about_an_attempt_that_is_over_do_not_end_the_next_one(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    assert kinds(job.heard()) == ["start", "start", "stop", "sweep"]
    job.start()
    job.say("told", attempt=0, not_started=[])
    membership = job.loop._attempt.membership
    assert not membership.are_told
    job.say("exited", process_id=1, status=FAILED, peak_bytes=0.0, at=2.0)
    assert membership.members[1].state is WorkerState.FAILED, "by itself, not stopped by msrun"
    job.say("told", attempt=1, not_started=[])
    assert membership.are_told


def test_job_does_not_start_again_beside_processes_that_could_not_be_ended(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.heard()
    job.say("swept", survivors=[4711])
    fault = job.loop._attempt.fault
    assert isinstance(fault, ClusterError)
    assert str(fault) == "cannot start again: [4711] run still"
    assert job.loop._over
    assert "start" not in kinds(job.heard())


def test_restart_waits_for_a_store_without_what_the_last_attempt_left(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    job.heard()
    job.run_timer("restart")
    assert job.heard() == [], "there is no fresh store yet"
    job.has_store(1)
    assert kinds(job.heard()) == ["start"]


def test_restart_waits_for_its_delay_when_the_store_is_fresh(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    job.heard()
    job.has_store(1)
    assert job.heard() == []
    job.run_timer("restart")
    assert kinds(job.heard()) == ["start"]


def test_store_that_is_fresh_after_the_job_was_stopped_starts_nothing(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    job.loop._on_signal(signal.SIGTERM)
    job.heard()
    job.has_store(1)
    assert job.heard() == []


def test_restart_without_an_answer_of_the_scheduler_is_given_up(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    job.run_timer("store")
    assert "cannot start again: the scheduler has not answered" in str(job.loop._attempt.fault)
    assert job.loop._over


def test_workers_that_have_not_said_that_they_started_are_told_to_end_all_the_same(job: Job) -> None:
    job.begin()
    job.heard()
    job.loop._on_signal(signal.SIGTERM)
    assert kinds(job.heard()) == ["stop"]
    assert not job.loop._over, "the fork server may have started them"
    job.say("started", process_id=0, pid=101, at=0.0)
    job.say("told", attempt=0, not_started=[1])
    job.say("exited", process_id=0, status=signal.SIGTERM, peak_bytes=0.0, at=1.0)
    states = [member.state for member in job.loop._attempt.membership.members.values()]
    assert states == [WorkerState.STOPPED, WorkerState.STOPPED]
    assert job.loop._over
    assert isinstance(job.loop._attempt.fault, Interrupted)


def test_end_before_anything_was_asked_for_is_at_once(job: Job) -> None:
    job.loop._on_signal(signal.SIGTERM)
    assert job.loop._over
    assert job.heard() == []


def test_process_that_cannot_be_started_ends_the_job_with_the_servers_words(job: Job) -> None:
    job.begin()
    job.say("started", process_id=0, pid=101, at=0.0)
    job.heard()
    job.say("cannot_start", reason="cannot start worker 1: no room")
    assert str(job.loop._attempt.fault) == "cannot start worker 1: no room, on node-a"
    assert kinds(job.heard()) == ["stop"]


def test_job_whose_workers_all_end_well_is_over(job: Job) -> None:
    job.begin()
    job.start()
    job.end(0)
    assert not job.loop._over
    job.end(1)
    assert job.loop._over
    assert not job.attempt.has_failed
    assert job.attempt.peak_bytes == {0: 7.0, 1: 7.0}
    assert [moment["global_rank"] for moment in job.moments.of("exited")] == [0, 1]


def test_limit_of_the_start_ends_with_the_last_worker_that_starts(job: Job) -> None:
    job.loop._prepare()
    job.begin()
    job.say("started", process_id=0, pid=101, at=0.0)
    assert job.loop._timers.is_set("start") and not job.moments.of("running")
    job.say("started", process_id=1, pid=102, at=0.0)
    assert not job.loop._timers.is_set("start")
    assert job.moments.of("running") == [{"kind": "running", "world_size": 2}]


def test_workers_that_do_not_start_in_time_are_named(job: Job) -> None:
    job.loop._prepare()
    job.begin()
    job.say("started", process_id=0, pid=101, at=0.0)
    job.heard()
    job.run_timer("start")
    assert "1 of 2 workers were not started in time on node-a (ranks 1)" in str(job.attempt.fault)
    assert kinds(job.heard()) == ["stop"]


def test_start_may_take_for_ever_where_the_user_wants_it(tmp_path: Path) -> None:
    job = Job(tmp_path, cluster_time_out_s=-1)
    job.loop._prepare()
    assert not job.loop._timers.is_set("start")
    job.close()


def test_first_failure_stops_the_others_with_their_grace(job: Job) -> None:
    job.begin()
    job.start()
    job.heard()
    job.end(0, FAILED)
    (stop,) = job.heard()
    assert stop == {"type": "stop", "signum": signal.SIGTERM, "grace_s": job.plan.grace_s, "attempt": 0}
    assert job.loop._timers.is_set("stop")
    job.say("told", attempt=0, not_started=[])
    job.end(1, signal.SIGTERM)
    members = job.loop._attempts.past[0].membership.members
    assert [member.state for member in members.values()] == [WorkerState.FAILED, WorkerState.STOPPED]


def test_full_disk_explains_the_first_failure_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "explain_full_disk", lambda path: f"no room for {Path(path).name}")
    job.begin()
    job.start()
    job.end(1, FAILED)
    job.end(0, FAILED)
    members = job.loop._attempts.past[0].membership.members
    assert [members[rank].hint for rank in (0, 1)] == ["", "no room for worker_1.log"]


def test_worker_that_the_kernel_killed_is_explained_by_its_memory(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "explain_full_disk", lambda path: "no room")
    job.loop._memory_kills.explain = lambda pid: f"{pid} took too much"  # type: ignore[method-assign]
    job.begin()
    job.start()
    job.end(0, signal.SIGKILL)
    assert job.attempt.membership.members[0].hint == "101 took too much"


def test_stop_that_takes_too_long_ends_the_fork_server(job: Job) -> None:
    job.begin()
    job.start()
    job.end(0, FAILED)
    attempt = job.attempt
    job.run_timer("stop")
    states = [member.state for member in attempt.membership.members.values()]
    assert states == [WorkerState.FAILED, WorkerState.STOPPED]
    assert attempt.fault is None, "the worker's failure counts, not the end of its server"
    assert not job.loop._over and job.loop._timers.is_set("renew"), "another fork server starts the workers again"


def lose_server(job: Job) -> None:
    job.server.close()
    job.loop._on_server()


def test_fork_server_that_ends_alone_is_the_fault_and_another_one_takes_its_place(job: Job) -> None:
    job.begin()
    job.start()
    lose_server(job)
    (past,) = job.loop._attempts.past
    assert "the fork server ended unexpectedly" in str(past.fault) and not past.membership.running()
    job.run_timer("renew")
    assert kinds(job.heard()) == ["prepare"]
    assert [moment["attempt"] for moment in job.moments.of("restarting")] == [1]
    job.begin()
    assert kinds(job.heard()) == ["start"], "the scheduler alone, for its store is not ready"
    job.run_timer("restart")
    job.has_store(1)
    assert kinds(job.heard()) == ["start"]
    job.start()
    lose_server(job)
    assert job.loop._over and "the fork server ended unexpectedly" in str(job.attempt.fault)


def test_fork_server_that_is_lost_while_it_prepares_or_between_two_attempts_is_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path, max_restarts=2)
    lose_server(job)
    job.run_timer("renew")
    job.begin()
    lose_server(job)
    assert job.attempt.number == 2 and not job.loop._timers.is_set("store")
    job.run_timer("renew")
    lose_server(job)
    assert job.loop._over
    job.close()


def test_fork_server_that_leaves_processes_which_cannot_be_ended_gets_no_successor(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.begin()
    job.start()
    monkeypatch.setattr(job.loop._own, "end_orphans", lambda *_: [4711])
    lose_server(job)
    job.run_timer("renew")
    assert job.loop._over and "4711" in str(job.attempt.fault) and "run still" in str(job.attempt.fault)


def test_second_interrupt_leaves_no_grace_and_another_signal_does(job: Job) -> None:
    job.begin()
    job.start()
    job.loop._on_signal(signal.SIGINT)
    job.heard()
    job.loop._on_signal(signal.SIGTERM)
    assert job.heard() == []
    job.loop._on_signal(signal.SIGINT)
    assert [message["grace_s"] for message in job.heard()] == [0.0]
    assert str(job.attempt.fault) == "stopped by SIGINT"


def test_job_that_was_told_to_end_does_not_start_again(job: Job) -> None:
    job.begin()
    job.start()
    job.loop._on_signal(signal.SIGTERM)
    job.say("told", attempt=0, not_started=[])
    job.fail()
    assert job.loop._over


def test_signal_for_workers_goes_to_those_that_run(tmp_path: Path) -> None:
    job = Job(tmp_path, forward_signals=(signal.SIGUSR1,))
    job.begin()
    job.start()
    job.end(0)
    job.heard()
    job.loop._on_signal(signal.SIGUSR1)
    assert job.heard() == [{"type": "signal", "process_ids": [1], "signum": signal.SIGUSR1}]
    assert job.attempt.fault is None and not job.loop._attempts.is_last
    job.close()


def test_scheduler_that_ends_in_the_job_is_the_fault_and_after_it_is_not(job: Job) -> None:
    job.begin()
    job.start()
    job.end(SCHEDULER_ID, FAILED)
    assert str(job.attempt.fault).startswith("the scheduler ended (exit code 7)")
    assert job.loop._timers.is_set("stop")
    job.say("told", attempt=0, not_started=[])
    job.fail()
    assert job.loop._over, "it has ended by itself, before a rank had joined: so would the next one"


def test_killed_scheduler_is_replaced_with_its_fork_server_when_the_workers_have_ended(job: Job) -> None:
    job.begin()
    job.start()
    job.end(SCHEDULER_ID, signal.SIGKILL)
    job.say("told", attempt=0, not_started=[])
    job.fail()
    assert kinds(job.heard()) == ["start", "start", "stop"]
    job.run_timer("renew")
    assert kinds(job.heard()) == ["prepare"]
    assert job.moments.of("restarting")[0]["reason"].startswith("the scheduler ended (signal SIGKILL)")


def test_scheduler_that_ends_after_the_job_is_no_fault(job: Job) -> None:
    job.begin()
    job.start()
    job.end(0)
    job.end(1)
    job.end(SCHEDULER_ID, FAILED)
    assert job.attempt.fault is None


def test_restart_keeps_the_logs_of_the_attempt_before(job: Job, tmp_path: Path) -> None:
    job.begin()
    job.start()
    (tmp_path / "worker_0.log").write_text("first")
    job.fail()
    job.say("swept", survivors=[])
    assert (tmp_path / "worker_0.attempt_0.log").read_text() == "first"
    (moment,) = job.moments.of("restarting")
    assert (moment["attempt"], moment["reason"]) == (1, "rank 0 failed first: exit code 7")
    assert moment["delay_s"] == 0.0
    assert job.loop._timers.is_set("restart") and job.loop._timers.is_set("store")


def test_restarted_workers_know_their_attempt_and_have_the_limit_of_the_start(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    job.heard()
    job.has_store(1)
    job.run_timer("restart")
    (start,) = job.heard()
    assert [process["env"]["TORCHELASTIC_RESTART_COUNT"] for process in start["processes"]] == ["1", "1"]
    assert job.loop._timers.is_set("start") and not job.loop._timers.is_set("store")


def test_last_attempt_ends_the_job(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.say("swept", survivors=[])
    job.has_store(1)
    job.run_timer("restart")
    job.start()
    assert not job.loop._over
    job.fail()
    assert job.loop._over
    assert len(job.loop._attempts.past) == 1


def test_sweep_that_is_not_answered_ends_the_fork_server(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.run_timer("sweep")
    assert job.loop._over, "that was the only restart"
    assert "the fork server ended unexpectedly" in str(job.attempt.fault)


def test_interrupt_between_two_attempts_starts_nobody(job: Job) -> None:
    job.begin()
    job.start()
    job.fail()
    job.heard()
    job.loop._on_signal(signal.SIGINT)
    assert job.loop._over
    job.say("swept", survivors=[])
    assert job.heard() == [] and not job.moments.of("restarting")


def test_start_method_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, start_method="fork")
    job.say("ready", start_method="exec", reason="threads were started by imports", prepare_s=0.0)
    assert str(job.attempt.fault) == "--start_method fork: not possible here: threads were started by imports"
    assert job.loop._over and job.heard() == []
    job.close()


def test_workers_are_executed_where_the_server_may_not_fork(job: Job) -> None:
    job.say("ready", start_method="exec", reason="asked for", prepare_s=0.0)
    assert [process["use_exec"] for process in job.heard()[1]["processes"]] == [True, True]


def test_run_directory_that_cannot_be_made_is_named(job: Job, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    job.say("ready", start_method="fork", reason="", prepare_s=0.0)
    assert f"cannot make {tmp_path}/run: File exists; set TMPDIR" in str(job.attempt.fault)
    assert job.loop._over and job.heard() == []


def test_server_that_is_ready_after_the_end_starts_nobody(job: Job) -> None:
    job.loop._on_signal(signal.SIGTERM)
    job.say("ready", start_method="fork", reason="", prepare_s=0.0)
    assert job.heard() == []


def test_server_that_ends_is_the_fault_while_workers_need_it_and_never_else(job: Job) -> None:
    job.end(FIRST_SERVER_ID, FAILED)
    assert job.attempt.fault is None, "before the workers"
    job.begin()
    job.start()
    job.loop._on_signal(signal.SIGTERM)
    stopped_by = job.attempt.fault
    job.end(FIRST_SERVER_ID, FAILED)
    assert job.attempt.fault is stopped_by, "while they are ended"


def test_server_that_ends_beside_running_workers_is_the_fault(job: Job) -> None:
    job.begin()
    job.start()
    job.end(FIRST_SERVER_ID, FAILED)
    assert str(job.attempt.fault).startswith("server 0 ")
    assert job.loop._timers.is_set("stop")


def test_lost_lines_of_logs_are_told(job: Job) -> None:
    job.say("log_lost", reason="disk full", lost_bytes={"0": 9})
    assert job.moments.of("log_lost") == [{"kind": "log_lost", "reason": "disk full", "lost_bytes": {"0": 9}}]


def test_hang_is_ended_after_the_stacks_were_written(job: Job) -> None:
    job.begin()
    job.start()
    job.heard()
    job.attempt.membership.members[0].pid = job.attempt.membership.members[1].pid = 0
    job.loop._watch.request_stacks = lambda *_: None  # type: ignore[method-assign]
    job.loop._end_stuck(HangTimeout("rank 1 is late"), (1,))
    assert job.heard() == [], "they write their stacks first"
    assert job.attempt.lagging == (1,) and job.attempt.membership.is_stopping
    assert job.moments.of("hang") == [{"kind": "hang", "reason": "rank 1 is late", "lagging": [1]}]
    job.run_timer("stacks")
    assert kinds(job.heard()) == ["stop"]
    assert job.moments.of("stopping") == [{"kind": "stopping", "reason": "the job is stuck"}]


def test_hang_that_nobody_is_left_of_is_over_at_once(job: Job) -> None:
    job.begin()
    job.start()
    job.end(0)
    job.attempt.membership.ended(1, WorkerState.DONE, 0)
    job.loop._end_stuck(ClusterError("rank 1 never came"), (1,))
    assert job.loop._over
    assert str(job.attempt.fault) == "rank 1 never came"


def test_world_that_a_worker_never_joined_is_given_up(job: Job) -> None:
    job.begin()
    job.start()
    job.heard()
    phases = {0: contract.PHASE_UNKNOWN, 1: contract.PHASE_JOINING}
    job.board.read = lambda rank: Progress(phases[rank])  # type: ignore[method-assign]
    job.end(0)
    assert "rank 0 ended with exit code 0 without joining the world, and rank 1 needs it" in str(job.attempt.fault)
