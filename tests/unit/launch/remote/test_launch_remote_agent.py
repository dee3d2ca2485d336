"""An agent against a launcher that says what the test wants: what it answers, starts and leaves behind."""

from __future__ import annotations

import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msrun import __version__, contract
from msrun.cluster.messages import Message, pack_hosts, pack_text
from msrun.cluster.proof import PROTOCOL
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.launch.job import AgentPart
from msrun.launch.preflight.host_look import ReachResult
from msrun.launch.preflight.host_report import HostReport
from msrun.launch.remote import agent as module
from msrun.launch.remote.agent import Agent, HostJob
from msrun.launch.remote.spool import AGENT, GIVEN_TABLE, SOCKET, spool_path
from msrun.planning.host_assignment import HostAssignment
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
JOB = HostJob(PROTOCOL, __version__, "f00d", 1, SPEC, {"GIVEN": "yes"}, 60.0, will_run=False, can_resume=False)


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


def test_workers_get_the_host_s_environment_without_the_connection_s(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SSH_CONNECTION", "MSRUN_TOKEN", "OF_THE_HOST", "GIVEN"):
        monkeypatch.setenv(name, "here")
    caller = served(job())[0]._caller
    assert (caller["OF_THE_HOST"], caller["GIVEN"]) == ("here", "yes")
    assert not [name for name in caller if name.startswith(("SSH_", "MSRUN_"))]


def test_launcher_of_another_protocol_is_refused(served: Serve) -> None:
    with pytest.raises(
        ClusterError, match=rf"msrun here speaks protocol {PROTOCOL}, the launcher 99: install the same"
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


def test_what_takes_long_is_begun_early_where_the_job_will_run_and_ended_with_the_agent(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    server = SimpleNamespace(kill=lambda: seen.append("killed"))
    monkeypatch.setattr(module, "_start_early", lambda *_: seen.append("started") or server)
    served(job())
    assert seen == []
    served(job(job_id="beef", will_run=True))
    assert seen == ["started", "killed"]


HOSTS = tuple(
    HostAssignment(node, f"h{node}", f"10.0.0.{7 + node}", (2 * node, 2 * node + 1), (0, 1)) for node in range(2)
)
RUN = {"type": "run", "master_addr": "10.0.0.7", "master_port": 8118, "use_shared": False, "rank_table": ""}


@pytest.mark.parametrize(("use_shared", "worker_log_dir"), [(True, Path("/logs")), (False, None)])
@pytest.mark.parametrize(("node_rank", "home"), [(0, "/logs"), (1, "")])
def test_job_runs_in_the_folder_and_tells_how_it_ended(
    served: Serve,
    monkeypatch: pytest.MonkeyPatch,
    use_shared: bool,
    worker_log_dir: Path | None,
    node_rank: int,
    home: str,
) -> None:
    ran: list[LaunchSpec] = []
    tables: list[str] = []

    def run_part(spec: LaunchSpec, caller: Any, part: AgentPart, *, job_id: str) -> Any:
        ran.append(spec)
        assert spec.rank_table_file is not None
        tables.append(spec.rank_table_file.read_text())
        assert (job_id, caller["GIVEN"]) == ("f00d", "yes")
        assert (part.home, part.stopped_limit_s) == (home, 120.0)
        assert part.fleet is not None and part.store_port == 8118
        assert part.fleet.hosts == HOSTS and part.fleet.own == HOSTS[node_rank]
        assert part.fleet.master_addr == "10.0.0.7"
        assert part.link is not None
        part.link.pass_on({"type": "ready", "attempt": 1})
        return SimpleNamespace(failure=None, survivors=(4711,))

    monkeypatch.setattr(module, "run_part", run_part)
    told = {**RUN, "use_shared": use_shared, "hosts": pack_hosts(HOSTS), "rank_table": pack_text("{}")}
    _, link = served(job(node_rank=node_rank, has_scheduler=node_rank == 0), told)
    assert link.answers[1:] == [
        {"type": "ready", "attempt": 1},
        {"type": "result", "failure": None, "survivors": [4711]},
        {"type": "logs finished"},
    ]
    spool = spool_path("f00d", node_rank)
    given = (spool, worker_log_dir, spool / GIVEN_TABLE, "10.0.0.7", 8118)
    (spec,) = ran
    assert given == (spec.log_dir, spec.worker_log_dir, spec.rank_table_file, spec.master_addr, spec.master_port)
    assert tables == ["{}"]


def test_only_host_of_a_job_meets_nobody(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[AgentPart] = []
    ended = SimpleNamespace(failure=None, survivors=())
    monkeypatch.setattr(module, "run_part", lambda _, __, part, **___: parts.append(part) or ended)
    served(job(node_rank=0), {**RUN, "hosts": ""})
    assert parts[0].fleet is None and parts[0].store_listener is None


def test_who_tried_to_reach_the_store_is_not_its_client(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a Python without torch ends the job at its first client."""
    seen: list[bool] = []

    def run_part(_: Any, __: Any, part: AgentPart, **___: Any) -> Any:
        store = part.store_listener
        assert store is not None and store.gettimeout() is None
        seen.append(bool(select.select([store], [], [], 0.0)[0]))
        return SimpleNamespace(failure=None, survivors=())

    class Reached(Link):
        """The launcher of a host that another has reached meanwhile."""

        def wait(self, limit_s: float | None = None) -> Message | None:
            message = super().wait(limit_s)
            if message is not None and message["type"] == "run":
                port = next(told["port"] for told in self.heard if told["type"] == "listening")
                socket.create_connection(("127.0.0.1", port)).close()
            return message

    monkeypatch.setattr(module, "run_part", run_part)
    listen = {"type": "listen", "address": "127.0.0.1", "port": 0}
    served(job(node_rank=0), listen, {**RUN, "hosts": pack_hosts(HOSTS)}, link_type=Reached)
    assert seen == [False]


OWN = [("worker", 2), ("worker", 3), ("server", 1)]


@pytest.mark.parametrize(
    ("node_rank", "is_shared", "is_traced", "sent"),
    [
        (1, False, False, ["/s/worker_2.log", "/s/worker_3.log", "/s/server_1.log"]),
        (1, False, True, [*(f"/s/{name}_{i}.log" for name, i in OWN), "/s/trace_rank_2.json", "/s/trace_rank_3.json"]),
        (1, True, True, []),
        (0, False, False, ["/s/worker_2.log", "/s/worker_3.log", "/s/server_1.log", "/s/scheduler.log"]),
        (0, True, False, ["/s/scheduler.log"]),
    ],
)
def test_logs_that_the_launcher_cannot_read_itself_are_sent(
    monkeypatch: pytest.MonkeyPatch, node_rank: int, is_shared: bool, is_traced: bool, sent: list[str]
) -> None:
    workers = [SimpleNamespace(global_rank=rank, log_path=f"/s/worker_{rank}.log") for rank in (2, 3)]
    env = {contract.MSRUN_TRACE_DIR: "/s"} if is_traced else {}
    logs = [*(worker.log_path for worker in workers), "/s/server_1.log"]
    host = SimpleNamespace(node_rank=node_rank, common_env=env, log_paths=logs)
    plan: Any = SimpleNamespace(log_dir="/s", workers=workers, hosts=[host])
    monkeypatch.setattr(contract, "trace_file_name", lambda rank: f"trace_rank_{rank}.json")
    assert module._paths_to_send(plan, is_shared=is_shared, has_scheduler=node_rank == 0) == sent


@pytest.mark.parametrize(("max_bytes", "kept"), [(1024, 3), (0, 0)])
def test_older_files_of_a_log_are_kept_only_where_logs_are_limited(max_bytes: int, kept: int) -> None:
    plan: Any = SimpleNamespace(log_max_bytes=max_bytes, log_keep=3)
    assert module._kept_files(plan) == kept


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (UsageError("no such program"), "no such program", contract.EXIT_USAGE),
        (KeyError("x"), "msrun itself failed: KeyError: 'x'; its traceback is in scheduler.log", contract.EXIT_CLUSTER),
    ],
)
def test_error_is_told_and_the_launcher_has_time_to_fetch_the_logs(
    monkeypatch: pytest.MonkeyPatch, error: MsrunError | KeyError, text: str, code: int
) -> None:
    link = Link()

    def fail(*_: Any, **__: Any) -> None:
        raise error

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(module, "StdioPipe", lambda: None)
    monkeypatch.setattr(module, "LauncherLink", lambda _: link)
    monkeypatch.setattr(Agent, "run", fail)
    monkeypatch.setattr(Agent, "clean_up", lambda _: link.heard.append({"type": "cleaned up"}))
    monkeypatch.setattr(module.os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    trace = link.heard[1].pop("traceback", "")
    assert ("in fail" in trace) == isinstance(error, KeyError), "a mistake of the user's has none"
    assert link.heard == [
        {"type": "link started"},
        {"type": "error", "text": text, "exit_code": code},
        {"type": "waited", "limit_s": module.FETCH_S},
        {"type": "link closed"},
        {"type": "cleaned up"},
    ]
