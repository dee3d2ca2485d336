"""What is written of a job for others: its trace, its numbers for Prometheus; what its scheduler and user are told."""

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
from file_tree import grow
from plans import small_plan, small_spec

from msrun import contract
from msrun.agent.processes.process_control import Usage
from msrun.cluster.membership import Membership, WorkerState
from msrun.cluster.messages import Channel
from msrun.errors import UsageError
from msrun.launch import metrics_file as module
from msrun.launch.job import OwnStart, describe_shadowed_package
from msrun.launch.metrics_file import INTERVAL_S, MetricsFile
from msrun.launch.trace import build_trace
from msrun.planning.program import Program

EVENTS = [
    {"time": 100.0, "event": "preparing"},
    {"time": 100.5, "event": "started", "global_rank": 0, "pid": 7},
    {"time": 100.5, "event": "started", "global_rank": 1, "pid": 8},
    {"time": 101.0, "event": "exited", "global_rank": 1, "state": "failed", "how": "exit code 4"},
    {"time": 101.5, "event": "restarting", "job_s": 1.5, "reason": "rank 1 failed"},
    {"time": 102.0, "event": "started", "global_rank": 1, "pid": 9},
    {"time": 102.5, "event": "memory", "global_rank": 1},
]
WORKER = [
    {"global_rank": 0, "host": "b", "pid": 7, "attempt": 0, "time": 100.5, "clock": 50.0},
    ["step", "1", 50.5, 51.0],
    ["wait", "all_reduce", 50.75, 50.875],
    ["wait", "late", 51.0, 50.0],
]


def json_lines(values):
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def names(process, name, *rows):
    said = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": process})]
    said += [("thread_name", row, {"name": text}) for row, text in enumerate(rows)]
    return [{"name": kind, "ph": "M", "pid": process, "tid": row, "args": args} for kind, row, args in said]


def span(rank, row, name, begin_ms, length_ms, args):
    kind = ("process", "steps", "waits in collectives")[row]
    place = {"pid": rank + 1, "tid": row, "ts": 1000 * begin_ms, "dur": 1000 * length_ms}
    return {"name": name, "cat": kind, "ph": "X", **place, "args": args}


def test_processes_moments_steps_and_waits_are_on_one_clock():
    trace = build_trace("J", {1: "a"}, [json_lines(EVENTS)], [json_lines(WORKER)])
    moment = {"cat": "job", "ph": "i", "s": "g", "pid": 0, "tid": 0}
    rows = ("process", "steps", "waits in collectives")
    assert trace.events == [
        *names(0, "msrun, job J", "events"),
        {"name": "preparing", "ts": 0, **moment, "args": {}},
        span(1, 0, "failed: exit code 4", 500, 500, {"attempt": 0, "pid": 8}),
        {"name": "restarting", "ts": 1_500_000, **moment, "args": {"reason": "rank 1 failed"}},
        span(0, 0, "running", 500, 2000, {"attempt": 1, "pid": 7}),
        span(1, 0, "running", 2000, 500, {"attempt": 1, "pid": 9}),
        span(0, 1, "step 1", 1000, 500, {"attempt": 0}),
        span(0, 2, "all_reduce", 1250, 125, {"attempt": 0}),
        span(0, 2, "late", 1500, 0, {"attempt": 0}),
        *names(1, "rank 0 on b", *rows),
        *names(2, "rank 1 on a", *rows),
    ]
    assert trace.found == {"ranks": 2, "steps": 1, "waits": 2}


def test_moments_of_the_job_are_those_of_the_first_log():
    """Of a job that was started on each host, every host has written them."""
    events = [{"time": 5.0, "event": "over", "code": 0}, {"time": 4.0, "event": "started", "global_rank": 3, "pid": 1}]
    trace = build_trace("J", {}, [json_lines(events[:1]), json_lines(events)], [])
    assert [event["name"] for event in trace.events if event["ph"] == "i"] == ["over"]
    processes = [event["args"]["name"] for event in trace.events if event["name"] == "process_name"]
    assert processes == ["msrun, job J", "rank 3"]


NOW, CLOCK = 5000.0, 70.0


@pytest.fixture
def clock(monkeypatch):
    """The wall clock and the monotonic one, as the file's module sees them."""
    moments = {"now": NOW, "clock": CLOCK}
    monkeypatch.setattr(module.time, "time", lambda: moments["now"])
    monkeypatch.setattr(module.time, "monotonic", lambda: moments["clock"])
    monkeypatch.setattr(module, "session_usage", lambda pids: {pid: Usage(cpu_s=2.5, memory_bytes=9) for pid in pids})
    return moments


@pytest.fixture
def path(tmp_path, clock):
    return tmp_path / "job.prom"


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "logs").mkdir()
    return small_plan(tmp_path, 2, tmp_path / "logs", str(tmp_path))


def running(count=2):
    membership = Membership(range(count))
    for rank in range(count):
        membership.started(rank, 11 + rank, 0.0)
    return membership


def samples(path):
    """Return the samples without the label of the job."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.replace('job_id="J",', "").replace('{job_id="J"}', "").rsplit(" ", 1) for line in lines)


@pytest.mark.parametrize(("are_here", "measured"), [(True, 2), (False, 0)])
def test_ranks_that_other_hosts_write_are_left_out_and_workers_elsewhere_have_no_memory_here(
    path, plan, clock, are_here, measured
):
    """Where msrun is typed on every host, the one with the scheduler hears of all ranks."""
    metrics = MetricsFile(path, plan, are_workers_here=are_here)
    clock["clock"] += 100.0
    metrics.tick(running(4))
    found = samples(path)
    assert found[f'msrun_workers{{state="{WorkerState.RUNNING.value}"}}'] == "2.0"
    for name in ("memory_bytes", "cpu_seconds"):
        assert sum(sample.startswith(f"msrun_worker_{name}") for sample in found) == measured


def test_file_is_written_when_it_is_time_and_at_the_end(path, plan, clock):
    metrics = MetricsFile(path, plan, are_workers_here=True)
    metrics.note("restarting", {"attempt": 2})
    metrics.note("stopping", {"attempt": 9})
    clock["clock"] += INTERVAL_S - 0.1
    metrics.tick(running())
    assert samples(path)['msrun_workers{state="running"}'] == "0.0"
    clock["clock"] += 0.1
    metrics.tick(running())
    assert samples(path)['msrun_workers{state="running"}'] == "2.0"
    assert samples(path)["msrun_restarts_total"] == "2"
    metrics.finish(Membership(range(2)), 5)
    ended = samples(path)
    assert (ended["msrun_job_running"], ended["msrun_job_exit_code"]) == ("0.0", "5.0")


def test_full_disk_ends_no_job_and_leaves_no_half_file(path, plan, clock, monkeypatch):
    metrics = MetricsFile(path, plan, are_workers_here=True)
    before = path.read_text()
    monkeypatch.setattr(os, "fchmod", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    clock["clock"] += INTERVAL_S
    metrics.tick(running())
    metrics.finish(running(), 0)
    assert path.read_text() == before and sorted(os.listdir(path.parent)) == ["job.prom", "logs"]
    with pytest.raises(UsageError, match=r"--metrics_file .*: cannot be written \(No space left on device\)"):
        MetricsFile(path, plan, are_workers_here=True)


def test_scheduler_is_told_of_the_job_first_and_then_of_its_moments_as_they_are(tmp_path):
    with contextlib.ExitStack() as stack:
        ends = socket.socketpair()
        ours, theirs = (stack.enter_context(contextlib.closing(Channel(end))) for end in ends)
        record = OwnStart(small_plan(tmp_path, 2), {}, socket.socket(), has_store=True)
        record.follow(ours)
        record.note("started", {"global_rank": 1, "pid": 7})
        job, started = theirs.receive()
        ends[0].settimeout(0.01)
        for _ in range(1000):
            record.note("note", {"text": "x" * 10000})
        assert ours.is_closed, "one that is stopped is told nothing more"
    assert (job["type"], job["job_id"], job["world_size"], job["has_store"]) == ("job", "J", 2, True)
    assert started == {"type": "started", "global_rank": 1, "pid": 7}


OTHER, BELOW = {"msrun/__init__.py": ""}, {"program": Program("script", "below/x.py")}


@pytest.mark.parametrize(
    ("files", "changes", "environment", "named"),
    [
        (OTHER, {}, {}, "msrun"),
        ({"msrun.py": ""}, {}, {}, "msrun.py"),
        (OTHER, {"program": Program("module", "x")}, {}, "msrun"),
        (OTHER, BELOW, {"PYTHONPATH": "no:."}, "msrun"),
        (OTHER, BELOW, {"PYTHONPATH": ""}, None),
        (OTHER, {}, {"PYTHONSAFEPATH": "1"}, None),
        (OTHER, {"program": Program("executable", "x")}, {}, None),
        (OTHER, {"start_method": "exec"}, {}, None),
        (OTHER | {"msrun/contract.py": Path(contract.__file__).read_text()}, {}, {}, None),
        ({"msrun/contract.py": ""}, {}, {}, None),
    ],
)
def test_a_package_named_msrun_that_workers_would_import_is_told_of_unless_it_is_a_clone(
    tmp_path, files, changes, environment, named
):
    grow(tmp_path, files)
    told = describe_shadowed_package(small_spec(tmp_path, **changes), environment)
    path = f"{tmp_path}/{named}: workers import msrun's own package of that name, not this one; rename it, or give "
    assert told == (f"{path}--start_method exec, with which they import it and not msrun.runtime" if named else "")
