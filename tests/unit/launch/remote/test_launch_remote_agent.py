"""An agent against a launcher that says what the test wants, what it tells of its part, and what all hosts get."""

import socket
import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from plans import plan_of, small_spec

from msrun import contract
from msrun.cluster.host_report import HostReport
from msrun.cluster.messages import pack_hosts, pack_text
from msrun.cluster.protocol import HostJob, HostPart, protocol
from msrun.errors import ClusterError
from msrun.launch.remote import agent as module
from msrun.launch.remote.agent import Agent
from msrun.launch.remote.logs import spool_path
from msrun.planning.hosts import HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.record import encode_record

SPEC = small_spec(Path("/"), 4, local_worker_num=2)
JOB = HostJob(protocol(), "f00d", 1, SPEC, {"GIVEN": "yes"}, 60.0, will_run=False, can_resume=False)


class Link:
    """A `LauncherLink` whose launcher says this; then it waits for the agent's end."""

    def __init__(self, *messages):
        self._messages = list(messages)
        self.heard = []
        self.unsent_logs = set()

    def wait(self, limit_s=None):
        return self._messages.pop(0) if self._messages else None

    def send(self, kind, **fields):
        self.heard.append({"type": kind, **fields})


class LoggingLink(Link):
    """One that is told of the logs of a part, and sends none."""

    logs = ()

    def send_logs(self, next_log, acknowledge):
        self.logs += (next_log(),)

    def finish_logs(self):
        self.logs += ("end",)


@pytest.fixture(autouse=True)
def this_host(tmp_path, monkeypatch):
    """Spools are below the test's folder, and the look at the host is short."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "make_host_report", lambda *_, **__: HostReport(host_name="seen"))


def job(**changes):
    return {"type": "job", "job": encode_record(replace(JOB, **changes))}


@pytest.fixture
def served(monkeypatch):
    """Lets an agent serve a launcher that says this, and cleans up after it."""
    with ExitStack() as stack:
        monkeypatch.setattr(module, "job_signals", lambda *_, **__: nullcontext())  # which would stay ignored

        def serve(*messages, link_type=Link):
            link = link_type(*messages)
            agent = Agent(link)
            stack.callback(agent.clean_up)
            agent.run()
            return agent, link

        yield serve


@pytest.mark.parametrize(("unsent", "stays"), [("worker_1.log", True), (contract.SCHEDULER_LOG, False)])
def test_logs_of_workers_that_nobody_has_stay_where_they_are(served, unsent, stays):
    agent, link = served(job())
    link.unsent_logs = {unsent}
    agent.clean_up()
    assert spool_path("f00d", 1).exists() is stays


def test_launcher_of_another_protocol_is_refused(served):
    with pytest.raises(
        ClusterError, match=rf"msrun here speaks protocol {protocol()}, the launcher 99: install the same"
    ):
        served({"type": "job", "job": {**job()["job"], "protocol": 99, "made_up_since": 1}})
    assert not spool_path("f00d", 1).exists()


def test_port_is_listened_on_until_the_end_and_one_that_is_taken_is_named(served):
    _, link = served({"type": "listen", "address": "127.0.0.1", "port": 0})
    (listening,) = link.heard
    assert (listening["type"], listening["error"]) == ("listening", "")
    with socket.create_server(("127.0.0.1", listening["port"])) as taken:
        port = taken.getsockname()[1]
        _, link = served({"type": "listen", "address": "127.0.0.1", "port": port})
    (listening,) = link.heard
    assert (listening["type"], listening["port"]) == ("listening", 0)
    assert str(port) in listening["error"] and "leave --master_port out" in listening["error"]


@pytest.mark.parametrize(("node_rank", "is_shared"), [(0, False), (1, True), (1, False)])
def test_part_of_the_job_writes_into_the_agents_folder_and_what_is_not_shared_is_sent(
    served, tmp_path, monkeypatch, node_rank, is_shared
):
    server, result, parts = mock.Mock(), mock.Mock(failure=None, survivors=(7,)), []
    monkeypatch.setattr(module, "start_fork_server", lambda **_: server)
    for name in ("SSH_CLIENT", "MSRUN_TOKEN", "OF_LOGIN"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(module, "own_addresses", lambda: {"10.0.0.1": "eth1"})

    plan = plan_of(small_spec(tmp_path, has_trace=True), HostFacts("h", "127.0.0.1", (0,)))

    def run(spec, start, part):
        report = part.display(spec, plan, None)
        report.note("running", {})
        report.say("hello")
        assert not held, "not before it starts again"
        report.note("restarting", {})
        parts.append((spec, start, part))
        return result

    held = []
    monkeypatch.setattr(module.LogSender, "hold", lambda logs: held.append(logs))
    monkeypatch.setattr(module, "run_part", run)
    shared, spec = tmp_path / "shared", replace(SPEC, preload=("torch",), log_max_bytes=9)
    hosts = tuple(HostAssignment(node, f"h{node}", f"10.0.0.{node}", (node,), (0,)) for node in range(2))
    told = {"hosts": pack_hosts(hosts), "rank_table": pack_text("{}"), "first_attempt": 0, "max_restarts": 0}
    part = HostPart("f00d", node_rank, replace(spec, log_dir=shared), "a", 5, use_shared=is_shared, folder=0, **told)
    listen = {"type": "listen", "address": "127.0.0.1", "port": 0}
    asked = [job(spec=spec, will_run=True), listen, {"type": "run", "part": encode_record(part)}]
    _, link = served(*asked, link_type=LoggingLink)
    server.import_early.assert_called_once_with(("torch",))
    result.server.kill.assert_called_once_with()
    ((spec, start, own),) = parts
    spool, scheduler = spool_path("f00d", 1), ["scheduler.log"] * (node_rank == 0)
    assert (spec.log_dir, spec.master_addr, spec.master_port) == (spool, "a", 5)
    assert (spec.worker_log_dir, spec.log_max_bytes) == ((shared, 9) if is_shared else (None, 0))
    assert spec.rank_table_file.read_text() == "{}" and start.caller["GIVEN"] == "yes"
    assert start.caller["OF_LOGIN"] == "x" and not start.caller.keys() & {"SSH_CLIENT", "MSRUN_TOKEN"}
    assert (own.early_server, own.home, own.stopped_limit_s) == (server, str(SPEC.log_dir) * (node_rank == 0), 120.0)
    assert (own.store_listener is not None) == (node_rank == 0) and own.fleet.own.name == f"h{node_rank}"
    assert own.fleet.interface == "eth1" * node_rank and len(held) == 1
    listening, checked, planned, *moments, ended = link.heard[1:2] + link.heard[:1] + link.heard[2:]
    assert planned["logs"] == [*([] if is_shared else ["worker_0.log", "trace_0.jsonl"]), *scheduler]
    told = [("running", {}), ("note", {"text": "hello"}), ("restarting", {})]
    assert [(said["moment"], said["fields"]) for said in moments] == told
    assert (ended["type"], ended["failure"], ended["survivors"]) == ("result", None, [7])
    assert link.logs == (None, "end") and checked["report"] and listening["port"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ClusterError("no way"), {"text": "no way", "exit_code": contract.EXIT_CLUSTER}),
        (ZeroDivisionError("by 0"), {"exit_code": contract.EXIT_CLUSTER}),
    ],
)
def test_launcher_knows_of_the_error_that_ends_an_agent(error, said):
    link = Link()
    with pytest.raises(type(error)), module.told_errors(link):
        raise error
    (message,) = link.heard
    assert message["type"] == "error" and said.items() <= message.items()
    assert str(error) in message["text"]
    assert ("ZeroDivisionError" in message.get("traceback", "")) == isinstance(error, ZeroDivisionError)
