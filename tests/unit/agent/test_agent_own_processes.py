"""What msrun's own processes and own code do to a job: what their end, their silence and their faults mean for it."""

from __future__ import annotations

import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
from job_runner import wait_until
from plans import small_plan

from msrun.agent import attempt as module
from msrun.agent.attempt import LAST_WORDS_BYTES, Attempt, OwnProcesses, keep_logs, worker_specs
from msrun.agent.observer import Observers, OwnFaults
from msrun.agent.processes.server_handle import FIRST_SERVER_ID, MINDSPORE_SCHEDULER_ID, SCHEDULER_ID, ProcessSpec
from msrun.agent.signals import SignalPipe, hold_signals
from msrun.cluster.membership import Membership
from msrun.cluster.messages import await_input
from msrun.errors import ClusterError, HangTimeout, OwnProcessLost, RendezvousTimeout, ServerFailed

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM)
FAILED = 7 << 8
"""Wait status of a process that ended with exit code 7."""


@pytest.fixture
def plan(tmp_path):
    return small_plan(tmp_path)


@pytest.fixture
def own(plan):
    return OwnProcesses(plan, "/logs")


def test_job_cannot_go_on_without_the_scheduler(own):
    own.started(SCHEDULER_ID, 71, lambda *_, **__: None)
    assert own.scheduler_runs
    error = own.exited(SCHEDULER_ID, 0, do_workers_run=True, has_begun=False)
    assert isinstance(error, ClusterError) and not own.scheduler_runs
    assert str(error) == "the scheduler ended (exit code 0); its log: /logs/scheduler.log"


def test_schedulers_of_mindspore_leave_when_all_workers_have_and_fail_before(plan, own):
    host = replace(plan.hosts[0], mindspore_scheduler={"MS_ROLE": "MS_SCHED"})
    started, worker = worker_specs(plan, host, {}, attempt=2, use_exec=False)
    assert (started.process_id, worker.process_id) == (MINDSPORE_SCHEDULER_ID, 0)
    assert started.use_exec and started.env["MS_ROLE"] == "MS_SCHED"
    assert started.env["TORCHELASTIC_RESTART_COUNT"] == worker.env["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert worker.env["TORCHELASTIC_ERROR_FILE"] == f"{plan.run_dir}/error_0_2.json"
    (planned,) = host.workers
    assert replace(worker, env={}) == ProcessSpec(0, planned.log_path, host.program.of_worker(0, 0, 0))
    assert own.exited(MINDSPORE_SCHEDULER_ID, 0, do_workers_run=True, has_begun=True) is None
    assert own.exited(MINDSPORE_SCHEDULER_ID, FAILED, do_workers_run=False, has_begun=True) is None
    error = own.exited(MINDSPORE_SCHEDULER_ID, FAILED, do_workers_run=True, has_begun=True)
    assert str(error).startswith("MindSpore's scheduler ended (exit code 7); its log: ")


def test_one_that_stays_stopped_is_named(own, monkeypatch):
    own.started(SCHEDULER_ID, 71, tell := mock.Mock())
    own.started(FIRST_SERVER_ID - 2, 72, tell)
    assert tell.call_args_list == [mock.call("scheduler", pid=71), mock.call("server", index=2, pid=72)]
    monkeypatch.setattr(module, "is_stopped", lambda pid: pid == 71)
    assert [own.look_for_stopped(70, now, 8.0) for now in (100.0, 107.9)] == [None, None]
    error = own.look_for_stopped(70, 108.0, 8.0)
    assert str(error) == "the scheduler (pid 71) has been stopped by a signal for 8 s"
    monkeypatch.setattr(module, "kill_descendants", kill := mock.Mock())
    own.end_orphans([5], 2.0)
    assert kill.call_args_list == [mock.call(2.0, [5, 71]), mock.call(2.0, [5])], "the scheduler last"
    own.forget()
    assert not own.scheduler_runs


def test_job_starts_again_after_a_hang_and_a_loss_and_not_after_what_would_come_again():
    kinds = (HangTimeout, RendezvousTimeout, OwnProcessLost, ServerFailed, ClusterError)
    faults = [kind("x", 7) if kind is ServerFailed else kind("x") for kind in kinds]
    assert [Attempt(0, Membership(()), fault=one).is_bearable for one in (None, *faults)] == [True] * 5 + [False]


def test_log_that_cannot_be_kept_is_named(tmp_path):
    (tmp_path / "worker_0.attempt_1.log").mkdir()
    (tmp_path / "worker_0.log").touch()
    with pytest.raises(ClusterError, match=r"cannot move a log to .*worker_0\.attempt_1\.log \(Is a directory\)"):
        keep_logs([f"{tmp_path}/{name}" for name in ("worker_9.log", "worker_0.log")], 1)


@pytest.mark.parametrize(
    ("status", "has_begun", "kind"),
    [(signal.SIGKILL, False, OwnProcessLost), (FAILED, True, OwnProcessLost), (FAILED, False, ClusterError)],
)
def test_what_ends_by_itself_before_the_job_has_begun_would_end_again(own, status, has_begun, kind):
    assert type(own.exited(SCHEDULER_ID, status, do_workers_run=True, has_begun=has_begun)) is kind


@pytest.mark.parametrize(
    ("home", "where"), [("/logs", "its log: /logs/server_1.log"), ("", "its log: server_1.log")], ids=["home", "away"]
)
def test_server_that_ends_while_workers_run_is_the_first_failure(plan, home, where):
    own = OwnProcesses(plan, home)
    error = own.exited(FIRST_SERVER_ID - 1, FAILED, do_workers_run=True, has_begun=False)
    assert isinstance(error, ServerFailed) and error.exit_code == 7
    assert str(error).startswith("server 1 on ") and str(error).endswith(f" failed first: exit code 7; {where}")
    assert own.exited(FIRST_SERVER_ID - 1, FAILED, do_workers_run=False, has_begun=False) is None


def test_where_the_log_goes_with_the_job_its_last_line_is_shown(plan, tmp_path):
    own = OwnProcesses(plan, "")
    assert own.describe_log() == "it said nothing"
    log = tmp_path / "scheduler.log"
    log.write_bytes(b"early\n" * LAST_WORDS_BYTES + b" cannot go on: \xff \n\n \n")
    assert own.describe_log() == "its last words: cannot go on: \\xff"
    log.write_bytes(b"\n \n")
    assert own.describe_log() == "it said nothing"
    shutil.rmtree(tmp_path)
    assert own.describe_log() == f"the log directory {tmp_path} was removed: leave it there while the job runs"


@pytest.mark.parametrize(
    ("status", "has_begun", "kind", "words"),
    [
        (None, False, OwnProcessLost, "unexpectedly; every worker"),
        (signal.SIGKILL, False, OwnProcessLost, "unexpectedly; every worker"),
        (signal.SIGABRT, False, ClusterError, "unexpectedly (ulimit -v 9); every worker"),
        (signal.SIGABRT, True, OwnProcessLost, "unexpectedly (ulimit -v 9); every worker"),
    ],
)
def test_end_of_the_fork_server_is_told_with_the_limit_that_made_it(own, monkeypatch, status, has_begun, kind, words):
    """What a limit ends before the job has begun, it would end again."""
    monkeypatch.setattr(module, "explain_limit", lambda how, _: "ulimit -v 9" if how == signal.SIGABRT else "")
    error = own.server_ended(status, has_begun=has_begun)
    assert type(error) is kind and words in str(error)


@pytest.mark.parametrize(("ignores", "is_nohup"), [(False, True), (True, False)])
def test_signals_are_bytes_until_the_end_but_for_the_hangup_that_nohup_ignores(request, ignores, is_nohup):
    before = lambda *_: None  # noqa: E731
    for number in SIGNALS:
        request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))
        signal.signal(number, signal.SIG_IGN if is_nohup and number == signal.SIGHUP else before)
    hold_signals()
    signal.raise_signal(signal.SIGUSR1)
    with SignalPipe((signal.SIGUSR1,), ignore_afterwards=ignores, time_limit_s=0.01) as pipe:
        for number in SIGNALS[:4]:
            signal.raise_signal(number)
        pipe.tell(signal.SIGUSR2)  # which nobody wants
        found = []
        wait_until(lambda: found.extend(pipe.read()) or signal.SIGALRM in found, "the time limit")
        assert sorted(found) == sorted({*SIGNALS} - ({signal.SIGHUP} if is_nohup else set())) and pipe.read() == []
        pipe.tell(signal.SIGHUP)
        assert await_input(pipe, 0.0) and pipe.read() == [signal.SIGHUP]
        signal.setitimer(signal.ITIMER_REAL, 600.0)
    pipe.tell(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    expected = [signal.SIG_IGN if ignores or number == signal.SIGHUP else before for number in SIGNALS]
    assert [signal.getsignal(number) for number in SIGNALS] == expected
    assert signal.set_wakeup_fd(-1) == -1


class Faults(OwnFaults):
    def __init__(self, folder, found_in=None):
        self.said = []
        super().__init__(folder, self.said.append, found_in=str(folder) if found_in is None else found_in)
        self.log = folder / "scheduler.log"


@pytest.fixture
def faults(tmp_path):
    return Faults(tmp_path)


def slip():
    raise KeyError("gone")


class Broken:
    tick_s: float | None = 1.0

    def note(self, kind, fields):
        slip()

    def tick(self, membership):
        slip()


class Heard(Broken):
    def __init__(self):
        self.kinds = []

    def note(self, kind, fields):
        self.kinds.append(kind)

    def tick(self, membership):
        self.kinds.append("tick")


def test_observer_that_fails_is_told_of_once_and_the_others_hear_everything(faults):
    heard = Heard()
    observers = Observers([Broken(), heard], faults)
    for _ in range(3):
        observers.tell("running")
    observers.tick(Membership([0]))
    assert heard.kinds == ["running"] * 3 + ["tick"]
    assert faults.said == [
        "warning: msrun's own display (Broken) failed: KeyError: 'gone'; the job is not affected, traceback in "
        + str(faults.log)
    ]
    assert faults.log.read_text().count("Traceback") == 1


def test_another_kind_is_told_again(faults):
    for error in (ValueError("a"), ValueError("b"), TypeError("a")):
        with faults.kept_from_job("x"):
            raise error
    assert len(faults.said) == 2, "of one place, each kind"
    with pytest.raises(ServerFailed, match=r"\Aof a server\Z"), faults.named():
        raise ServerFailed("of a server", 7)


def test_thread_that_ends_with_an_exception_is_named(faults):
    with faults:
        thread = threading.Thread(target=slip, name="msrun-hosts")
        thread.start()
        thread.join()
    assert len(faults.said) == 1 and "thread msrun-hosts failed: KeyError: 'gone'" in faults.said[0]
    assert "in slip" in faults.log.read_text()


def test_traceback_that_the_user_would_not_find_is_told_itself(tmp_path):
    for faults in (Faults(tmp_path, found_in=""), Faults(tmp_path / "removed")):
        with faults.kept_from_job("x"):
            slip()
        assert "Traceback" in faults.said[0] and "in slip" in faults.said[0]
