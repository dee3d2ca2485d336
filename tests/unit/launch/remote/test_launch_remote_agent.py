"""An agent against a launcher that says what the test wants: what it answers, starts and leaves behind."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msrun import __version__, contract
from msrun.cluster.messages import Message
from msrun.cluster.protocol import HostJob, HostReport, ReachResult, protocol
from msrun.errors import ClusterError
from msrun.launch.remote import agent as module
from msrun.launch.remote.agent import Agent
from msrun.launch.remote.spool import AGENT, SOCKET, spool_path
from msrun.planning.program import Program
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec

SPEC = LaunchSpec(
    program=Program("script", "/train.py"),
    worker_num=4,
    local_worker_num=2,
    working_directory=Path("/"),
    log_dir=Path("/logs"),
)
JOB = HostJob(protocol(), __version__, "f00d", 1, SPEC, {"GIVEN": "yes"}, 60.0, will_run=False, can_resume=False)


class Link:
    """A `LauncherLink` whose launcher says this; then it waits for the agent's end."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)
        self.heard: list[Message] = []
        self.unsent_logs: set[str] = set()

    def wait(self, limit_s: float | None = None) -> Message | None:
        self.heard.append({"type": "waited", "limit_s": limit_s})
        return self._messages.pop(0) if self._messages else None

    def send(self, kind: str, **fields: Any) -> None:
        self.heard.append({"type": kind, **fields})

    def start(self) -> None:
        self.heard.append({"type": "link started"})

    def close(self) -> None:
        self.heard.append({"type": "link closed"})

    def resume_at(self, listener: socket.socket, silence_s: float) -> None:
        with listener:
            self.heard.append({"type": "resumes", "at": listener.getsockname(), "silence_s": silence_s})

    def finish_logs(self) -> None:
        self.heard.append({"type": "logs finished"})

    def obey(self, handler: Any) -> None:
        """Signals go there."""

    def pass_on(self, message: Message) -> None:
        self.heard.append(message)

    orders = None

    @property
    def answers(self) -> list[Message]:
        return [message for message in self.heard if message["type"] != "waited"]


@pytest.fixture(autouse=True)
def this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spools are below the test's folder, and the look at the host is short."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "make_host_report", lambda *_, **__: HostReport(host_name="seen"))


def job(**changes: Any) -> Message:
    return {"type": "job", "job": encode_record(replace(JOB, **changes))}


Serve = Callable[..., tuple[Agent, Link]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Lets an agent serve a launcher that says this, and cleans up after it."""
    with ExitStack() as stack:
        monkeypatch.setattr(module, "job_signals", lambda *_, **__: nullcontext())  # which would stay ignored

        def serve(*messages: Message, link_type: type[Link] = Link) -> tuple[Agent, Link]:
            link = link_type(*messages)
            agent = Agent(link)  # type: ignore[arg-type]
            stack.callback(agent.clean_up)
            agent.run()
            return agent, link

        yield serve


def test_host_is_looked_at_and_the_folder_goes_with_the_agent(served: Serve) -> None:
    agent, link = served(job())
    assert link.answers == [{"type": "checked", "report": encode_record(HostReport(host_name="seen"))}]
    assert (spool_path("f00d", 1) / AGENT).is_file()
    agent.clean_up()
    assert not spool_path("f00d", 1).exists()


def test_broken_connection_is_resumed_in_the_folder_where_that_can_be(served: Serve) -> None:
    _, link = served(job(can_resume=True))
    assert [message["type"] for message in link.answers] == ["resumes", "checked"]
    assert link.answers[0]["silence_s"] == 60.0
    assert (spool_path("f00d", 1) / SOCKET).is_socket()


@pytest.mark.parametrize(("unsent", "stays"), [("worker_1.log", True), (contract.SCHEDULER_LOG, False)])
def test_logs_of_workers_that_nobody_has_stay_where_they_are(served: Serve, unsent: str, stays: bool) -> None:
    agent, link = served(job())
    link.unsent_logs = {unsent}
    agent.clean_up()
    assert spool_path("f00d", 1).exists() is stays


def test_launcher_of_another_protocol_is_refused(served: Serve) -> None:
    with pytest.raises(
        ClusterError, match=rf"msrun here speaks protocol {protocol()}, the launcher 99: install the same"
    ):
        served({"type": "job", "job": {**job()["job"], "protocol": 99, "made_up_since": 1}})
    assert not spool_path("f00d", 1).exists()


def test_nothing_is_heeded_after_bye(served: Serve) -> None:
    assert served({"type": "bye"}, job())[1].answers == []


def test_launcher_learns_whether_the_host_reaches_another(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ReachResult(error="no route")
    tried: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "try_reach", lambda *place: tried.append(place) or result)
    _, link = served({"type": "reach", "address": "10.0.0.7", "port": 8118})
    assert tried == [("10.0.0.7", 8118)]
    assert link.answers == [{"type": "reached", "result": encode_record(ReachResult(error="no route"))}]


def test_port_is_listened_on_until_the_end_and_one_that_is_taken_is_named(served: Serve) -> None:
    _, link = served({"type": "listen", "address": "127.0.0.1", "port": 0})
    (listening,) = link.answers
    assert (listening["type"], listening["error"]) == ("listening", "")
    with socket.create_server(("127.0.0.1", listening["port"])) as taken:
        port = taken.getsockname()[1]
        _, link = served({"type": "listen", "address": "127.0.0.1", "port": port})
    (listening,) = link.answers
    assert (listening["type"], listening["port"]) == ("listening", 0)
    assert str(port) in listening["error"] and "leave --master_port out" in listening["error"]
