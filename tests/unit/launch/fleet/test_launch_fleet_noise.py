"""Noise of strangers, hosts, schedulers and agents: nothing that they say raises, or writes where it should not."""

import contextlib
import copy
import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from failure_reports import failed, failure_of
from fake_agents import FakePipe, FakeSignals
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from open_gate import TOKEN, OpenGate, host_request

from msrun.agent.observer import OwnFaults
from msrun.cluster.connection import Caller, Connection, Refused, Seal, hello, new_nonce, read_hello
from msrun.cluster.failure import FailureReport
from msrun.cluster.messages import FrameBuffer, frame
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.fleet_job import FleetJob, FleetRun
from msrun.launch.fleet.hosts import ListedHosts, ReadyHosts
from msrun.launch.job import Start
from msrun.launch.remote.agent import LauncherLink
from msrun.launch.remote.logs import LogCollector, own_logs, pack_piece
from msrun.launch.transport.opener import Way
from msrun.launch.transport.pipe import MARKER, SocketPipe
from msrun.planning.hosts import HostEntry, assign_hosts
from msrun.planning.plan import HostPlan, WorkerPlan
from msrun.planning.program import Program
from msrun.planning.record import encode_record
from msrun.planning.spec import LaunchSpec

NONCE = "0" * 64
NESTED = json.loads("[" * 30 + "]" * 30)
ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(
        [
            "",
            "\0",
            "\x1b]52;c;aGk=\x07",
            "../../x.log",
            "x" * 5000,
            "worker_0.log",
            [],
            {},
            {"__class__": 1},
            [1] * 300,
            NESTED,
        ]
    )
)
"""What a field may hold that nobody thought of."""
many = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@st.composite
def damaged(draw, value):
    """Return the JSON of a value with a few nodes of it changed, now and then with bytes changed as well."""
    whole = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(0, 3))):
        holder, key = whole, 0
        while isinstance(holder[key], dict | list) and holder[key] and draw(st.booleans()):
            holder = holder[key]
            key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        holder[key] = copy.deepcopy(draw(ODD))  # a later change may be within it
    data = json.dumps(whole[0]).encode("utf-8", "surrogatepass")
    return draw(st.just(data) | changed(data))


def changed(data):
    """Return bytes of which some are cut out and others put in."""
    places, noise = st.integers(0, len(data)), st.binary(max_size=16) | st.sampled_from([b"[" * 1000, b"9" * 400])
    return st.tuples(places, noise, st.integers(0, 40)).map(
        lambda cut: data[: cut[0]] + cut[1] + data[cut[0] + cut[2] :]
    )


@pytest.fixture
def gate():
    """The port of a job that is never complete; what is said there is no fault of it."""
    with OpenGate(worker_num=1000) as found:
        yield found
        assert not [note for note in found.notes if "Error: " in note], found.notes


REGISTER = {"type": "register", "request": encode_record(host_request(0))}
SEAL = Seal(b"guessed", NONCE, NONCE, is_scheduler=False)
PIECES = st.one_of(
    st.just(frame(hello(NONCE))),
    damaged(REGISTER).map(frame),
    damaged(REGISTER).map(lambda body: frame(SEAL.close(body))),
    changed(frame(hello(NONCE))),
    st.binary(max_size=60).map(lambda noise: b"\x16\x03\x01" + noise),
)


@many
@given(pieces=st.lists(PIECES, min_size=1, max_size=5))
def test_noise_of_strangers_is_refused(gate, pieces):
    with contextlib.suppress(OSError), gate.stranger() as stream:
        stream.sendall(b"".join(pieces))
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(1 << 12):
            pass
    assert not gate.let_in


@many
@given(data=st.data(), node_rank=st.integers(-1, 3), worker_num=st.sampled_from([1000, 2]))
def test_hosts_that_know_the_token_may_ask_for_anything(gate, data, node_rank, worker_num):
    asked = {"type": "register", "request": encode_record(host_request(node_rank, worker_num))}
    with contextlib.suppress(OSError), gate.stranger() as stream:
        (greeting,) = FrameBuffer(1 << 10).feed(stream.recv(1 << 10))
        said, own = read_hello(greeting), new_nonce()
        assert said is not None
        seal = Seal(TOKEN, said[1], own, is_scheduler=False)
        stream.sendall(frame(hello(own)) + frame(seal.close(data.draw(damaged(asked)))))
        stream.recv(1 << 12)


ORDERS = st.sampled_from(
    [{"type": "accepted", "silence_s": 15.0}, {"type": "accepted", "silence_s": None}, {"type": "waiting", "text": "1"}]
).flatmap(damaged)


@many
@given(orders=st.lists(ORDERS, max_size=3), data=st.data())
def test_what_answers_a_host_that_dials_is_understood_or_refused(orders, data):
    ours, theirs = socket.socketpair()
    caller = Caller(Connection(ours), TOKEN, "here", lambda: host_request(0))
    seal = Seal(TOKEN, NONCE, caller.nonce, is_scheduler=True)
    said = frame(hello(NONCE)) + b"".join(frame(seal.close(body)) for body in orders)
    with theirs:
        theirs.sendall(data.draw(st.just(said) | changed(said)))
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(Refused):
            while not caller.connection.is_closed:
                for body in caller.receive():
                    caller.take(body)
    caller.connection.close()


def messages_of(node):
    """Return what a good agent says in the course of a job."""
    worker = WorkerPlan(node, 0, 0, {"RANK": str(node)}, f"/spool/worker_{node}.log")
    plan = HostPlan(node, f"h{node}", "10.0.0.1", Program("script", "/t.py"), "/", "fork", (), {"A": "b"}, (worker,))
    report = {"name": "h", "python": "3.11", "sources": [["a", "b"]], "addresses": [], "findings": []}
    events = {
        "preparing": {"preload": ["torch"]},
        "ready": {"start_method": "fork", "reason": "", "prepare_s": 0.5},
        "started": {"global_rank": node, "pid": 100},
        "exited": {"global_rank": node, "how": "exit code 1", "status": 256, "state": "failed"},
        "stopping": {"reason": "r"},
        "signal": {"name": "USR1", "global_ranks": [0, 1]},
        "restarting": {"attempt": 1, "delay_s": 1.0, "reason": "r"},
        "note": {"text": "t"},
    }
    return [
        {"type": "checked", "report": report},
        {"type": "listening", "port": 4711, "error": ""},
        {"type": "reached", "result": {"error": "", "source": "10.0.0.1", "interface": "eth0", "is_own": False}},
        {"type": "planned", "host": encode_record(plan), "notes": [], "target": "cpu", "logs": [f"worker_{node}.log"]},
        *({"type": "event", "moment": moment, "fields": fields} for moment, fields in events.items()),
        failed(0, FailureReport(failure_of(node), can_restart=True)),
        {"type": "ended", "attempt": 0, "can_continue": True, "come": [node]},
        {"type": "done", "attempt": 0, "rank": node, "has_come": False},
        {"type": "ready", "attempt": 1},
        pack_piece(f"worker_{node}.log", 0, b"text\n" * 9),
        {"type": "error", "text": "t", "exit_code": 3},
        {"type": "result", "failure": None, "survivors": []},
        {"type": "logs_end"},
        {"type": "beat", "seen": 1},
        {"type": "attached", "seen": 1},
    ]


@st.composite
def sayings(draw, node):
    """Return what an agent says: good messages in any order, and some that are damaged."""
    said = bytearray(MARKER)
    for number, message in enumerate(draw(st.lists(st.sampled_from(messages_of(node)), max_size=10)), 1):
        whole = {**message, "seq": number}
        said += frame(draw(st.just(json.dumps(whole).encode()) | damaged(whole)))
    return bytes(said)


@many
@given(said=st.tuples(sayings(0), sayings(1)))
@example(said=(MARKER + frame(b'{"type": "logs_end", "seq": 1}'),) * 2)
def test_job_whose_agents_say_anything_ends_with_a_result_and_writes_its_own_files_alone(said):
    entries = (HostEntry("localhost", 1), HostEntry("127.0.0.2", 1))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = {"working_directory": folder, "log_dir": folder, "host_entries": entries}
        program = Program("script", "/t.py")
        counts = {"worker_num": 2, "local_worker_num": 0, "max_restarts": 1, "tail_ranks": ()}
        spec = LaunchSpec(program=program, **counts, **place)
        signals = stack.enter_context(contextlib.closing(FakeSignals()))
        logs = LogCollector(folder, None, own_logs("worker", {0: (0,), 1: (1,)}), spec.max_restarts)
        events = EventLog(folder / "events.jsonl")
        stack.callback(events.close)
        stack.callback(logs.close)
        waits = (mock.Mock(), signals)
        preparation = ListedHosts(spec, Start({}, "J", quiet=True), *waits, events)
        agents = preparation.agents
        agents.logs = logs
        stack.callback(agents.loop.close, time.monotonic() + 30)
        agents.links = [
            agents.make_link(entry, Way(lambda _, node=node: said_before(said[node])), None, node)
            for node, entry in enumerate(entries)
        ]
        faults = OwnFaults(folder, print, found_in=str(folder))
        job = FleetJob(spec, Start({}, "J", quiet=True), preparation, events, faults)
        run = FleetRun(job, spec, ReadyHosts(("10.0.0.1", 1), assign_hosts(entries), frozenset()), logs)
        for link in agents.links:
            link.start()
        result = run.finish()
        assert result is not None and result.exit_code > 0, "an agent that leaves without a word is a failure"
        log = folder / "scheduler.log"
        assert not log.exists() or b"Traceback" not in log.read_bytes(), "it is no fault of msrun's own"
        allowed = {"events.jsonl", "plan.json", "failure.json", "rank_table.json", "scheduler.log"}
        allowed |= {f"worker_{rank}{end}.log" for rank in range(2) for end in ("", ".attempt_0")}
        assert {path.name for path in folder.iterdir()} <= allowed


def said_before(data):
    """Return the pipe of an agent that has said what it has to say."""
    pipe = FakePipe(data)
    pipe.end(1)
    return pipe


WISHES = st.sampled_from(
    [
        {"type": "job", "job": {"protocol": 5}},
        {"type": "listen", "address": "10.0.0.1", "port": 0},
        {
            "type": "run",
            "master_addr": "10.0.0.1",
            "master_port": 1,
            "use_shared": False,
            "hosts": "",
            "rank_table": "",
        },
        {"type": "stop", "attempt": 0, "report": {}},
        {"type": "restart", "attempt": 1, "delay_s": 0.0},
        {"type": "signal", "signum": int(signal.SIGUSR1)},
        {"type": "beat", "seen": 3},
        {"type": "attach", "seen": 0},
        {"type": "bye"},
    ]
).flatmap(lambda wish: st.integers(0, 9).flatmap(lambda seq: damaged({**wish, "seq": seq})))


@many
@given(wishes=st.lists(WISHES, max_size=20))
def test_agent_whose_launcher_says_anything_goes_on_or_ends(wishes):
    ours, theirs = socket.socketpair()
    link = LauncherLink(SocketPipe(ours=ours))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), theirs:
        for body in wishes:
            with contextlib.suppress(OSError):
                theirs.sendall(frame(body))
            for _ in range(4):
                link.loop.turn(0.0)
        theirs.close()
        link.start()
        link.close()
