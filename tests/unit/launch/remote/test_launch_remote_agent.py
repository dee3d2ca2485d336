"""An agent against a launcher that says what the test wants, what it tells of its part, and what all hosts get."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import small_plan, small_spec

from msrun import __version__, contract
from msrun.cluster.messages import Message, pack_text, unpack_text
from msrun.cluster.protocol import HostJob, HostReport, protocol
from msrun.errors import ClusterError
from msrun.launch.remote import agent as module
from msrun.launch.remote.agent import Agent, LauncherReport
from msrun.launch.remote.spool import spool_path
from msrun.planning.record_json import encode_record

SPEC = small_spec(Path("/"), 4, local_worker_num=2)
JOB = HostJob(protocol(), __version__, "f00d", 1, SPEC, {"GIVEN": "yes"}, 60.0, will_run=False, can_resume=False)


class Link:
    """A `LauncherLink` whose launcher says this; then it waits for the agent's end."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)
        self.heard: list[Message] = []
        self.unsent_logs: set[str] = set()

    def wait(self, limit_s: float | None = None) -> Message | None:
        return self._messages.pop(0) if self._messages else None

    def send(self, kind: str, **fields: Any) -> None:
        self.heard.append({"type": kind, **fields})

    def start(self) -> None:
        """The launcher may speak."""

    def close(self) -> None:
        """Nothing more is said."""

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


def test_port_is_listened_on_until_the_end_and_one_that_is_taken_is_named(served: Serve) -> None:
    _, link = served({"type": "listen", "address": "127.0.0.1", "port": 0})
    (listening,) = link.heard
    assert (listening["type"], listening["error"]) == ("listening", "")
    with socket.create_server(("127.0.0.1", listening["port"])) as taken:
        port = taken.getsockname()[1]
        _, link = served({"type": "listen", "address": "127.0.0.1", "port": port})
    (listening,) = link.heard
    assert (listening["type"], listening["port"]) == ("listening", 0)
    assert str(port) in listening["error"] and "leave --master_port out" in listening["error"]


class Played:
    """A link and logs that note what they are called with."""

    names = ("worker_0.log",)

    def __init__(self) -> None:
        self.done: list[Any] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.done.append((kind, fields))

    def end_attempt(self) -> None:
        self.done.append("end of the attempt")

    def begin_attempt(self) -> None:
        self.done.append("begin of an attempt")


def test_logs_of_an_attempt_end_before_the_restart_is_told_and_begin_with_its_first_worker(tmp_path: Path) -> None:
    played, plan = Played(), small_plan(tmp_path)
    report = LauncherReport(played, plan, played)  # type: ignore[arg-type]
    [(kind, fields)] = played.done
    assert kind == "planned" and fields["host"] == encode_record(plan.hosts[0])
    assert (fields["notes"], fields["target"], fields["logs"]) == ([*plan.notes], "cpu", ("worker_0.log",))
    played.done.clear()
    report.note("started", {"global_rank": 0})
    assert played.done == [("event", {"moment": "started", "fields": {"global_rank": 0}})]
    for kind in ("restarting", "stopping", "started", "started"):
        report.note(kind, {"global_rank": 0})
    told = [entry if isinstance(entry, str) else entry[1]["moment"] for entry in played.done[1:]]
    assert told == ["end of the attempt", "restarting", "stopping", "begin of an attempt", "started", "started"]


@pytest.mark.parametrize("text", ["", "{}", 'ünïcode ☃ "\n', "no text \udcff"])
def test_text_arrives_as_it_was(text: str) -> None:
    assert unpack_text(pack_text(text)) == text
    assert pack_text(text).isascii()
