"""Stories of many hosts, told as one job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msrun.agent.observer import Observers
from msrun.cluster.membership import Membership, WorkerState
from msrun.launch.fleet.record import FleetRecord


class Heard:
    tick_s: float | None = None

    def __init__(self) -> None:
        self.moments: list[tuple[str, dict[str, Any]]] = []

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.moments.append((kind, dict(fields)))

    def tick(self, membership: Membership) -> None:
        """Nothing."""

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.moments]


def new_record() -> tuple[FleetRecord, Heard]:
    heard = Heard()
    return FleetRecord({0: (0, 1), 1: (2,)}, Observers([heard])), heard


def started(rank: int) -> dict[str, Any]:
    return {"global_rank": rank, "pid": 100 + rank}


def exited(rank: int, status: int = 0, state: str = "done") -> dict[str, Any]:
    return {"global_rank": rank, "status": status, "state": state, "how": "somehow"}


def test_job_runs_when_the_workers_of_all_hosts_run() -> None:
    record, heard = new_record()
    record.note(0, "started", started(0))
    record.note(0, "started", started(1))
    record.note(0, "running", {"world_size": 2})
    assert "running" not in heard.kinds()
    record.note(1, "started", started(2))
    assert heard.moments[-1] == ("running", {"world_size": 3})
    assert record.membership.count(WorkerState.RUNNING) == 3


def test_what_every_host_tells_is_told_once() -> None:
    record, heard = new_record()
    for node in (1, 0):
        record.note(node, "stopping", {"reason": f"told by {node}"})
    assert heard.moments == [("stopping", {"reason": "told by 1"})]


def test_moment_of_a_host_alone_is_kept_with_its_number() -> None:
    record, heard = new_record()
    record.note(1, "ready", {"start_method": "fork"})
    assert heard.moments == [("host_ready", {"node_rank": 1, "start_method": "fork"})]


def test_rank_of_another_host_is_not_believed() -> None:
    record, heard = new_record()
    record.note(1, "started", started(0))
    assert record.membership.count(WorkerState.RUNNING) == 0 and "started" not in heard.kinds()


def test_events_of_an_attempt_are_not_mixed_with_those_of_the_next() -> None:
    record, heard = new_record()
    for node, rank in ((0, 0), (0, 1), (1, 2)):
        record.note(node, "started", started(rank))
    record.note(0, "exited", exited(0, 256, "failed"))
    record.note(0, "exited", exited(1, 15, "stopped by msrun"))
    record.note(0, "restarting", {"attempt": 1})
    record.note(0, "started", started(0))  # ahead: the other host has not told of its end yet
    record.note(1, "exited", exited(2, 15, "stopped by msrun"))
    assert record.membership.members[2].state is WorkerState.STOPPED
    assert "restarting" not in heard.kinds()
    record.note(1, "restarting", {"attempt": 1})
    assert heard.kinds()[-2:] == ["restarting", "started"]
    assert record.membership.running() == {0: 100}


def test_lost_host_is_not_waited_for() -> None:
    record, heard = new_record()
    record.note(0, "restarting", {"attempt": 1})
    record.lost(1)
    assert heard.kinds() == ["restarting"]
