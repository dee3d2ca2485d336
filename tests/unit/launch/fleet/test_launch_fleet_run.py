"""One job over many hosts, seen from the launcher: what agents say, and what becomes of the job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from failure_reports import failed, failure_of, fault_of
from fake_agents import FakeClock, FakeLink, FakeSignals

from msrun.agent.observer import OwnFaults
from msrun.cluster.failure import FailureReport
from msrun.cluster.messages import unpack_hosts
from msrun.cluster.protocol import HostPart
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.agents import Agents
from msrun.launch.fleet.fleet_job import FleetRun
from msrun.launch.fleet.log_collector import LogCollector, own_logs
from msrun.launch.fleet.preparation import ReadyHosts
from msrun.launch.job import JobResult
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.assignment import HostPool
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.plan import HostPlan, WorkerPlan
from msrun.planning.program import Program
from msrun.planning.record_json import decode_record, encode_record
from msrun.planning.spec import LaunchSpec

PROGRAM = Program("script", "/t.py")
HOSTS = tuple(HostAssignment(node, f"h{node}", f"10.0.0.{node + 1}", (node,), (0,)) for node in range(2))


def host_plan(node: int, rank: int, **changes: Any) -> dict[str, Any]:
    worker = WorkerPlan(rank, 0, 0, {"RANK": str(rank)}, f"/spool/worker_{rank}.log")
    fields = {"node_rank": node, **changes}
    return dict(
        encode_record(
            HostPlan(fields["node_rank"], f"h{node}", f"10.0.0.{node + 1}", PROGRAM, "/", "fork", (), {}, (worker,))
        )
    )


class Fleet:
    """Two hosts with a worker each. `say` is what an agent says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock, self.signals = FakeClock(), FakeSignals()
        self.spec = LaunchSpec(
            program=PROGRAM,
            worker_num=2,
            local_worker_num=0,
            working_directory=folder,
            log_dir=folder,
            max_restarts=1,
            grace_s=5.0,
            host_entries=(HostEntry("h0", 1, (0,)), HostEntry("h1", 1, (0,))),
        )
        self.agents = Agents(self.signals, (), 60.0, clock=self.clock)  # type: ignore[arg-type]
        self.inbox = self.agents.inbox
        self.links: list[Any] = [FakeLink(0), FakeLink(1)]
        self.agents.links = self.links
        self.agents._next_beat = self.clock.now
        self.logs = LogCollector(folder, None, own_logs("worker", {0: (0,), 1: (1,)}), 1)
        self.events = EventLog(folder / "events.jsonl")

        ready = ReadyHosts(("10.0.0.1", 4711), HOSTS, frozenset({1}))
        self.warnings: list[str] = []
        faults = OwnFaults(folder, self.warnings.append, found_in=str(folder))
        self.pool = HostPool(self.spec.host_entries, (HostEntry("h2", 1, (0,)),), 0)
        self.run = FleetRun(
            self.spec,
            "JOB",
            self.agents,
            ready,
            self.logs,
            self.events,
            {},
            faults,
            quiet=True,
            pool=self.pool,
            clock=self.clock,
        )
        self.has_plan = 0
        self.run.start(self._on_directory)

    def _on_directory(self) -> None:
        self.has_plan += 1

    def say(self, node: int, kind: str, **fields: Any) -> None:
        self.inbox.post({"type": kind, "node": node, **fields})

    def plan(self, *nodes: int) -> None:
        for node in nodes:
            self.say(node, "planned", host=host_plan(node, node), notes=[], target="cpu")

    def moment(self, node: int, kind: str, **fields: Any) -> None:
        self.say(node, "event", moment=kind, fields=fields)

    def fail(self, node: int, report: FailureReport | None = None) -> None:
        """A worker of a host, or the host itself, fails."""
        message = failed(self.run.coordinator.attempt, report or FailureReport(failure_of(node), can_restart=True))
        self.say(node, message.pop("type"), **message)

    def stop(self, *nodes: int, attempt: int = 0, can_continue: bool = True) -> None:
        """No worker runs on these hosts any more."""
        for node in nodes:
            self.say(node, "ended", attempt=attempt, can_continue=can_continue, come=[])

    def end(self, *nodes: int, failure: Any = None) -> None:
        """The hosts have ended their part, and told what they have seen."""
        for node in nodes:
            self.say(node, "result", failure=failure, survivors=[])
            self.say(node, "logs_end")

    def hear(self) -> None:
        """Take what has been said, without waiting for more."""
        is_heard = iter((False, True))
        self.run._hear(lambda: next(is_heard))

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.run._tick()

    def told(self, node: int) -> list[str]:
        """What a host was told after it was told to run."""
        return [done["type"] for done in self.links[node].done if isinstance(done, dict)][1:]

    def noted(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def finish(self) -> JobResult:
        result = self.run.finish()
        assert result is not None, "it does not go on elsewhere"
        return result

    def close(self) -> None:
        self.logs.close()
        self.events.close()
        self.signals.close()
        self.agents.loop.close(0.0)
        self.inbox.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def test_agents_are_told_to_run_with_whom_and_where(fleet: Fleet) -> None:
    runs = [done for link in fleet.links for done in link.done if isinstance(done, dict)]
    assert [run["type"] for run in runs] == ["run", "run"]
    parts = [decode_record(HostPart, run["part"]) for run in runs]
    assert [(part.node_rank, part.use_shared) for part in parts] == [(0, False), (1, True)]
    for part in parts:
        assert unpack_hosts(part.hosts) == HOSTS
        assert (part.job_id, part.master_addr, part.master_port) == ("JOB", "10.0.0.1", 4711)
        assert part.spec is not None and part.spec.local_worker_num == 1
    assert fleet.agents.has_begun


def test_job_whose_hosts_all_end_well_is_well(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.stop(0)
    fleet.hear()
    assert fleet.told(0) == fleet.told(1) == []
    fleet.stop(1)
    fleet.hear()
    assert fleet.told(0) == fleet.told(1) == ["over"]
    fleet.end(0, 1)
    result = fleet.finish()
    assert result.failure is None and result.exit_code == 0
    assert [worker.log_path for worker in result.plan.workers] == [
        f"{fleet.folder}/worker_{rank}.log" for rank in (0, 1)
    ]
    assert fleet.noted("over")[0]["reason"] == "all workers ended with exit code 0"
    assert not (fleet.folder / "failure.json").exists()


@pytest.mark.parametrize("plan", [host_plan(0, 1), host_plan(1, 0), host_plan(0, 7), host_plan(0, 0, node_rank=1)])
def test_host_that_speaks_for_another_is_given_up(fleet: Fleet, plan: dict[str, Any]) -> None:
    fleet.say(0, "planned", host=plan, notes=[], target="cpu")
    fleet.hear()
    assert "its agent says what cannot be understood" in str(fleet.links[0].done[-2:])
    assert not any("understood" in str(done) for done in fleet.links[1].done)


def test_worker_that_failed_is_the_reason_with_its_log_here(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.fail(1)
    fleet.fail(0)
    fleet.hear()
    assert fleet.told(0) == fleet.told(1) == ["stop"], "the first failure counts"
    fleet.stop(0, 1, can_continue=False)
    fleet.end(0, failure=encode_record(replace(failure_of(1), first_failure=None)))
    fleet.end(1, failure=encode_record(failure_of(1)))
    result = fleet.finish()
    assert result.exit_code == 7 and result.failure is not None
    assert result.failure.first_failure is not None
    assert result.failure.first_failure.log == f"{fleet.folder}/worker_1.log"
    assert json.loads((fleet.folder / "failure.json").read_text())["exit_code"] == 7


def test_job_starts_again_on_all_hosts_together(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.fail(1)
    fleet.stop(0, 1)
    fleet.hear()
    assert fleet.told(0) == fleet.told(1) == ["stop", "restart"]
    for node in range(2):
        fleet.moment(node, "restarting", attempt=1, delay_s=0.0, reason="as it has it", global_ranks=[])
        fleet.say(node, "ready", attempt=1, clock_s=time.time())
    fleet.hear()
    assert fleet.told(0) == fleet.told(1) == ["stop", "restart", "start"]
    (told,) = fleet.noted("restarting")
    assert (told["reason"], told["global_ranks"]) == ("rank 1 failed", [1])
    fleet.stop(0, 1, attempt=1)
    fleet.end(0, 1)
    assert fleet.finish().exit_code == 0


@pytest.mark.parametrize("kinds", [("lost",), ("broken", "lost")])
def test_host_that_is_lost_ends_the_job_on_the_others_at_once(fleet: Fleet, kinds: tuple[str, ...]) -> None:
    fleet.plan(0, 1)
    for kind in kinds:
        fleet.say(1, kind, reason="h1: the connection broke")
        fleet.hear()
        assert fleet.told(0) == ["stop"]
    fleet.fail(0)  # its workers miss those of the lost host
    fleet.stop(0)
    fleet.hear()
    assert fleet.told(0) == ["stop", "over"]
    fleet.end(0, failure=encode_record(failure_of(0)))
    result = fleet.finish()
    assert result.failure is not None and result.failure.reason == "h1: the connection broke"
    assert result.exit_code == 3 and len(fleet.noted("fault")) == 1


def restart(fleet: Fleet) -> None:
    """A worker has failed, and all hosts are told to start again."""
    fleet.plan(0, 1)
    fleet.fail(1)
    fleet.stop(0, 1)
    fleet.hear()


@pytest.mark.parametrize("can_go_on", [True, False])
def test_host_that_cannot_start_again_is_left_out_or_ends_the_job(fleet: Fleet, can_go_on: bool) -> None:
    """The attempt that it spoils does not count: none of its workers has run."""
    fleet.pool.min_hosts = 2 if can_go_on else 0
    restart(fleet)
    report = fault_of(1, "node 1 (h1): cannot start again: the disk is full", 3)
    fleet.fail(1, replace(report, is_unfit=True))
    fleet.stop(0, 1, attempt=1, can_continue=False)
    fleet.end(0, 1)
    result = fleet.run.finish()
    assert fleet.run.coordinator.losses == {1: report.failure.reason}
    assert fleet.run.restarts == 0
    if can_go_on:
        assert result is None
        (attempt,) = fleet.run.attempts
        assert (attempt["attempt"], attempt["reason"]) == (0, f"rank 1 failed; then {report.failure.reason}")
    else:
        assert result is not None and result.failure is not None
        assert (result.failure.reason, result.exit_code) == (report.failure.reason, 3)


@pytest.mark.parametrize("skew_s", [-400.0, 400.0])
def test_host_whose_clock_is_far_off_does_not_start_again(fleet: Fleet, skew_s: float) -> None:
    restart(fleet)
    fleet.say(0, "ready", attempt=1, clock_s=time.time() - 299.0)
    fleet.say(1, "ready", attempt=1, clock_s=time.time() + skew_s)
    fleet.hear()
    assert fleet.told(0) == ["stop", "restart", "stop"]
    (reason,) = fleet.run.coordinator.losses.values()
    how = "400.0 s ahead of" if skew_s > 0 else "400.0 s behind"
    assert reason == f"h1: cannot start again: clock {how} the one here; start chrony or ntpd there"


def test_job_that_goes_on_elsewhere_has_no_result_and_no_failure(fleet: Fleet) -> None:
    fleet.pool.min_hosts = 2
    fleet.plan(0, 1)
    fleet.say(1, "lost", reason="h1: the connection broke")
    fleet.stop(0)
    fleet.end(0, failure=encode_record(failure_of(0)))
    assert fleet.run.finish() is None
    assert fleet.run.coordinator.losses == {1: "h1: the connection broke"}
    assert [entry.name for entry in fleet.pool.chosen] == ["h0", "h2"]
    (event,) = fleet.noted("restarting")
    assert (event["attempt"], event["global_ranks"]) == (1, [1])
    assert not (fleet.folder / "failure.json").exists() and fleet.noted("over") == []
    (fleet.folder / "worker_1.log").write_text("old")
    fleet.run.set_logs_aside()
    assert (fleet.folder / "worker_1.attempt_0.log").read_text() == "old"


def test_host_that_is_lost_after_its_result_is_no_loss(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.say(1, "result", failure=None, survivors=[5, "x", True])
    fleet.say(1, "lost", reason="h1: the connection broke")
    fleet.end(0)
    result = fleet.finish()
    assert result.failure is None
    assert result.survivors == (5,)


def test_host_that_is_lost_between_the_end_and_its_result_is_a_fault(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.stop(0, 1)
    fleet.end(0)
    fleet.say(1, "lost", reason="h1: the connection broke")
    result = fleet.finish()
    assert result.exit_code == 3 and result.failure is not None
    assert result.failure.reason == "h1: the connection broke"


def test_failure_of_a_host_itself_is_the_reason(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.fail(1, fault_of(0, "node 1 (h1): its disk is full", 3))
    fleet.stop(0, 1)
    fleet.end(0, 1)
    result = fleet.finish()
    assert result.failure is not None and result.failure.reason == "node 1 (h1): its disk is full"


def test_agent_that_could_not_begin_is_named(fleet: Fleet) -> None:
    fleet.say(1, "error", text="no such folder", exit_code=2)
    fleet.end(0)
    result = fleet.finish()
    assert result.exit_code == 2 and result.failure is not None
    assert result.failure.reason == "h1: no such folder"


@pytest.mark.parametrize(("node", "host"), [(1, "h1: "), (-1, "")])
def test_fault_of_msrun_itself_ends_the_job_under_its_own_name(fleet: Fleet, node: int, host: str) -> None:
    fleet.plan(0, 1)
    fleet.say(node, "fault", text="msrun itself failed: OSError: disk")
    fleet.hear()
    for link in fleet.links:
        assert [said["type"] for said in link.done if isinstance(said, dict)] == ["run", "stop"], "that host, too"
    fleet.stop(0, 1)
    fleet.end(0, 1)
    result = fleet.finish()
    assert result.exit_code == 3 and result.failure is not None
    assert result.failure.reason == f"{host}msrun itself failed: OSError: disk"


def test_first_fault_is_the_reason(fleet: Fleet) -> None:
    for node in range(2):
        fleet.say(node, "error", text="cannot start", exit_code=3)
    result = fleet.finish()
    assert result.failure is not None and result.failure.reason == "h0: cannot start"
    assert len(fleet.noted("fault")) == 1


def test_breaks_of_connections_are_in_the_record(fleet: Fleet) -> None:
    fleet.say(1, "cut", reason="the connection to h1 broke")
    fleet.say(1, "resumed")
    fleet.hear()
    assert [event["node_rank"] for kind in ("cut", "resumed") for event in fleet.noted(kind)] == [1, 1]
