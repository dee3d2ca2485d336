"""A job's state from what it left: lock, events and failure file; step and loss from board and logs."""

import json
import math
import os
import random
import socket
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msrun import contract
from msrun.agent.processes.process_control import Usage
from msrun.errors import ClusterError, UsageError
from msrun.launch import status as module
from msrun.launch.directory.log_directory import (
    EventsRecord,
    LockRecord,
    LockState,
    PlannedWorker,
    PlanRecord,
    WorkerRecord,
)
from msrun.launch.status import (
    JobState,
    decide_state,
    drain_host,
    head_lines,
    read_status,
    rich_table,
    show_logs,
    stop_job,
)

RECORD = LockRecord("a", 5, "h", 100.0)
HELD, FREE = LockState(RECORD, 5), LockState(RECORD, None)
DONE = {0: WorkerRecord(7, "done", "exit code 0")}
ENDED_BADLY = {0: WorkerRecord(7, "failed", "exit code 4")}
WORKER_FAILURE = {"job_id": "a", "exit_code": 4, "reason": "rank 0 failed", "first_failure": {"global_rank": 0}}


def fault(exit_code):
    return {"job_id": "a", "exit_code": exit_code, "reason": "why", "first_failure": None}


@pytest.mark.parametrize(
    ("lock", "events", "failure", "expected"),
    [
        (HELD, EventsRecord(), {}, (JobState.STARTING, "")),
        (LockState(None, 5), EventsRecord(), {}, (JobState.STARTING, "")),
        (LockState(RECORD, 0), EventsRecord(is_running=True), {}, (JobState.RUNNING, "")),
        (HELD, EventsRecord(is_running=True, restarts=1), {}, (JobState.RUNNING, "")),
        (HELD, EventsRecord(is_running=True, stopping="rank 0 ended"), {}, (JobState.STOPPING, "rank 0 ended")),
        (HELD, EventsRecord(stopping="s", over="o"), {}, (JobState.STOPPING, "o")),
        (HELD, EventsRecord(over="o"), WORKER_FAILURE, (JobState.STOPPING, "o")),
        (FREE, EventsRecord(workers=DONE, over="well"), {}, (JobState.ENDED, "well")),
        (FREE, EventsRecord(workers=ENDED_BADLY, over="badly"), {}, (JobState.FAILED, "badly")),
        (FREE, EventsRecord(workers=DONE, stopping="s", over="o"), {}, (JobState.FAILED, "o")),
        (FREE, EventsRecord(workers=ENDED_BADLY, over="o"), WORKER_FAILURE, (JobState.FAILED, "rank 0 failed")),
        (FREE, EventsRecord(), fault(contract.EXIT_CLUSTER), (JobState.FAILED, "why")),
        (FREE, EventsRecord(over="o"), fault(130), (JobState.INTERRUPTED, "why")),
        (FREE, EventsRecord(), {**WORKER_FAILURE, "exit_code": 143}, (JobState.FAILED, "rank 0 failed")),
        (FREE, EventsRecord(is_running=True), {}, (JobState.DIED, "")),
        (FREE, EventsRecord(stopping="s"), {}, (JobState.DIED, "")),
        (FREE, EventsRecord(), {}, (JobState.DIED, "")),
        (LockState(LockRecord("a", 5, "h", 1.0, "disk"), None), EventsRecord(), {}, (JobState.FAILED, "disk")),
        (LockState(None, None), EventsRecord(over="well"), {}, (JobState.ENDED, "well")),
    ],
)
def test_state_follows_from_lock_events_and_failure(lock, events, failure, expected):
    assert decide_state(lock, events, failure) == expected


class Directory:
    """The log directory of a job of two workers that has ended or died."""

    def __init__(self, path):
        self.path = path
        self.run_dir = path / "run"
        self.run_dir.mkdir()
        self.lock = {"job_id": "a", "pid": 5, "host": "h", "started_at": 100.0}
        self.write(contract.LOCK_FILE, self.lock)
        workers = [{"global_rank": rank, "log": f"/moved/worker_{rank}.log"} for rank in (0, 1)]
        hosts = [{"name": "h", "workers": workers}]
        self.write(contract.PLAN_JSON, {"job_id": "a", "run_dir": str(self.run_dir), "grace_s": 3, "hosts": hosts})
        self.events = []
        self.note("preparing")
        for rank in (0, 1):
            self.note("started", global_rank=rank, pid=10 + rank)
        self.note("running")

    def note(self, kind, **fields):
        self.events.append({"time": 100.0 + len(self.events), "event": kind, **fields})
        text = "".join(json.dumps(event) + "\n" for event in self.events)
        (self.path / contract.EVENTS_JSONL).write_text(text)

    def write(self, name, value):
        (self.path / name).write_text(json.dumps(value) + "\n")

    def end(self):
        for rank in (0, 1):
            self.note("exited", global_rank=rank, state="done", how="exit code 0")
        self.note("over", reason="well")


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


def test_logs_of_ranks_that_another_host_has_are_not_looked_for(directory):
    workers = [{"global_rank": rank, "log": f"/moved/worker_{rank}.log"} for rank in (0, 2)]
    plan = {"job_id": "a", "run_dir": "/r", "hosts": [{"name": "h", "workers": workers}]}
    directory.write(contract.PLAN_JSON, plan)
    (directory.path / contract.EVENTS_JSONL).unlink()
    with pytest.raises(UsageError, match="--ranks 1: the job has no rank 1; it has ranks 0, 2"):
        show_logs(directory.path, "1", lines=1, follows=False)


def test_use_is_told_of_the_running_workers_of_this_host_alone(monkeypatch):
    """A process id of another host stands for somebody else here."""
    here = socket.gethostname()
    measured = []

    def measure(pids):
        measured[:] = pids
        return {pid: Usage(1.0, 0 if pid == 13 else 9) for pid in measured}

    monkeypatch.setattr(module, "session_usage", measure)
    workers = {rank: WorkerRecord(10 + rank, "running", "") for rank in range(5)}
    events = EventsRecord(workers={**workers, 1: WorkerRecord(11, "done", "")})
    planned = tuple(PlannedWorker(rank, "other" if rank == 2 else here, "") for rank in range(4))
    plan = PlanRecord("J", "/no/such/folder", None, (here,), planned)
    job = SimpleNamespace(is_over=False, launcher_host=here, clock=0.0)
    rows = list(module._build_rows(job, plan, events))
    assert [row.usage for row in rows] == [Usage(1.0, 9), *[None] * 4]
    assert measured == [10, 13], "1 has ended, 2 is of another host, 4 is not of the plan"
    job.is_over = True
    assert [row.usage for row in module._build_rows(job, plan, events)] == [None] * 5


def test_job_that_ended_well_is_told_with_its_run_time(directory, capsys):
    directory.end()
    (directory.path / "worker_1.log").write_text("written by what the job has left")
    status = read_status(directory.path)
    assert (status.state, status.reason, status.status_code, status.run_time_s) == (JobState.ENDED, "well", 0, 6.0)
    assert (status.job_id, status.launcher_pid, status.launcher_host, status.hosts) == ("a", 5, "h", ("h",))
    assert stop_job(directory.path, pytest.fail) == f"job a had ended before: {status.describe()}"
    with rich_table() as show:
        show(status)
    assert capsys.readouterr().out.startswith(head_lines(status)[0])
    assert [(row.global_rank, row.host, row.pid, row.state) for row in status.rows] == [
        (0, "h", 10, "done"),
        (1, "h", 11, "done"),
    ]


def test_workers_of_a_job_that_died_are_lost_and_it_ran_until_its_last_sign_of_life(directory):
    (directory.path / "worker_1.log").write_text("x")
    os.utime(directory.path / "worker_1.log", (150.0, 150.0))
    status = read_status(directory.path)
    assert (status.describe(), status.status_code, status.run_time_s) == ("launcher died", 1, 50.0)
    assert [row.state for row in status.rows] == ["lost", "lost"]
    assert [row.log_at for row in status.rows] == [None, 150.0]


def test_job_that_cannot_be_stopped_and_host_that_cannot_leave_are_told(directory, monkeypatch):
    status = SimpleNamespace(is_over=False, log_dir=directory.path, job_id="a", launcher_pid=5, grace_s=0.0)
    monkeypatch.setattr(module, "read_status", lambda *_: status)
    monkeypatch.setattr(module, "read_lock", lambda _: LockState(None, os.getpid()))
    monkeypatch.setattr(module, "signal_processes", lambda *_: None)
    for name in ("OVERTIME_S", "TAKEN_S"):
        monkeypatch.setattr(module, name, 0.0)
    with pytest.raises(ClusterError, match="job a has not ended within 0 s; kill -KILL"):
        stop_job(directory.path, lambda _: None)
    monkeypatch.setattr(os, "kill", mock.Mock(side_effect=PermissionError))
    with pytest.raises(ClusterError, match="is another user's; only its owner may end it"):
        stop_job(directory.path, pytest.fail)
    with pytest.raises(UsageError, match="msrun drain h: the job has no other host; msrun stop"):
        drain_host(directory.path, "h")
    directory.write(contract.PLAN_JSON, {"hosts": [{"name": "h"}, {"name": "i"}]})
    with pytest.raises(ClusterError, match=r"msrun drain h: the launcher \(pid 5\) does not answer"):
        drain_host(directory.path, "h")
    assert not [*(directory.path / contract.DRAIN).iterdir()]


def test_failure_of_another_job_is_called_damage(directory):
    directory.end()
    directory.write(contract.FAILURE_JSON, {"job_id": "b", "exit_code": 4, "reason": "r"})
    status = read_status(directory.path)
    assert (status.state, status.notes) == (JobState.ENDED, ("failure.json is damaged",))


def test_damaged_plan_leaves_the_workers_that_the_events_name(directory):
    (directory.path / contract.PLAN_JSON).write_text("{")
    status = read_status(directory.path)
    assert status.notes == ("plan.json is damaged",)
    assert [(row.global_rank, row.host, row.pid) for row in status.rows] == [(0, "h", 10), (1, "h", 11)]


@pytest.mark.parametrize(
    ("log", "step", "loss"),
    [
        (b"", None, None),
        (b"no numbers\n", None, None),
        (b"epoch: 1 step: 41, loss is 0.25\n", 41, 0.25),
        (b"epoch: 1 step: 41, loss is 0.25\nepoch: 1 step: 42, loss is nan\n", 42, math.nan),
        (b"Step 7/100 loss=1e-3\n", 7, 1e-3),
        (b"global_step=12 loss: 3\xff\x00", 12, 3.0),
        (b"loss: e\nfootstep 9\nstep " + b"9" * 400, 999999999999999999, None),
    ],
)
def test_step_and_loss_are_read_from_the_log(directory, log, step, loss):
    (directory.path / "worker_0.log").write_bytes(log)
    row = read_status(directory.path).rows[0]
    assert row.step == step
    assert row.loss == loss or (loss is not None and math.isnan(loss) and row.loss is not None and math.isnan(row.loss))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("", {}),
        ("", {"notes.txt": "mine"}),
        ("", {contract.LOCK_FILE: "{"}),
        ("", {contract.PLAN_JSON: "[]", contract.LOCK_FILE: ""}),
        *((name, {"file": ""}) for name in ("nowhere", "file", "file/below")),
    ],
)
def test_directory_that_is_none_or_no_jobs_is_refused_in_one_line(tmp_path, name, content):
    for file, text in content.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(UsageError, match=r"^--stop .*; give the --log_dir of a job$") as caught:
        read_status(tmp_path / name, "--stop")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_files_of_another_user_are_refused_in_one_line(directory):
    (directory.path / contract.PLAN_JSON).chmod(0)
    with pytest.raises(UsageError, match=r"cannot read .*plan\.json \(Permission denied\)"):
        read_status(directory.path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 1 << 32))
def test_no_damage_to_any_file_is_more_than_a_line(directory, seed):
    chance = random.Random(seed)
    fresh = Directory.__new__(Directory)
    fresh.__dict__.update(directory.__dict__, events=list(directory.events))
    Directory.end(fresh)
    fresh.write(contract.LOCK_FILE, fresh.lock)
    fresh.write(contract.FAILURE_JSON, WORKER_FAILURE)
    originals = {}
    for name in (contract.LOCK_FILE, contract.PLAN_JSON, contract.EVENTS_JSONL, contract.FAILURE_JSON):
        path = fresh.path / name
        originals[path] = data = path.read_bytes()
        begin = chance.randint(0, len(data))
        noise = chance.randbytes(chance.randint(0, 4)) if chance.random() < 0.5 else b""
        path.write_bytes(data[:begin] + noise + data[begin + chance.randint(0, len(data)) :])
    try:
        assert read_status(fresh.path).describe()
    except UsageError as error:
        assert "\n" not in str(error)
    finally:
        for path, data in originals.items():
            path.write_bytes(data)


def test_reading_changes_nothing(directory):
    def listing():
        entries = [(path.name, path.stat()) for path in sorted(directory.path.rglob("*"))]
        return [(name, found.st_size, found.st_mtime_ns) for name, found in entries]

    before = listing()
    read_status(directory.path)
    assert listing() == before
