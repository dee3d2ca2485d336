"""Before a job starts: all hosts are asked at once, compared, and must reach the scheduler's port."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_agents import FakeOpener, FakePipe
from fleet_reports import make_report

from msrun import __version__
from msrun.agent.signals import SignalPipe
from msrun.cluster.messages import Message, encode_message
from msrun.cluster.protocol import HostReport, protocol
from msrun.errors import ClusterError, Interrupted, MsrunError, UsageError
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet import agents
from msrun.launch.fleet import preparation as module
from msrun.launch.fleet.log_collector import LogCollector, own_logs
from msrun.launch.fleet.preparation import Preparation, ReadyHosts
from msrun.launch.preflight.host_look import read_sources
from msrun.launch.transport.pipe import AgentPipe
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.program import Program
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec

PORT = 4711


class Hosts:
    """Hosts h0, h1, ... whose agents answer as they should; a test changes what one of them says."""

    def __init__(self, count: int, folder: Path, **options: Any) -> None:
        program = folder / "train.py"
        program.write_text("pass\n")
        self.spec = LaunchSpec(
            program=Program("script", str(program)),
            worker_num=count,
            local_worker_num=0,
            working_directory=folder,
            log_dir=folder,
            host_entries=tuple(HostEntry(f"h{node}", 1, (0,)) for node in range(count)),
            **{"cluster_time_out_s": 30, "heartbeat_time_out_s": 30.0, **options},
        )
        self.sources = tuple(read_sources(self.spec.program, self.spec.working_directory))
        self.answers: dict[tuple[int, str], Callable[[FakePipe, Message], None]] = {}
        """(node, what it is told) -> what it does in place of the usual."""
        self.pipes = {f"h{node}": FakePipe(answer=self._answer_of(node)) for node in range(count)}
        for node, pipe in enumerate(self.pipes.values()):
            pipe.address = f"10.0.0.{node + 1}"
        self.opener = FakeOpener(self.pipes)
        self.said: list[str] = []
        self.logs: LogCollector | None = None
        self.events = EventLog(folder / "events.jsonl")
        self.signals = SignalPipe()
        self._numbers = [0] * count

    def report(self, node: int, **changes: Any) -> HostReport:
        now = time.time()
        same = {"msrun_version": __version__, "sources": self.sources, "received_at": now, "made_at": now}
        return make_report(node, **{**same, **changes})

    def say(self, pipe: FakePipe, node: int, kind: str, **fields: Any) -> None:
        self._numbers[node] += 1
        pipe.say(kind, seq=self._numbers[node], **fields)

    def _answer_of(self, node: int) -> Callable[[FakePipe, Message], None]:
        def answer(pipe: FakePipe, message: Message) -> None:
            own = self.answers.get((node, message["type"]))
            if own is not None:
                own(pipe, message)
            elif message["type"] == "job":
                self.say(pipe, node, "checked", report=encode_record(self.report(node)))
            elif message["type"] == "listen":
                self.say(pipe, node, "listening", port=PORT)
            elif message["type"] == "reach":
                way = {"error": "", "source": pipe.address, "interface": "eth0", "is_own": False}
                self.say(pipe, node, "reached", result=way)
            elif message["type"] == "bye":
                pipe.end(0)

        return answer

    def answer(self, node: int, told: str, kind: str, **fields: Any) -> None:
        """Have a node say something else to what it is told; nothing for an empty kind."""
        self.answers[node, told] = lambda pipe, _: self.say(pipe, node, kind, **fields) if kind else None

    def preparation(self, do: Callable[[Preparation, LaunchSpec, Any], Any] = Preparation.run) -> Any:
        with self.signals:
            made: Any = self.opener
            preparation = Preparation(self.spec, {}, "JOB", made, self.signals, self.events, self.said.append)
            with preparation:
                return do(preparation, self.spec, self.logs)

    def refused(self) -> MsrunError:
        with pytest.raises(MsrunError) as caught:
            self.preparation()
        return caught.value

    def noted(self) -> list[str]:
        return [json.loads(line)["event"] for line in (self.spec.log_dir / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(count: int, **options: Any) -> Hosts:
        made.append(Hosts(count, tmp_path, **options))
        return made[-1]

    yield make
    for hosts in made:
        hosts.events.close()
        if hosts.logs is not None:
            hosts.logs.close()


def test_connection_that_is_being_made_is_called_off_at_the_end(
    make_hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "CLOSE_S", 60.0)
    hosts, is_closed, called_off = make_hosts(2), threading.Event(), list[bool]()
    connect = hosts.opener.open

    def hang(entry: HostEntry, deadline: float | None) -> AgentPipe:
        if entry.name == "h0":
            return connect(entry, deadline)
        os.kill(os.getpid(), signal.SIGINT)
        called_off.append(is_closed.wait(30))
        raise ClusterError("h1: called off")

    monkeypatch.setattr(hosts.opener, "open", hang)
    monkeypatch.setattr(hosts.opener, "close", is_closed.set)
    with pytest.raises(Interrupted, match="SIGINT"):
        hosts.preparation()
    assert called_off == [True]


def test_hosts_that_agree_are_ready_with_the_place_of_the_scheduler(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(3)
    ready = hosts.preparation()
    assert isinstance(ready, ReadyHosts)
    assert ready.master == ("10.0.0.1", PORT)
    names = [hosts.report(node).host_name for node in range(3)]
    assert [(host.name, host.address, host.ranks) for host in ready.hosts] == [
        (names[node], f"10.0.0.{node + 1}", (node,)) for node in range(3)
    ]
    assert ready.shared == frozenset() and ready.warnings == ()
    told = [pipe.heard_kinds for pipe in hosts.pipes.values()]
    assert told == [["job", "listen", "bye"], ["job", "reach", "bye"], ["job", "reach", "bye"]]
    assert hosts.pipes["h2"].heard_of("reach") == {"type": "reach", "address": "10.0.0.1", "port": PORT, "seq": 2}
    assert hosts.noted().count("connected") == hosts.noted().count("agent_up") == 3
    assert hosts.noted()[-1] == "checked"
    assert hosts.opener.is_closed


def test_one_host_needs_no_port(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(1)
    assert hosts.preparation().master == ("127.0.0.1", 0)
    assert hosts.pipes["h0"].heard_kinds == ["job", "bye"]


def test_every_host_is_told_its_own_part(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2, master_addr="h0.example.com")
    hosts.answer(0, "job", "checked", report=encode_record(hosts.report(0, master_address="10.0.0.1")))
    hosts.preparation()
    jobs = [pipe.heard_of("job")["job"] for pipe in hosts.pipes.values()]
    assert [job["number"] for job in jobs] == [0, 1]
    assert [job["master_name"] for job in jobs] == ["h0.example.com", ""], "asked where the scheduler runs"
    assert [job["can_resume"] for job in jobs] == [True, True]
    assignments = [[assignment["ranks"] for assignment in job["spec"]["table_hosts"]] for job in jobs]
    assert assignments == [[[0]], [[1]]], "its own part alone, however many hosts there are"
    assert [job["will_run"] for job in jobs] == [False, False], "without logs nothing is started"
    assert {job["protocol"] for job in jobs} == {protocol()}


def test_what_a_host_is_told_does_not_grow_with_the_job(make_hosts: Callable[..., Hosts]) -> None:
    sizes = []
    for count in (2, 20):
        hosts = make_hosts(count)
        hosts.preparation()
        sizes.append(max(len(encode_message(pipe.heard_of("job"))) for pipe in hosts.pipes.values()))
    assert sizes[1] - sizes[0] < 20, "the digits of its ranks"


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_hosts_look_for_the_log_directory_but_not_in_a_rehearsal(
    make_hosts: Callable[..., Hosts], is_rehearsal: bool
) -> None:
    hosts = make_hosts(2)
    entries = tuple(
        replace(entry, address=f"127.0.0.{node + 2}", is_rehearsed=is_rehearsal)
        for node, entry in enumerate(hosts.spec.host_entries)
    )
    hosts.spec = replace(hosts.spec, host_entries=entries)
    hosts.preparation(Preparation.look)
    told = [pipe.heard_of("job")["job"]["shown"] for pipe in hosts.pipes.values()]
    assert [bool(shown) for shown in told] == [not is_rehearsal] * 2, "a rehearsal's logs are sent, as between hosts"


def test_hosts_that_see_the_log_directory_are_known(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answer(1, "job", "checked", report=encode_record(hosts.report(1, sees_log_dir=True)))
    assert hosts.preparation().shared == {1}


def test_what_should_be_known_of_a_host_is_a_warning(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answer(1, "job", "checked", report=encode_record(hosts.report(1, numpy_version="1.26.0")))
    (warning,) = hosts.preparation().warnings
    assert warning.startswith("h1 has 1.26.0, ")


def test_host_that_does_not_fit_is_named_and_no_port_is_opened(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answer(1, "job", "checked", report=encode_record(hosts.report(1, msrun_version="0.0.9")))
    error = hosts.refused()
    assert error.exit_code == 3 and "msrun 0.0.9 there" in str(error)
    assert "listen" not in hosts.pipes["h0"].heard_kinds


def test_host_that_says_nothing_in_time_is_named(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2, cluster_time_out_s=1)
    hosts.answer(1, "job", "")
    error = hosts.refused()
    assert error.exit_code == 124
    assert str(error) == (
        "h1: --cluster_time_out 1: no answer in time; connected, but its agent says nothing: it is slow to start, "
        "or stopped"
    )


def test_user_learns_who_is_missing_while_he_waits(
    make_hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_LINE_S", 0.2)
    monkeypatch.setattr(module, "SHOWN_NAMES", 2)
    hosts = make_hosts(5, cluster_time_out_s=1)
    for node in range(1, 4):
        hosts.answer(node, "job", "")
    hosts.refused()
    assert hosts.said[-1] == "2 of 5 hosts answered, missing: h[1-2] and 1 more"


def test_agent_that_ends_is_explained_by_its_status(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answers[1, "job"] = lambda pipe, _: pipe.end(127, "sh: 1: python3: not found")
    error = hosts.refused()
    assert error.exit_code == 3
    assert str(error).startswith("h1: there is no ")


@pytest.mark.parametrize("told", ["job", "reach"])
def test_fault_of_msrun_itself_on_a_host_is_the_reason_and_its_traceback_is_kept(
    make_hosts: Callable[..., Hosts], told: str
) -> None:
    hosts = make_hosts(2)
    hosts.logs = LogCollector(hosts.spec.log_dir, None, own_logs("worker", {0: (0,), 1: (1,)}))
    hosts.answer(1, told, "fault", text="msrun itself failed: KeyError", traceback="Traceback:\n  here\n")
    error = hosts.refused()
    assert error.exit_code == 3 and str(error) == "h1: msrun itself failed: KeyError"
    record = (hosts.spec.log_dir / "scheduler.log").read_text()
    assert record.endswith(" h1: msrun itself failed: KeyError\nTraceback:\n  here\n")
    hosts.logs.expect(0, ["scheduler.log"])
    assert (hosts.spec.log_dir / "scheduler.log").read_text() == record, "the host of the scheduler begins later"


@pytest.mark.parametrize("node", [0, 1])
def test_host_that_dies_after_its_answer_is_lost_though_another_one_is_slow(
    make_hosts: Callable[..., Hosts], node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AFTER_LOSS_S", 0.0)
    hosts = make_hosts(3, cluster_time_out_s=-1)
    hosts.answer(2, "job", "")  # never answers, and would be waited for for ever

    def answer_and_die(pipe: FakePipe, _: Message) -> None:
        hosts.say(pipe, node, "checked", report=encode_record(hosts.report(node)))
        pipe.end(137)

    hosts.answers[node, "job"] = answer_and_die
    error = hosts.refused()
    assert error.exit_code == 3
    assert str(error).startswith(f"h{node}: the agent was ended by SIGKILL")
    assert "more" not in str(error), "who is slow is not blamed"
    assert "listen" not in hosts.pipes["h0"].heard_kinds


@pytest.mark.parametrize(("exit_code", "kind"), [(2, UsageError), (3, ClusterError)])
def test_what_an_agent_refuses_is_said_in_its_words(
    make_hosts: Callable[..., Hosts], exit_code: int, kind: type[MsrunError]
) -> None:
    hosts = make_hosts(2)
    hosts.answer(1, "job", "error", text="h1: no such file", exit_code=exit_code)
    error = hosts.refused()
    assert type(error) is kind and error.exit_code == exit_code
    assert str(error) == "h1: no such file"


def test_port_that_cannot_be_opened_is_the_users_to_change(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answer(0, "listen", "listening", port=0, error="--master_port 80: in use")
    error = hosts.refused()
    assert error.exit_code == 2 and str(error) == "h0: --master_port 80: in use"
    assert "reach" not in hosts.pipes["h1"].heard_kinds


def test_node_0_that_does_not_open_the_port_is_named(
    make_hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "ANSWER_S", 0.2)
    hosts = make_hosts(2)
    hosts.answer(0, "listen", "")
    error = hosts.refused()
    assert error.exit_code == 3 and str(error) == "h0: does not open the scheduler's port"


def test_node_0_that_is_lost_before_it_listens_is_the_reason(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answers[0, "listen"] = lambda pipe, _: pipe.end(137)
    error = hosts.refused()
    assert "h0: the agent was ended by SIGKILL" in str(error)
    assert "port" not in str(error)


def test_host_that_cannot_reach_the_scheduler_is_named(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(3)
    result = {"error": "refused", "source": "10.0.0.3", "interface": "eth0", "is_own": False}
    hosts.answer(2, "reach", "reached", result=result)
    error = hosts.refused()
    assert error.exit_code == 3
    assert str(error).startswith("h2: cannot reach the scheduler at 10.0.0.1:4711: refused")


def test_host_that_does_not_say_whether_it_reaches_the_scheduler_is_named(
    make_hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    hosts = make_hosts(3)
    hosts.answer(1, "reach", "")
    assert str(hosts.refused()) == "h1: did not say in 0.3 s whether it can be reached"


def test_look_reports_and_raises_nothing(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answer(1, "job", "checked", report=encode_record(hosts.report(1, msrun_version="0.0.9")))
    looked, findings = hosts.preparation(lambda made, spec, logs: (made.look(spec, logs), made.findings))
    assert looked is None
    assert [finding.status for finding in findings if finding.name == "msrun"] == ["fail", "ok"]


def test_signal_ends_the_wait_for_hosts(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.answers[1, "job"] = lambda *_: hosts.signals.tell(signal.SIGTERM)
    assert isinstance(hosts.refused(), Interrupted)
    assert hosts.pipes["h0"].is_closed and hosts.opener.is_closed


def test_job_that_runs_is_told_so(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    hosts.spec = replace(hosts.spec, master_port=5000)
    hosts.logs = LogCollector(tmp_path, None, own_logs("worker", {0: (0,), 1: (1,)}))
    hosts.preparation()
    assert hosts.pipes["h1"].heard_of("job")["job"]["will_run"] is True
    assert hosts.pipes["h0"].heard_of("listen")["port"] == 5000
