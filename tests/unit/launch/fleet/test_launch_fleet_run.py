"""One job over many hosts, seen from the launcher: what agents say, and what becomes of the job."""

import json
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from failure_reports import failed, failure_of, fault_of
from fake_agents import FakeClock, FakeLink, FakeSignals
from plans import small_plan, small_spec

from msrun import contract
from msrun.agent.observer import OwnFaults
from msrun.cluster.failure import FailureReport
from msrun.errors import ClusterError
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet import fleet_job
from msrun.launch.fleet.agents import Agents
from msrun.launch.fleet.fleet_job import END_S, TICK_S, FleetJob, FleetRun
from msrun.launch.fleet.hosts import ReadyHosts
from msrun.launch.job import Start
from msrun.launch.remote.logs import LogCollector, own_logs
from msrun.planning.hosts import HostAssignment, HostEntry, HostPool
from msrun.planning.plan import HostPlan, WorkerPlan
from msrun.planning.program import Program
from msrun.planning.record import encode_record

HOSTS = tuple(HostAssignment(node, f"h{node}", f"10.0.0.{node + 1}", (node,), (0,)) for node in range(2))


def host_plan(node, rank, **changes):
    worker = WorkerPlan(rank, 0, 0, {"RANK": str(rank)}, f"/spool/worker_{rank}.log")
    program = Program("script", "/t.py")
    plan = HostPlan(node, f"h{node}", f"10.0.0.{node + 1}", program, "/", "fork", (), {}, (worker,))
    return dict(encode_record(replace(plan, **changes)))


class Fleet:
    """Two hosts with a worker each. `say` is what an agent says."""

    def __init__(self, folder):
        self.folder = folder
        self.clock, self.signals = FakeClock(), FakeSignals()
        entries = HostEntry("h0", 1, (0,)), HostEntry("h1", 1, (0,))
        self.spec = small_spec(folder, 2, local_worker_num=0, max_restarts=1, grace_s=5.0, host_entries=entries)
        self.agents = Agents(self.signals, (), 60.0, clock=self.clock)
        self.links = [FakeLink(0), FakeLink(1)]
        self.agents.links = self.links
        self.logs = LogCollector(folder, None, own_logs("worker", {0: (0,), 1: (1,)}), 1)
        self.events = EventLog(folder / "events.jsonl")

        ready = ReadyHosts(("10.0.0.1", 4711), HOSTS, frozenset({1}))
        faults = OwnFaults(folder, print, found_in=str(folder))
        self.pool = HostPool(self.spec.host_entries, (HostEntry("h2", 1, (0,)),), 0)
        hosts = SimpleNamespace(agents=self.agents, pool=self.pool)
        self.job = FleetJob(self.spec, Start({}, "JOB", quiet=True), hosts, self.events, faults)
        self.said = []
        self.job.say = self.said.append
        told = lambda: self.said.append("here")  # noqa: E731
        self.run = FleetRun(self.job, self.spec, ready, self.logs, told, clock=self.clock)
        self.run.start()

    def say(self, node, kind, **fields):
        self.agents.post(self.links[node] if node >= 0 else None, {"type": kind, **fields})

    def plan(self, *nodes):
        for node in nodes:
            self.say(node, "planned", host=host_plan(node, node), notes=[], target="cpu")

    def moment(self, node, kind, **fields):
        self.say(node, "event", moment=kind, fields=fields)

    def fail(self, node, report=None):
        """A worker of a host, or the host itself, fails."""
        message = failed(self.run.coordinator.attempt, report or FailureReport(failure_of(node), can_restart=True))
        self.say(node, message.pop("type"), **message)

    def stop(self, *nodes, attempt=0, can_continue=True):
        """No worker runs on these hosts any more."""
        for node in nodes:
            self.say(node, "ended", attempt=attempt, can_continue=can_continue, come=[])

    def end(self, *nodes, failure=None):
        """The hosts have ended their part, and told what they have seen, once the coordinator has said so."""
        self.hear()
        for node in nodes:
            self.say(node, "result", failure=failure, survivors=[])
            self.say(node, "logs_end")

    def hear(self, seconds=0.0):
        """Take what has been said, without waiting for more; meanwhile time passes."""
        is_heard = iter((False, True))
        self.run._hear(lambda: self.clock.advance(seconds) or next(is_heard))

    def told(self, node):
        """What a host was told after it was told to run."""
        return [done["type"] for done in self.links[node].done if isinstance(done, dict)][1:]

    def noted(self, kind):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def finish(self):
        result = self.run.finish()
        assert result is not None, "it does not go on elsewhere"
        return result

    def finish_failed(self):
        """Return the reason and the exit code."""
        result = self.finish()
        assert result.failure is not None
        return result.failure.reason, result.exit_code

    def close(self):
        self.logs.close()
        self.events.close()
        self.signals.close()
        self.agents.loop.close(0.0)


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    yield made
    made.close()


OTHERS_LOG = (WorkerPlan(0, 0, 0, {}, "/spool/worker_1.log"),)


@pytest.mark.parametrize(
    "plan",
    [
        *(host_plan(0, 1), host_plan(1, 0), host_plan(0, 7), host_plan(0, 0, node_rank=1)),
        host_plan(0, 0, workers=OTHERS_LOG),
    ],
)
def test_host_that_speaks_for_another_is_given_up(fleet, plan):
    fleet.say(0, "planned", host=plan, notes=[], target="cpu")
    fleet.hear()
    assert "its agent says what cannot be understood" in str(fleet.links[0].done[-2:])
    assert not any("understood" in str(done) for done in fleet.links[1].done)


def test_hosts_of_the_plan_are_all_of_the_job_and_leave_by_any_of_their_names(fleet):
    for node in range(2):
        fleet.say(node, "planned", host=host_plan(node, node, name=f"machine{node}"), notes=[], target="cpu")
    fleet.hear()
    assert [(one.name, one.ranks) for one in fleet.run.plan.fleet] == [("machine0", (0,)), ("machine1", (1,))]
    assert fleet.said == [f"2 workers on 2 hosts, logs in {fleet.folder}", "here"]
    table = json.loads((fleet.folder / contract.RANK_TABLE_JSON).read_text())
    assert [server["server_id"] for server in table["server_list"]] == ["10.0.0.1", "10.0.0.2"]
    (fleet.folder / contract.DRAIN).mkdir()
    for name, node in (("machine1", 1), ("host0", 0)):
        (fleet.folder / contract.DRAIN / name).touch()
        fleet.hear(TICK_S)
        assert fleet.links[node].done[-1] == {"type": "signal", "signum": signal.SIGTERM}
    assert [*map(fleet.told, range(2))] == [["signal"]] * 2


def test_host_that_is_lost_ends_the_job_on_the_others_at_once(fleet):
    fleet.plan(0, 1)
    fleet.say(1, "lost", reason="h1: the connection broke")
    fleet.hear()
    assert fleet.told(0) == ["stop"]
    fleet.fail(0)  # its workers miss those of the lost host
    fleet.stop(0)
    fleet.hear()
    assert fleet.told(0) == ["stop", "over"]
    fleet.end(0, failure=encode_record(failure_of(0)))
    assert fleet.finish_failed() == ("h1: the connection broke", 3)
    assert len(fleet.noted("fault")) == 1


def test_hosts_that_do_not_end_after_an_interrupt_are_given_up(fleet):
    fleet.plan(0, 1)
    fleet.signals.put(signal.SIGTERM)
    fleet.hear(TICK_S)
    assert not fleet.run.coordinator.may_go_on and not fleet.noted("fault")
    fleet.hear(fleet.spec.grace_s + END_S)
    assert fleet.finish_failed() == ("stopped by SIGTERM", 143)
    (fault,) = fleet.noted("fault")
    assert fault["reason"].endswith(": did not end its part of the job in time")


def restart(fleet):
    """A worker has failed, and all hosts are told to start again."""
    fleet.plan(0, 1)
    fleet.fail(1)
    fleet.stop(0, 1)
    fleet.hear()


def test_restart_is_told_once_when_all_hosts_are_ready_and_start(fleet):
    restart(fleet)
    for node in range(2):
        assert fleet.noted("restarting") == []
        fleet.say(node, "ready", attempt=1, clock_s=time.time())
        fleet.hear()
    assert fleet.told(0) == fleet.told(1) == ["stop", "restart", "start"]
    assert fleet.links[0].done[0] == "begin"
    assert [(event["hosts"], event["master"]) for event in fleet.noted("agents_started")] == [(2, "10.0.0.1:4711")]
    (told,) = fleet.noted("restarting")
    assert (told["attempt"], told["global_ranks"]) == (1, [1])


@pytest.mark.parametrize("can_go_on", [True, False])
def test_host_that_cannot_start_again_is_left_out_or_ends_the_job(fleet, can_go_on):
    """The attempt that it spoils does not count: none of its workers has run."""
    fleet.pool.min_hosts = 2 if can_go_on else 0
    restart(fleet)
    report = fault_of(1, "node 1 (h1): cannot start again: the disk is full", 3)
    fleet.fail(1, replace(report, is_unfit=True))
    fleet.stop(0, 1, attempt=1, can_continue=False)
    fleet.end(0, 1)
    result = fleet.run.finish()
    assert fleet.run.coordinator.losses == {1: report.failure.reason}
    assert fleet.run.coordinator.begun == 0
    if can_go_on:
        assert result is None
        (attempt,) = fleet.job.attempts
        assert (attempt["attempt"], attempt["reason"]) == (0, f"rank 1 failed; then {report.failure.reason}")
    else:
        assert result is not None and result.failure is not None
        assert (result.failure.reason, result.exit_code) == (report.failure.reason, 3)


def test_logs_here_are_set_aside_where_a_job_goes_on_elsewhere(fleet):
    """Those of its workers, and of the scheduler, whose agent is another one then."""
    fleet.plan(0, 1)
    fleet.hear()
    logs = ["worker_0", "worker_1", "scheduler"]
    for log in logs:
        (fleet.folder / f"{log}.log").touch()
    fleet.run.set_logs_aside()
    assert {path.name for path in fleet.folder.glob("*.log")} == {f"{log}.attempt_0.log" for log in logs}
    assert len(json.loads((fleet.folder / contract.attempt_plan_name(0)).read_text())["hosts"]) == 2


@pytest.mark.parametrize("skew_s", [-400.0, 400.0])
def test_host_whose_clock_is_far_off_does_not_start_again(fleet, skew_s):
    restart(fleet)
    fleet.say(0, "ready", attempt=1, clock_s=time.time() - 299.0)
    fleet.say(1, "ready", attempt=1, clock_s=time.time() + skew_s)
    fleet.hear()
    assert fleet.told(0) == ["stop", "restart", "stop"]
    (reason,) = fleet.run.coordinator.losses.values()
    how = "400.0 s ahead of" if skew_s > 0 else "400.0 s behind"
    assert reason == f"h1: cannot start again: clock {how} the one here; start chrony or ntpd there"


def test_host_that_is_lost_after_its_result_is_no_loss(fleet):
    fleet.plan(0, 1)
    fleet.stop(0, 1)
    fleet.say(1, "result", failure=None, survivors=[5, "x", True])
    fleet.say(1, "lost", reason="h1: the connection broke")
    fleet.end(0)
    result = fleet.finish()
    assert result.failure is None
    assert result.survivors == (5,)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"kind": "result", "failure": None, "survivors": []}, "the result of a job that is not over"),
        ({"kind": "logs_end"}, "its logs end before"),
    ],
)
def test_end_of_a_job_that_is_not_over_is_not_believed(fleet, said, why):
    fleet.plan(0, 1)
    fleet.say(1, **said)
    fleet.hear()
    assert why in str(fleet.links[1].done[-1])


def test_host_that_is_lost_between_the_end_and_its_result_is_a_fault(fleet):
    fleet.plan(0, 1)
    fleet.stop(0, 1)
    fleet.end(0)
    fleet.say(1, "lost", reason="h1: the connection broke")
    assert fleet.finish_failed() == ("h1: the connection broke", 3)


@pytest.mark.parametrize(("node", "host"), [(1, "h1: "), (-1, "")])
def test_fault_of_msrun_itself_ends_the_job_under_its_own_name(fleet, node, host):
    fleet.plan(0, 1)
    fleet.say(node, "fault", text="msrun itself failed: OSError: disk")
    fleet.hear()
    for link in fleet.links:
        assert [said["type"] for said in link.done if isinstance(said, dict)] == ["run", "stop"], "that host, too"
    fleet.stop(0, 1)
    fleet.end(0, 1)
    assert fleet.finish_failed() == (f"{host}msrun itself failed: OSError: disk", 3)


def test_first_agent_that_could_not_begin_is_the_reason(fleet):
    for node in range(2):
        fleet.say(node, "error", text="cannot start", exit_code=2 + node)
    assert fleet.finish_failed() == ("h0: cannot start", 2)
    assert len(fleet.noted("fault")) == 1


class Starts:
    """Starts of a job on three hosts, of which two have to be well: of each why it does not begin, or how it ends."""

    def __init__(self, folder, patch, *starts):
        self.said, self.asked, self.done, self._left, self._folder = [], [], [], list(starts), folder
        entries = tuple(HostEntry(name, 1, (0,)) for name in "abc")
        self.pool = HostPool(entries, (), 2)
        self.agents, self.failed_nodes = SimpleNamespace(interrupt=None), set()
        self.events, self.spec = [], small_spec(folder, 3, local_worker_num=0, max_restarts=3, host_entries=entries)
        start = SimpleNamespace(job_id="JOB", say=self.said.append)
        events = SimpleNamespace(note=lambda kind, fields: self.events.append((kind, fields)))
        patch.setattr(fleet_job, "FleetRun", self._begin)
        self.job = FleetJob(self.spec, start, self, events, None)
        self.note_started = lambda *_: self.done.append("started")

    def run(self, spec, _logs, lost=()):
        names = "".join(entry.name for entry in spec.host_entries)
        self.asked.append(
            (names, spec.worker_num, spec.first_attempt, spec.max_restarts, "".join(e.name for e in lost))
        )
        if isinstance(self._left[0], str):
            self.failed_nodes = {names.index(self._left[0])}
            raise ClusterError(f"{self._left.pop(0)}: refused")

    def _begin(self, job, spec, _ready, _logs, on_directory):
        on_directory()
        lost, late, result = self._left.pop(0)
        names = [entry.name for entry in spec.host_entries]

        def finish():
            self.pool.lose([spec.host_entries[names.index(name)] for name in lost])
            job.attempts.append({"attempt": spec.first_attempt, "reason": f"lost {lost}"})
            return result

        losses = {names.index(name): f"lost {name}" for name in lost}
        return mock.Mock(
            coordinator=SimpleNamespace(begun=spec.first_attempt, losses=losses),
            late_losses={names.index(name) for name in late},
            end_reason=f"lost {lost}",
            plan=small_plan(self._folder),
            finish=finish,
            start=lambda: self.done.append("start"),
            set_logs_aside=lambda: self.done.append("set aside"),
        )


@pytest.mark.parametrize(
    ("last", "said", "why"),
    [(("", "c", None), ["lost "], "lost ; then lost c"), ("c", [], "lost b; then c: refused")],
)
def test_job_starts_again_on_other_hosts_until_too_few_are_left(tmp_path, monkeypatch, last, said, why):
    starts = Starts(tmp_path, monkeypatch, ("b", "", None), "c", "b", last)
    result = starts.job.run(lambda: starts.done.append("directory"))
    begun = ["start", "started", "set aside"]
    assert starts.done == ["directory", *begun, *(begun if said else [])]
    assert starts.asked == [
        ("abc", 3, 0, 3, ""),
        ("ac", 2, 1, 2, "b"),
        ("ab", 2, 1, 2, "c"),
        ("ac", 2, 1, 2, "b"),
    ]
    assert starts.said[:-1] == [
        "lost b",
        "restart 1 of 3: starting again on a, c",
        "c: refused: starting again on a, b",
        "b: refused: starting again on a, c; left out, failed 2 times: b",
        *said,
    ]
    too_few = "fewer than 2 hosts are left"
    assert starts.said[-1] == f"not started again: {too_few} (--min_hosts); left out, failed 2 times: b, c"
    reason = f"{why}; {too_few}"
    assert (result.failure.reason, result.exit_code, starts.events) == (reason, 3, [("over", {"reason": reason})])
    assert json.loads((tmp_path / contract.FAILURE_JSON).read_text())["reason"] == reason


def test_job_of_which_too_few_are_left_says_so_but_at_its_last_start(tmp_path, monkeypatch):
    for is_ended in (False, True):
        starts = Starts(tmp_path, monkeypatch, ("bc", "", "result"))
        starts.agents.interrupt = is_ended or None
        assert starts.job.run(lambda: None) == "result"
        assert starts.said == ["not started again: fewer than 2 hosts are left (--min_hosts)"] * (not is_ended)
    with pytest.raises(ClusterError, match="b: refused"):
        Starts(tmp_path, monkeypatch, "b").job.run(lambda: None)


@pytest.mark.parametrize("name", [contract.PLAN_JSON, "metrics"])
def test_job_whose_files_cannot_be_written_ends(fleet, name):
    (fleet.folder / name).mkdir()
    object.__setattr__(fleet.spec, "metrics_file", fleet.folder / "metrics")
    fleet.plan(0, 1)
    fleet.hear()
    assert [*map(fleet.told, range(2))] == [["stop"]] * 2
    (fault,) = fleet.noted("fault")
    option = "--log_dir" if name == contract.PLAN_JSON else "--metrics_file"
    assert fault["reason"].startswith(option) and "(it is a directory)" in fault["reason"]
