"""The starts of one job: what each asks of which hosts, with runs and preparations that end as the test wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msrun.agent.observer import OwnFaults
from msrun.errors import ClusterError
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet import starts as module
from msrun.launch.fleet.starts import NO_ADDRESS, JobStarts
from msrun.launch.job import JobResult
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

WELL = object()


class Preparation:
    """Comes as far as the next of `ends` says: None, or the nodes because of which it does not."""

    ends: list[set[int] | None]
    asked: list[LaunchSpec]

    def __init__(self, spec: LaunchSpec, *_: object) -> None:
        self.asked.append(spec)
        self.failed_nodes: set[int] = set()

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was opened."""

    def run(self) -> None:
        failed = self.ends.pop(0)
        if failed:
            self.failed_nodes = failed
            raise ClusterError("host: cannot be reached")


class Run:
    """Loses the nodes that are next in `losses`; ends well when there are none."""

    losses: list[set[int]]

    def __init__(self, spec: LaunchSpec, *_: object, earlier: list[Any], **__: object) -> None:
        self.plan = SimpleNamespace(log_dir=str(spec.log_dir), secrets=())
        self.restarts = spec.first_attempt
        self.attempts = [*earlier, {"reason": "lost"}]
        self.leaving: set[int] = set()

    def start(self, on_directory: Callable[[], None]) -> None:
        on_directory()

    def finish(self, can_go_on: Callable[[], bool]) -> object:
        self.lost = {node: f"lost node {node}" for node in (self.losses.pop(0) if self.losses else ())}
        return None if self.lost and can_go_on() else WELL

    def set_logs_aside(self) -> None:
        """There are none."""


def run_job(
    folder: Path, patch: pytest.MonkeyPatch, losses: list[set[int]], ends: list[set[int] | None], **more: Any
) -> tuple[object, list[LaunchSpec]]:
    """Run three hosts and a spare one, a, b, c and d, to the end; return the result and what each start asked for."""
    asked: list[LaunchSpec] = []
    patch.setattr(Preparation, "ends", ends, raising=False)
    patch.setattr(Preparation, "asked", asked, raising=False)
    patch.setattr(Run, "losses", losses, raising=False)
    patch.setattr(module, "Preparation", Preparation)
    patch.setattr(module, "FleetRun", Run)
    patch.setattr(module, "HostOpener", lambda *_: None)
    patch.setattr(module, "write_failure", lambda *_: "")
    hosts = [HostEntry(name, 2) for name in "abcd"]
    spec = LaunchSpec(
        program=Program("executable", "true"),
        worker_num=6,
        local_worker_num=2,
        working_directory=folder,
        log_dir=folder,
        host_entries=tuple(hosts[:3]),
        spares=(hosts[3],),
        tail_ranks=(0, 5),
        master_addr="10.0.0.1",
        **{"max_restarts": 3, "min_hosts": 2, **more},
    )
    events = EventLog(folder / "events.jsonl")
    starts = JobStarts(spec, {}, "f00d", Any, events, OwnFaults(folder, print, found_in=str(folder)), quiet=True)  # type: ignore[arg-type] # nobody gives a signal
    result = starts.run(lambda: None)
    while result is None:
        result = starts.run(lambda: None)
    events.close()
    return result, asked


def names(asked: list[LaunchSpec]) -> list[str]:
    return ["".join(entry.name for entry in spec.host_entries) for spec in asked]


def test_spare_host_comes_behind_those_that_stay_and_the_attempt_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, asked = run_job(tmp_path, monkeypatch, [{0}], [None, None])
    assert result is WELL and names(asked) == ["abc", "bcd"]
    assert [(spec.max_restarts, spec.first_attempt, spec.worker_num) for spec in asked] == [(3, 0, 6), (2, 1, 6)]
    assert [spec.master_addr for spec in asked] == ["10.0.0.1", NO_ADDRESS], "the host of that address has gone"


def test_host_that_has_failed_once_may_be_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = run_job(tmp_path, monkeypatch, [{1}, {1}, {0}], [None] * 4)
    assert result is WELL and names(asked) == ["abc", "acd", "adb", "dba"]
    assert [spec.max_restarts for spec in asked] == [3, 2, 1, 0]


def test_one_host_that_is_left_has_its_own_ranks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[set[int] | None] = [None, {1, 2}, {1, 2}, None]
    result, asked = run_job(tmp_path, monkeypatch, [{1, 2}], ends, min_hosts=1)
    assert result is WELL and names(asked) == ["abc", "adb", "acd", "a"]
    assert (asked[-1].worker_num, asked[-1].tail_ranks) == (2, (0,))


def test_host_that_cannot_take_part_in_a_restart_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = run_job(tmp_path, monkeypatch, [{1}], [None, {2}, None])
    assert result is WELL and names(asked) == ["abc", "acd", "acb"]
    assert [spec.first_attempt for spec in asked] == [0, 1, 1], "a start that did not come about is no attempt"


def test_host_that_cannot_take_part_in_the_first_start_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match="cannot be reached"):
        run_job(tmp_path, monkeypatch, [], [{2}])


@pytest.mark.parametrize("more", [{"max_restarts": 0}, {"min_hosts": 0}])
def test_lost_host_ends_a_job_that_may_not_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, int]
) -> None:
    _, asked = run_job(tmp_path, monkeypatch, [{0}], [None], **more)
    assert names(asked) == ["abc"]


def test_job_whose_hosts_become_too_few_before_a_restart_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, asked = run_job(tmp_path, monkeypatch, [{1, 2}], [None, {1, 2}, {1, 2}])
    assert names(asked) == ["abc", "adb", "acd"]
    assert isinstance(result, JobResult) and result.failure is not None
    assert result.failure.reason == "lost; then host: cannot be reached; fewer than 2 hosts are left"
    assert (result.exit_code, result.failure.attempts) == (3, [{"reason": "lost"}])
