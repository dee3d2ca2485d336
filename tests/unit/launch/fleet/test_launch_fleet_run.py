"""One job over many hosts, seen from the launcher: what agents say, and what becomes of the job."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_agents import FakeClock, FakeLink, FakeSignals

from msrun.cluster.inbox import Inbox
from msrun.errors import ClusterError, Interrupted
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet import fleet_job
from msrun.launch.fleet.crew import Crew
from msrun.launch.fleet.fleet_job import FleetRun
from msrun.launch.fleet.home_logs import HomeLogs, own_logs
from msrun.launch.fleet.muster import Mustered
from msrun.launch.job import JobResult
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.plan import HostPlan, WorkerPlan
from msrun.planning.program import Program
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec

PROGRAM = Program("script", "/t.py")


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
        self.clock, self.inbox, self.signals = FakeClock(), Inbox(), FakeSignals()
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
        self.crew = Crew(self.inbox, self.signals, (), 60.0, self.clock)  # type: ignore[arg-type]
        self.links: list[Any] = [FakeLink(0), FakeLink(1)]
        self.crew.start(self.links)
        self.crew._next_beat = self.clock.now
        self.logs = HomeLogs(folder, None, own_logs("worker", {0: (0,), 1: (1,)}), 1)
        self.events = EventLog(folder / "events.jsonl")
        mustered = Mustered(("10.0.0.1", 4711), frozenset({1}), lambda node, m: ClusterError(f"h{node}: {m['reason']}"))
        self.run = FleetRun(
            self.spec, "JOB", self.crew, mustered, self.logs, self.events, {}, quiet=True, clock=self.clock
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

    def end(self, *nodes: int, failure: Any = None) -> None:
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
        return [done["type"] for done in self.links[node].done if isinstance(done, dict)]

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
        self.inbox.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def failure_of(rank: int, exit_code: int = 7) -> dict[str, Any]:
    texts = {"host": "h", "signal": None, "hint": "", "log": f"/x/worker_{rank}.log", "excerpt": ["line"]}
    worker = {"global_rank": rank, "local_rank": 0, "pid": 7, "exit_code": exit_code, "run_time_s": 1.5, **texts}
    return {
        "job_id": "JOB", "exit_code": exit_code, "reason": f"rank {rank} failed", "first_failure": worker,
        "lagging": [], "others": [], "attempts": [],
    }  # fmt: skip


def test_agents_are_told_to_start_and_where(fleet: Fleet) -> None:
    starts = [done for link in fleet.links for done in link.done if isinstance(done, dict)]
    same = {"type": "start", "master_addr": "10.0.0.1", "master_port": 4711}
    assert starts == [{**same, "use_shared": False}, {**same, "use_shared": True}]
    assert fleet.crew.has_begun


def test_job_whose_hosts_all_end_well_is_well(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.end(0, 1)
    result = fleet.finish()
    assert result.failure is None and result.exit_code == 0
    assert [worker.log_path for worker in result.plan.workers] == [
        f"{fleet.folder}/worker_{rank}.log" for rank in (0, 1)
    ]
    assert fleet.noted("over")[0]["reason"] == "all workers ended with exit code 0"
    assert not (fleet.folder / "failure.json").exists()


def test_plan_is_written_when_the_last_host_has_said_what_it_will_run(fleet: Fleet) -> None:
    fleet.plan(1)
    fleet.hear()
    assert fleet.has_plan == 0 and not (fleet.folder / "plan.json").exists()
    fleet.plan(0)
    fleet.hear()
    assert fleet.has_plan == 1
    assert json.loads((fleet.folder / "plan.json").read_text())["world_size"] == 2
    assert (fleet.folder / "rank_table.json").exists()
    assert fleet.run.shown


@pytest.mark.parametrize("plan", [host_plan(0, 1), host_plan(1, 0), host_plan(0, 7), host_plan(0, 0, node_rank=1)])
def test_host_that_speaks_for_another_is_given_up(fleet: Fleet, plan: dict[str, Any]) -> None:
    fleet.say(0, "planned", host=plan, notes=[], target="cpu")
    fleet.hear()
    assert "its agent says what cannot be understood" in str(fleet.links[0].done[-2:])
    assert not any("understood" in str(done) for done in fleet.links[1].done)


def test_worker_that_failed_is_the_reason_with_its_log_here(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.end(0)
    fleet.end(1, failure=failure_of(1))
    result = fleet.finish()
    assert result.exit_code == 7 and result.failure is not None
    assert result.failure.first_failure is not None
    assert result.failure.first_failure.log == f"{fleet.folder}/worker_1.log"
    assert json.loads((fleet.folder / "failure.json").read_text())["exit_code"] == 7


def test_host_that_is_lost_ends_the_job_on_the_others_after_a_moment(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.say(1, "lost", reason="the connection broke")
    fleet.hear()
    fleet.tick(fleet_job.LOST_S / 2)
    assert fleet.told(0) == ["start"], "it may have heard of it itself"
    fleet.tick(fleet_job.LOST_S / 2)
    fleet.tick(1.0)
    assert fleet.told(0) == ["start", "signal"]
    fleet.end(0)
    result = fleet.finish()
    assert result.failure is not None and result.failure.reason == "h1: the connection broke"
    assert result.exit_code == 3


def test_job_that_goes_on_elsewhere_has_no_result_and_no_failure(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.say(1, "lost", reason="the connection broke")
    fleet.end(0, failure=failure_of(0))
    asked: list[dict[int, str]] = []
    assert fleet.run.finish(lambda lost: asked.append(dict(lost)) or True) is None  # type: ignore[func-returns-value]
    assert asked == [{1: "h1: the connection broke"}]
    (event,) = fleet.noted("restarting")
    assert (event["attempt"], event["global_ranks"]) == (1, [1])
    assert not (fleet.folder / "failure.json").exists() and fleet.noted("over") == []
    (fleet.folder / "worker_1.log").write_text("old")
    fleet.run.set_logs_aside()
    assert (fleet.folder / "worker_1.attempt_0.log").read_text() == "old"


def test_host_that_ends_by_itself_needs_no_signal(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.say(1, "lost", reason="the connection broke")
    fleet.moment(0, "stopping", reason="lost node 1")
    fleet.hear()
    fleet.tick(fleet_job.LOST_S * 2)
    assert fleet.told(0) == ["start"]


def test_host_that_does_not_end_in_time_is_given_up(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.moment(0, "stopping", reason="rank 0 failed")
    fleet.end(0, failure=failure_of(0))
    fleet.hear()
    fleet.tick(5.0 + fleet_job.END_S - 0.1)
    assert not fleet.run._is_over()
    fleet.tick(0.1)
    assert fleet.run._is_over()
    result = fleet.finish()
    assert result.exit_code == 7, "the worker is the reason"
    assert fleet.noted("fault")[0]["reason"] == "host1: did not end its part of the job in time"


def test_restart_forgets_the_limit_of_the_end(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.moment(0, "stopping", reason="rank 0 failed")
    fleet.moment(0, "restarting", attempt=1, delay_s=1.0, reason="rank 0 failed")
    fleet.hear()
    fleet.tick(1000.0)
    assert not fleet.run._is_over()


def test_restart_after_a_fault_does_not_forget_it(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.say(1, "lost", reason="the connection broke")
    fleet.moment(0, "restarting", attempt=1, delay_s=1.0, reason="rank 0 failed")
    fleet.hear()
    fleet.tick(5.0 + fleet_job.END_S)
    assert fleet.run._is_over()


def test_interrupt_limits_the_time_of_the_end(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.hear()
    fleet.tick(100.0)
    fleet.crew.interrupt = Interrupted("stopped by SIGINT", signal.SIGINT)
    fleet.tick(0.0)
    fleet.tick(5.0 + fleet_job.END_S - 0.1)
    assert not fleet.run._is_over()
    fleet.tick(0.1)
    assert fleet.run._is_over()
    result = fleet.finish()
    assert result.exit_code == 130


def test_host_that_is_lost_after_its_result_is_no_loss(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.say(1, "result", failure=None, survivors=[5, "x", True])
    fleet.say(1, "lost", reason="the connection broke")
    fleet.end(0)
    result = fleet.finish()
    assert result.failure is None
    assert result.survivors == (5,)


def test_agent_that_could_not_begin_is_named(fleet: Fleet) -> None:
    fleet.say(1, "error", text="no such folder", exit_code=2)
    fleet.end(0)
    result = fleet.finish()
    assert result.exit_code == 2 and result.failure is not None
    assert result.failure.reason == "h1: no such folder"


def test_first_fault_is_the_reason(fleet: Fleet) -> None:
    for node in range(2):
        fleet.say(node, "error", text="cannot start", exit_code=3)
    result = fleet.finish()
    assert result.failure is not None and result.failure.reason == "h0: cannot start"
    assert len(fleet.noted("fault")) == 1


def test_result_that_cannot_be_read_is_a_fault(fleet: Fleet) -> None:
    fleet.plan(0, 1)
    fleet.end(0, 1, failure={"job_id": 7})
    result = fleet.finish()
    assert result.exit_code == 3 and result.failure is not None
    assert "a host's result cannot be read" in result.failure.reason


def test_breaks_of_connections_are_in_the_record(fleet: Fleet) -> None:
    fleet.say(1, "cut", reason="the connection to h1 broke")
    fleet.say(1, "resumed")
    fleet.hear()
    assert [event["node_rank"] for kind in ("cut", "resumed") for event in fleet.noted(kind)] == [1, 1]


def test_user_hears_from_node_0_alone_who_is_missing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(fleet.run, "_say", said.append)
    for node in range(2):
        fleet.say(node, "say", text="1 of 2 registered, missing: rank 1")
    fleet.say(0, "say", text="all have come")
    fleet.say(1, "say", text=f"{fleet_job.REGISTERED} at the scheduler")
    fleet.hear()
    assert said == ["1 of 2 registered, missing: rank 1"]
    assert [event["node_rank"] for event in fleet.noted("registered")] == [1]
    assert len(fleet.noted("gathering")) == 2
