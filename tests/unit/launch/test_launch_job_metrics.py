"""The numbers of a job for Prometheus, with workers and records that the test plays."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from plans import small_plan

from msrun import contract
from msrun.agent.processes.process_control import Usage
from msrun.agent.watch.progress_board import PROGRESS_BOARD, ProgressBoard
from msrun.cluster.membership import Membership, WorkerState
from msrun.errors import UsageError
from msrun.launch import metrics_file as module
from msrun.launch.metrics_file import INTERVAL_S, MetricsFile
from msrun.planning.plan import LaunchPlan
from msrun.runtime.progress import ProgressRecord

NOW, CLOCK = 5000.0, 70.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The wall clock and the monotonic one, as the file's module sees them."""
    moments = {"now": NOW, "clock": CLOCK}
    monkeypatch.setattr(module.time, "time", lambda: moments["now"])
    monkeypatch.setattr(module.time, "monotonic", lambda: moments["clock"])
    monkeypatch.setattr(module, "session_usage", lambda pids: {pid: Usage(cpu_s=2.5, memory_bytes=9) for pid in pids})
    return moments


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    (tmp_path / "logs").mkdir()
    return small_plan(tmp_path, 2, tmp_path / "logs", str(tmp_path))


def running() -> Membership:
    membership = Membership(range(2))
    membership.started(0, 11, 0.0)
    membership.started(1, 12, 0.0)
    return membership


def samples(path: Path) -> dict[str, str]:
    """Return the samples without the label of the job."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.replace('job_id="J",', "").replace('{job_id="J"}', "").rsplit(" ", 1) for line in lines)


def test_file_is_there_before_a_worker_has_started(tmp_path: Path, plan: LaunchPlan, clock: dict[str, float]) -> None:
    path = tmp_path / "job.prom"
    before = os.umask(0o077)  # the exporter is another user all the same
    try:
        MetricsFile(path, plan, are_workers_here=True, restarts=3)
    finally:
        os.umask(before)
    states = {f'msrun_workers{{state="{name}"}}': "0.0" for name in module.STATE_NAMES.values()}
    assert samples(path) == {
        f'msrun_job_info{{log_dir="{tmp_path}/logs"}}': "1.0",
        "msrun_job_running": "1.0",
        "msrun_job_start_time_seconds": "5000.0",
        "msrun_restarts_total": "3",
        **states,
        f'msrun_workers{{state="{WorkerState.PLANNED.value}"}}': "2.0",
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert sorted(os.listdir(tmp_path)) == ["job.prom", "logs"]


def test_running_workers_are_told_of_by_their_record_their_log_and_the_kernel(
    tmp_path: Path, plan: LaunchPlan, clock: dict[str, float]
) -> None:
    board = ProgressBoard(tmp_path / PROGRESS_BOARD, 2)
    board.create()
    board.close()
    record = ProgressRecord(str(tmp_path / PROGRESS_BOARD), 0)
    record.enter_phase(contract.PHASE_JOINED)
    record.begin_step(41)
    record.note_loss(0.5)
    log = tmp_path / "logs" / "worker_1.log"
    log.write_text("epoch: 1, step: 7, loss is 0.25\n")
    os.utime(log, (NOW - 4.0, NOW - 4.0))
    metrics = MetricsFile(tmp_path / "job.prom", plan, are_workers_here=True)
    clock["clock"] += INTERVAL_S
    metrics.tick(running())
    found = samples(tmp_path / "job.prom")
    assert {name: value for name, value in found.items() if 'rank="0"' in name and "age" not in name} == {
        'msrun_worker_step{rank="0",host="h"}': "41",
        'msrun_worker_loss{rank="0",host="h"}': "0.5",
        'msrun_worker_memory_bytes{rank="0",host="h"}': "9",
        'msrun_worker_cpu_seconds_total{rank="0",host="h"}': "2.5",
    }
    assert found['msrun_worker_step{rank="1",host="h"}'] == "7"
    assert found['msrun_worker_loss{rank="1",host="h"}'] == "0.25"
    assert found['msrun_worker_last_progress_age_seconds{rank="1",host="h"}'] == "4.0"
    assert found['msrun_workers{state="running"}'] == "2.0"


def test_workers_of_other_hosts_have_no_memory_here(tmp_path: Path, plan: LaunchPlan, clock: dict[str, float]) -> None:
    metrics = MetricsFile(tmp_path / "job.prom", plan, are_workers_here=False)
    clock["clock"] += INTERVAL_S
    metrics.tick(running())
    assert not [name for name in samples(tmp_path / "job.prom") if "memory" in name or "cpu" in name]


def test_ranks_that_other_hosts_write_are_left_out(tmp_path: Path, plan: LaunchPlan, clock: dict[str, float]) -> None:
    """Where msrun is typed on every host, the one with the scheduler hears of all ranks."""
    metrics = MetricsFile(tmp_path / "job.prom", plan, are_workers_here=True)
    membership = Membership(range(4))
    for rank in range(4):
        membership.started(rank, 11 + rank, 0.0)
    clock["clock"] += 100.0
    metrics.tick(membership)
    found = samples(tmp_path / "job.prom")
    assert found[f'msrun_workers{{state="{WorkerState.RUNNING.value}"}}'] == "2.0"
    assert sum(name.startswith("msrun_worker_memory_bytes") for name in found) == 2


def test_file_is_written_when_it_is_time_and_at_the_end(
    tmp_path: Path, plan: LaunchPlan, clock: dict[str, float]
) -> None:
    path = tmp_path / "job.prom"
    metrics = MetricsFile(path, plan, are_workers_here=True)
    metrics.note("restarting", {"attempt": 2})
    metrics.note("stopping", {"attempt": 9})
    clock["clock"] += INTERVAL_S - 0.1
    metrics.tick(running())
    assert samples(path)['msrun_workers{state="running"}'] == "0.0"
    clock["clock"] += 0.1
    metrics.tick(running())
    assert samples(path)['msrun_workers{state="running"}'] == "2.0"
    assert samples(path)["msrun_restarts_total"] == "2"
    metrics.finish(Membership(range(2)), 5)
    ended = samples(path)
    assert (ended["msrun_job_running"], ended["msrun_job_exit_code"]) == ("0.0", "5.0")


def test_full_disk_ends_no_job_and_leaves_no_half_file(
    tmp_path: Path, plan: LaunchPlan, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.prom"
    metrics = MetricsFile(path, plan, are_workers_here=True)
    before = path.read_text()
    monkeypatch.setattr(os, "fchmod", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    clock["clock"] += INTERVAL_S
    metrics.tick(running())
    metrics.finish(running(), 0)
    assert path.read_text() == before and sorted(os.listdir(tmp_path)) == ["job.prom", "logs"]
    with pytest.raises(UsageError, match=r"--metrics_file .*: cannot be written \(No space left on device\)"):
        MetricsFile(path, plan, are_workers_here=True)
