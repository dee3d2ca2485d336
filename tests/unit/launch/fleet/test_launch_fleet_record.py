"""Stories of many hosts, told as one job."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msrun import agent
from msrun.agent.observer import Observer, Observers, OwnFaults
from msrun.cluster.membership import WorkerState
from msrun.cluster.protocol import MOMENTS
from msrun.launch.fleet.record import FleetRecord

RESTART = {"attempt": 1, "delay_s": 1.0, "reason": "why", "global_ranks": []}


class Heard(Observer):
    def __init__(self) -> None:
        self.moments: list[tuple[str, dict[str, Any]]] = []

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.moments.append((kind, dict(fields)))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.moments]


def raise_fault(text: str) -> None:
    pytest.fail(text)


def new_record() -> tuple[FleetRecord, Heard]:
    heard = Heard()
    return FleetRecord({0: (0, 1), 1: (2,)}, Observers([heard], OwnFaults("/nowhere", raise_fault, found_in=""))), heard


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
    fields = {"start_method": "fork", "reason": "", "prepare_s": 0.5}
    record.note(1, "ready", fields)
    assert heard.moments == [("host_ready", {"node_rank": 1, **fields})]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("note", {}),
        ("note", {"text": ["no text"]}),
        ("started", {"global_rank": [2], "pid": 1}),
        ("started", {"global_rank": True, "pid": 1}),
        ("exited", {"global_rank": 2, "how": "", "status": 0, "state": "no state"}),
        ("restarting", {"attempt": 1, "delay_s": float("inf"), "reason": "", "global_ranks": []}),
        ("restarting", {"attempt": 1, "delay_s": 1.0, "reason": ""}),
        ("log_lost", {"reason": "", "lost_bytes": {"1": "one"}}),
        ("signal", {"name": "USR1", "global_ranks": 7}),
    ],
)
def test_moment_that_is_not_what_it_should_be_is_refused(kind: str, value: object) -> None:
    record, heard = new_record()
    with pytest.raises(ValueError):
        record.note(1, kind, value)
    assert not heard.moments


def test_every_moment_of_a_supervisor_is_known_with_its_fields() -> None:
    told: dict[str, set[str]] = {}
    for path in Path(agent.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("self._tell", "tell"):
                kind = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "scheduler"
                told.setdefault(kind, set()).update(str(keyword.arg) for keyword in node.keywords)
    assert told == {kind: set(fields) for kind, fields in MOMENTS.items()}


def test_rank_of_another_host_is_not_believed() -> None:
    record, heard = new_record()
    record.note(1, "started", started(0))
    assert record.membership.count(WorkerState.RUNNING) == 0 and "started" not in heard.kinds()


def test_job_starts_again_when_the_coordinator_says_so_and_it_is_told_when_all_hosts_have() -> None:
    record, heard = new_record()
    for node, rank in ((0, 0), (0, 1), (1, 2)):
        record.note(node, "started", started(rank))
    record.note(0, "stopping", {"reason": "rank 0 failed"})
    for rank in range(3):
        record.note(rank // 2, "exited", exited(rank, 256, "failed"))
    record.restart(1, 0.5, "rank 0 failed", [0])
    assert record.membership.count(WorkerState.PLANNED) == 3
    record.note(1, "restarting", {**RESTART, "reason": "as node 1 has it"})
    assert "restarting" not in heard.kinds()
    record.note(0, "restarting", RESTART)
    told = {"attempt": 1, "delay_s": 0.5, "reason": "rank 0 failed", "global_ranks": [0]}
    assert heard.moments[-1] == ("restarting", told)
    record.note(0, "started", started(0))
    record.note(0, "stopping", {"reason": "again"})
    assert heard.kinds()[-2:] == ["started", "stopping"]
    assert record.membership.running() == {0: 100}


def test_restart_of_which_the_coordinator_says_nothing_is_none() -> None:
    record, heard = new_record()
    for node in range(2):
        record.note(node, "restarting", RESTART)
    assert heard.kinds() == []


def test_lost_host_is_not_waited_for() -> None:
    record, heard = new_record()
    record.restart(1, 0.0, "why", [])
    record.note(0, "restarting", RESTART)
    record.lost(1)
    assert heard.kinds() == ["restarting"]
