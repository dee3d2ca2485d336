"""An agent against a launcher that says what the test wants, what it tells of its part, and what all hosts get."""

import socket
import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from plans import small_spec

from msrun import contract
from msrun.cluster.protocol import HostJob, HostReport, protocol
from msrun.errors import ClusterError
from msrun.launch.remote import agent as module
from msrun.launch.remote.agent import Agent
from msrun.launch.remote.logs import spool_path
from msrun.planning.record_json import encode_record

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
