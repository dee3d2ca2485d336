"""The launcher's and the agent's end of their channel, each with noise from the other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from failure_reports import failed, failure_of
from fake_agents import FakePipe, FakeSignals

from fuzz.mutation import change_bytes, change_value, encode_any
from msrun.agent.observer import OwnFaults
from msrun.cluster.failure import FailureReport
from msrun.cluster.messages import encode_message, frame
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.agents import Agents
from msrun.launch.fleet.fleet_job import FleetJob, FleetRun
from msrun.launch.fleet.hosts import ListedHosts, ReadyHosts
from msrun.launch.remote.launcher_link import LauncherLink
from msrun.launch.remote.logs import LogCollector, own_logs, pack_piece
from msrun.launch.transport.opener import Way
from msrun.launch.transport.pipe import MARKER, SocketPipe
from msrun.planning.hosts.assignment import assign_hosts
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.plan import HostPlan, WorkerPlan
from msrun.planning.program import Program
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec

MESSAGES_OF_A_JOB = 20


def spec_in(folder: Path) -> LaunchSpec:
    return LaunchSpec(
        program=Program("script", "/t.py"),
        worker_num=2,
        local_worker_num=0,
        working_directory=folder,
        log_dir=folder,
        max_restarts=1,
        tail_ranks=(),
        host_entries=(HostEntry("localhost", 1), HostEntry("127.0.0.2", 1)),
    )


def worker_failure(rank: int) -> dict[str, Any]:
    texts = {"host": "h", "signal": None, "hint": "", "log": f"/x/worker_{rank}.log", "excerpt": ["line"]}
    return {"global_rank": rank, "local_rank": 0, "pid": 7, "exit_code": 1, "run_time_s": 1.5, **texts}


def messages_of(node: int) -> list[dict[str, Any]]:
    """Return what a good agent says in the course of a job."""
    worker = WorkerPlan(node, 0, 0, {"RANK": str(node)}, f"/spool/worker_{node}.log")
    plan = HostPlan(node, f"h{node}", "10.0.0.1", Program("script", "/t.py"), "/", "fork", (), {"A": "b"}, (worker,))
    failure = {
        "job_id": "J", "exit_code": 1, "reason": "r", "first_failure": worker_failure(node), "lagging": [],
        "others": [{"global_rank": 0, "state": "done"}], "attempts": [{"attempt": 0, "reason": "r", "run_time_s": 1.0}],
    }  # fmt: skip

    report = {"name": "h", "python": "3.11", "sources": [["a", "b"]], "addresses": [], "findings": []}

    def event(moment: str, **fields: object) -> dict[str, Any]:
        return {"type": "event", "moment": moment, "fields": fields}

    return [
        {"type": "checked", "report": report},
        {"type": "listening", "port": 4711, "error": ""},
        {"type": "reached", "result": {"error": "", "source": "10.0.0.1", "interface": "eth0", "is_own": False}},
        {"type": "planned", "host": encode_record(plan), "notes": [], "target": "cpu", "logs": [f"worker_{node}.log"]},
        event("preparing", preload=["torch"]),
        event("ready", start_method="fork", reason="", prepare_s=0.5),
        event("started", global_rank=node, pid=100),
        event("exited", global_rank=node, how="exit code 1", status=256, state="failed"),
        event("stopping", reason="r"),
        event("log_lost", reason="r", lost_bytes={"0": 7}),
        event("signal", name="USR1", global_ranks=[0, 1]),
        event("restarting", attempt=1, delay_s=1.0, reason="r"),
        event("note", text="t"),
        failed(0, FailureReport(failure_of(node), can_restart=True)),
        {"type": "ended", "attempt": 0, "can_continue": True, "come": [node]},
        {"type": "done", "attempt": 0, "rank": node, "has_come": False},
        {"type": "ready", "attempt": 1},
        pack_piece(f"worker_{node}.log", 0, b"text\n" * 9),
        {"type": "error", "text": "t", "exit_code": 3},
        {"type": "result", "failure": failure, "survivors": []},
        {"type": "logs_end"},
        {"type": "beat", "seen": 1},
        {"type": "attached", "seen": 1},
    ]  # fmt: skip


def said_before(data: bytes) -> FakePipe:
    """Return the pipe of an agent that has said what it has to say."""
    pipe = FakePipe(data)
    pipe.end(1)
    return pipe


class Links:
    """Two links whose agents have said everything already."""

    def __init__(self, agents: Agents, spec: LaunchSpec, said: Mapping[int, bytes]) -> None:
        self.all = [
            agents.make_link(entry, Way(lambda _, node=node: said_before(said[node])), None, node)
            for node, entry in enumerate(spec.host_entries)
        ]

    def read(self) -> None:
        """Have them heard to their end."""
        for link in self.all:
            link.start()


def _said(rng: Random, node: int, numbers: Iterator[int]) -> bytes:
    """Return what an agent says: good messages, and one of every few changed."""
    found = bytearray(MARKER)
    for message in rng.choices(messages_of(node), k=MESSAGES_OF_A_JOB // 2):
        if rng.random() < 0.5:
            found += encode_message({**message, "seq": next(numbers)})
        else:
            found += frame(encode_any(rng, change_value(rng, {**message, "seq": next(numbers)})))
    return change_bytes(rng, bytes(found)) if rng.random() < 0.1 else bytes(found)


def _batches(rng_of: Iterator[Random]) -> Iterator[Random]:
    """Yield one generator for each job; the job has so many messages."""
    for index, rng in enumerate(rng_of):
        if index % MESSAGES_OF_A_JOB == 0:
            yield rng


def launchers(rng_of: Iterator[Random], folder: Path) -> Iterator[None]:
    """A job on two hosts whose agents say anything: it ends with a result, and its own files alone are written."""
    os.environ["COLUMNS"] = "100"
    for rng in _batches(rng_of):
        spec = spec_in(folder)
        with contextlib.ExitStack() as stack:
            signals = FakeSignals()
            stack.callback(signals.close)
            logs = LogCollector(folder, None, own_logs("worker", {0: (0,), 1: (1,)}), spec.max_restarts)
            stack.callback(logs.close)
            events = EventLog(folder / "events.jsonl")
            stack.callback(events.close)
            preparation = stack.enter_context(_prepared(spec, signals, logs, events))
            numbers = iter(range(1, 10_000))
            agents = preparation.agents
            stack.callback(agents.loop.close, time.monotonic() + 30)
            said = {node: _said(rng, node, numbers) for node in range(2)}
            links = Links(agents, spec, said)
            agents.links = links.all
            if rng.random() < 0.3:
                links.read()
                preparation._await_answers(time.monotonic())
            else:
                faults = OwnFaults(folder, print, found_in=str(folder))
                job = FleetJob(spec, {}, "J", preparation, events, faults, quiet=True)
                ready = ReadyHosts(("10.0.0.1", 1), assign_hosts(spec.host_entries), frozenset())
                run = FleetRun(job, spec, ready, logs)
                links.read()
                assert run.finish().exit_code > 0, "an agent that leaves without a word is a failure"
                assert (
                    not (folder / "scheduler.log").exists()
                    or b"Traceback" not in (folder / "scheduler.log").read_bytes()
                ), "what an agent says is no fault of msrun's own"
        names = {path.name for path in folder.iterdir()} - {
            "events.jsonl",
            "plan.json",
            "failure.json",
            "rank_table.json",
        }
        allowed = {"scheduler.log", *(f"worker_{rank}{end}.log" for rank in range(2) for end in ("", ".attempt_0"))}
        assert names <= allowed, names
        for _ in range(MESSAGES_OF_A_JOB):
            yield


@contextlib.contextmanager
def _prepared(spec: LaunchSpec, signals: Any, logs: LogCollector, events: EventLog) -> Iterator[ListedHosts]:
    preparation = ListedHosts(spec, {}, "J", mock.Mock(), signals, events, lambda _: None)
    preparation.agents.logs = logs
    with contextlib.closing(preparation.agents.inbox):
        yield preparation


WISHES = (
    {"type": "job", "job": {"protocol": 5}},
    {"type": "listen", "address": "10.0.0.1", "port": 0},
    {"type": "run", "master_addr": "10.0.0.1", "master_port": 1, "use_shared": False, "hosts": "", "rank_table": ""},
    {"type": "stop", "attempt": 0, "report": {}},
    {"type": "restart", "attempt": 1, "delay_s": 0.0},
    {"type": "signal", "signum": int(signal.SIGUSR1)},
    {"type": "beat", "seen": 3},
    {"type": "attach", "seen": 0},
    {"type": "bye"},
)


def launcher_ends(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """An agent whose launcher says anything: its thread goes on, or lets the agent end."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for rng in _batches(rng_of):
            ours, theirs = socket.socketpair()
            link = LauncherLink(SocketPipe(ours=ours))
            for _ in range(MESSAGES_OF_A_JOB):
                data = frame(encode_any(rng, change_value(rng, {**rng.choice(WISHES), "seq": rng.randint(0, 9)})))
                with contextlib.suppress(OSError):
                    theirs.sendall(change_bytes(rng, data) if rng.random() < 0.1 else data)
                for _ in range(4):
                    link.loop.turn(0.0)
                yield
            theirs.close()
            link.start()
            link.close()
