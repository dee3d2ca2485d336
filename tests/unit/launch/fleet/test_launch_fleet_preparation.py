"""Before a job starts: all hosts are asked at once, compared, and must reach the scheduler's port."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from fake_agents import FakeOpener, FakePipe
from fleet_reports import make_report
from plans import small_spec

from msrun import __version__
from msrun.agent.signals import SignalPipe
from msrun.cluster.messages import encode_message
from msrun.errors import ClusterError, Interrupted, MsrunError, UsageError
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet import agents
from msrun.launch.fleet import hosts as module
from msrun.launch.fleet.hosts import ListedHosts, ask_for_plan
from msrun.launch.preflight.checks import read_sources
from msrun.launch.remote.logs import LogCollector, own_logs
from msrun.planning.hosts import HostEntry
from msrun.planning.program import Program
from msrun.planning.record import encode_record

PORT = 4711


class Hosts:
    """Hosts h0, h1, ... whose agents answer as they should; a test changes what one of them says."""

    def __init__(self, count, folder, **options):
        program = folder / "train.py"
        program.write_text("pass\n")
        entries = tuple(HostEntry(f"h{node}", 1, (0,)) for node in range(count))
        given = {"cluster_time_out_s": 30, "heartbeat_time_out_s": 30.0, "local_worker_num": 0, **options}
        self.spec = small_spec(folder, count, program=Program("script", str(program)), host_entries=entries, **given)
        self.sources = tuple(read_sources(self.spec.program, self.spec.working_directory))
        self.answers = {}
        """(node, what it is told) -> what it does in place of the usual."""
        self.pipes = {f"h{node}": FakePipe(answer=self.usual_answer(node)) for node in range(count)}
        for node, pipe in enumerate(self.pipes.values()):
            pipe.address = f"10.0.0.{node + 1}"
        self.opener = FakeOpener(self.pipes)
        self.said = []
        self.on_said = lambda: None
        self.logs = None
        self.events = EventLog(folder / "events.jsonl")
        self.signals = SignalPipe()
        self._numbers = [0] * count

    def report(self, node, **changes):
        now = time.time()
        same = {"msrun_version": __version__, "sources": self.sources, "received_at": now, "made_at": now}
        return make_report(node, **{**same, **changes})

    def say(self, pipe, node, kind, **fields):
        self._numbers[node] += 1
        pipe.say(kind, seq=self._numbers[node], **fields)

    def usual_answer(self, node):
        def answer(pipe, message):
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

    def answer(self, node, told, kind, **fields):
        """Have a node say something else to what it is told; nothing for an empty kind."""
        self.answers[node, told] = lambda pipe, _: self.say(pipe, node, kind, **fields) if kind else None

    def preparation(self, do=ListedHosts.run):
        with self.signals:
            made = self.opener
            start = mock.Mock(caller={}, job_id="JOB", say=self._hear)
            preparation = ListedHosts(self.spec, start, made, self.signals, self.events)
            with preparation:
                return do(preparation, self.spec, self.logs)

    def _hear(self, text):
        self.said.append(text)
        self.on_said()

    def say_of_itself(self, node, **changes):
        """Have a node report something else of itself."""
        self.answer(node, "job", "checked", report=encode_record(self.report(node, **changes)))

    def refused(self):
        with pytest.raises(MsrunError) as caught:
            self.preparation()
        return caught.value

    def noted(self):
        return [json.loads(line)["event"] for line in (self.spec.log_dir / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def make_hosts(tmp_path):
    made = []

    def make(count, **options):
        made.append(Hosts(count, tmp_path, **options))
        return made[-1]

    yield make
    for hosts in made:
        hosts.events.close()
        if hosts.logs is not None:
            hosts.logs.close()


def test_connection_that_is_being_made_is_called_off_at_the_end(make_hosts, monkeypatch):
    monkeypatch.setattr(agents, "CLOSE_S", 60.0)
    hosts, is_closed, called_off = make_hosts(2), threading.Event(), list[bool]()
    connect = hosts.opener.open

    def hang(entry, deadline):
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


def test_what_a_host_is_told_does_not_grow_with_the_job(make_hosts):
    sizes = []
    for count in (2, 20):
        hosts = make_hosts(count)
        hosts.preparation()
        sizes.append(max(len(encode_message(pipe.heard_of("job"))) for pipe in hosts.pipes.values()))
    assert sizes[1] - sizes[0] < 20, "the digits of its ranks"


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_hosts_look_for_the_log_directory_but_not_in_a_rehearsal(make_hosts, is_rehearsal):
    hosts = make_hosts(2)
    entries = tuple(
        replace(entry, address=f"127.0.0.{node + 2}", is_rehearsed=is_rehearsal)
        for node, entry in enumerate(hosts.spec.host_entries)
    )
    hosts.spec = replace(hosts.spec, host_entries=entries)
    hosts.preparation(ListedHosts.look)
    told = [pipe.heard_of("job")["job"]["shown"] for pipe in hosts.pipes.values()]
    assert [bool(shown) for shown in told] == [not is_rehearsal] * 2, "a rehearsal's logs are sent, as between hosts"


def test_user_learns_who_is_missing_while_he_waits(make_hosts, monkeypatch):
    monkeypatch.setattr(module, "WAITING_LINE_S", 0.2)
    monkeypatch.setattr(module, "SHOWN_NAMES", 2)
    hosts = make_hosts(5, cluster_time_out_s=1)
    for node in range(1, 4):
        hosts.answer(node, "job", "")
    hosts.refused()
    assert hosts.said[-1] == "2 of 5 hosts answered, missing: h[1-2] and 1 more"


@pytest.mark.parametrize("told", ["job", "reach"])
def test_fault_of_msrun_itself_on_a_host_is_the_reason_and_its_traceback_is_kept(make_hosts, told):
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
def test_host_that_dies_after_its_answer_is_lost_though_another_one_is_slow(make_hosts, node, monkeypatch):
    monkeypatch.setattr(module, "AFTER_LOSS_S", 0.0)
    hosts = make_hosts(3, cluster_time_out_s=-1)
    hosts.answer(2, "job", "")  # never answers, and would be waited for for ever

    def answer_and_die(pipe, _):
        hosts.say(pipe, node, "checked", report=encode_record(hosts.report(node)))
        pipe.end(137)

    hosts.answers[node, "job"] = answer_and_die
    error = hosts.refused()
    assert error.exit_code == 3
    assert str(error).startswith(f"h{node}: the agent was ended by SIGKILL")
    assert "more" not in str(error), "who is slow is not blamed"
    assert "listen" not in hosts.pipes["h0"].heard_kinds


def test_host_that_does_not_fit_is_refused_and_only_reported_by_a_look(make_hosts):
    hosts = make_hosts(2)
    hosts.say_of_itself(1, msrun_version="0.0.9")
    error = hosts.refused()
    assert error.exit_code == 3 and "msrun 0.0.9 there" in str(error)
    assert "listen" not in hosts.pipes["h0"].heard_kinds
    hosts = make_hosts(2)
    hosts.say_of_itself(1, msrun_version="0.0.9")

    def failed(made, spec, logs):
        with pytest.raises(MsrunError):
            made.run(spec, logs)
        return made.failed_nodes

    assert hosts.preparation(failed) == {1}
    hosts = make_hosts(2)
    hosts.say_of_itself(1, msrun_version="0.0.9")
    looked, findings = hosts.preparation(lambda made, spec, logs: (made.look(spec, logs), made.findings))
    assert looked is None
    assert [finding.status for finding in findings if finding.name == "msrun"] == ["fail", "ok"]


def test_what_hosts_say_of_themselves_is_known_before_the_job_runs(make_hosts, tmp_path):
    hosts = make_hosts(2, master_port=5000, tls=SimpleNamespace(source="tls.json"))
    hosts.say_of_itself(1, sees_log_dir=True, numpy_version="1.26.0")
    hosts.logs = LogCollector(tmp_path, None, own_logs("worker", {0: (0,), 1: (1,)}))
    ready = hosts.preparation()
    assert ready.shared == {1}
    warning, tls = ready.warnings
    assert tls.startswith("--tls_config tls.json: not used: ")
    assert warning.startswith("h1 has 1.26.0, ")
    assert hosts.pipes["h1"].heard_of("job")["job"]["will_run"] is True
    assert hosts.pipes["h0"].heard_of("listen")["port"] == 5000


NO_WAY = {"error": "refused", "source": "10.0.0.3", "interface": "eth0", "is_own": False}


@pytest.mark.parametrize(
    ("node", "told", "answer", "exit_code", "text"),
    [
        (1, "job", None, 124, "h1: --cluster_time_out 1: no answer in time; connected, but its agent says nothing: "),
        (1, "job", {"kind": "error", "text": "h1: no such file", "exit_code": 2}, 2, "h1: no such file"),
        (1, "job", {"kind": "error", "text": "h1: no such file", "exit_code": 3}, 3, "h1: no such file"),
        (1, "job", 127, 3, "h1: there is no "),
        (0, "listen", None, 3, "h0: does not open the scheduler's port"),
        (0, "listen", {"kind": "listening", "port": 0, "error": "--master_port 80: in use"}, 2, "h0: --master_port 80"),
        (0, "listen", 137, 3, "h0: the agent was ended by SIGKILL"),
        (1, "reach", None, 3, "h1: did not say in 0.3 s whether it can be reached"),
        (1, "reach", {"kind": "reached", "result": NO_WAY}, 3, "h1: cannot reach the scheduler at 10.0.0.1:4711: ref"),
    ],
)
def test_host_that_says_no_or_nothing_or_ends_is_named_and_nothing_more_is_asked(
    make_hosts, monkeypatch, node, told, answer, exit_code, text
):
    if answer is None:
        monkeypatch.setattr(agents if told == "listen" else module, "ANSWER_S", 0.3)
    hosts = make_hosts(3, cluster_time_out_s=1 if answer is None and told == "job" else 30)
    if isinstance(answer, int):
        hosts.answers[node, told] = lambda pipe, _: pipe.end(answer, "sh: 1: python3: not found")
    else:
        hosts.answer(node, told, **(answer or {"kind": ""}))
    error = hosts.refused()
    assert (error.exit_code, str(error)[: len(text)]) == (exit_code, text)
    assert isinstance(error, UsageError if exit_code == 2 else ClusterError) or exit_code == 124
    heard = {kind for pipe in hosts.pipes.values() for kind in pipe.heard_kinds}
    asked = ("job", "listen", "reach")
    assert not heard & set(asked[asked.index(told) + 1 :])


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"kind": ""}, "h0: no plan of its part within 0.1 s"),
        ({"kind": "error", "text": "h0: no disk", "exit_code": 3}, "h0: no disk"),
    ],
)
def test_host_that_makes_no_plan_is_the_error_of_a_dry_run(make_hosts, monkeypatch, answer, text):
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    hosts = make_hosts(2)
    monkeypatch.setattr(module, "HostOpener", lambda *_: hosts.opener)
    hosts.answer(0, "plan", **answer)
    with pytest.raises(ClusterError, match=f"^{text}$"):
        ask_for_plan(hosts.spec, mock.Mock(caller={}, job_id="JOB"))


def heard_jobs(hosts, name):
    return hosts.pipes[name].heard_kinds.count("job")


@pytest.mark.parametrize("when", ["before it is needed", "once it is needed", "never"])
def test_spare_host_is_asked_once_and_one_that_is_lost_is_told_of_and_tried_again(make_hosts, monkeypatch, when):
    monkeypatch.setattr(module, "WAITING_LINE_S", 0.05)
    hosts = make_hosts(3)
    entries = hosts.spec.host_entries
    first = replace(hosts.spec, host_entries=entries[:2], spares=entries[2:], worker_num=2)
    second = replace(first, host_entries=(entries[0], entries[2]), spares=(entries[1],), first_attempt=1)
    hosts.logs = LogCollector(hosts.spec.log_dir, None, own_logs("worker", {0: (0,), 1: (1,)}))
    if when != "before it is needed":
        hosts.answer(2, "job", "")

    def lose_another(made, _spec, logs):
        made.run(first, logs)
        assert heard_jobs(hosts, "h2") == 0, "the start does not wait for it"
        for _ in range(2):
            made.note_started(first, hosts.said.append)
        assert len(made.agents.others) == 1, "to be ended with the job"
        pipe = hosts.pipes["h2"]
        made.agents.hear(lambda: heard_jobs(hosts, "h2"), {}, deadline=time.monotonic() + 30)
        told = pipe.heard_of("job")["job"]
        word = Path(told["shown"]["path"])
        assert told["will_run"]
        if when == "before it is needed":
            made.agents.hear(lambda: not word.exists(), {}, deadline=time.monotonic() + 30)
        assert word.exists() == (when != "before it is needed"), "until it has looked for it"
        if when == "never":
            pipe.end(137)
            made.agents.hear(lambda: hosts.said, {}, deadline=time.monotonic() + 30)
            assert not word.exists()
            start = "spare host h2, which is tried again when it is needed: the agent was ended by SIGKILL; "
            assert hosts.said[0].startswith(start)
            hosts.pipes["h2"] = hosts.opener.pipes["h2"] = FakePipe(answer=hosts.usual_answer(2))
            hosts.answers.clear()
        elif when == "once it is needed":
            hosts.on_said = lambda: hosts.say(pipe, 2, "checked", report=encode_record(hosts.report(2)))
        return made.run(second, logs, lost=entries[1:2])

    ready = hosts.preparation(lose_another)
    assert [host.name for host in ready.hosts] == ["machine0", "machine2"]
    assert heard_jobs(hosts, "h2") == 1
    assert when != "before it is needed" or not hosts.said
