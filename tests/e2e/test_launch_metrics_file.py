"""`--metrics_file FILE`: the job in numbers, in the form that Prometheus' own parser reads."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from job_runner import JobRunner, wait_until

from msrun.launch.metrics_file import Family, render_families

parser = pytest.importorskip("prometheus_client.parser")
SCRIPT = """
import os, sys, time
from msrun.runtime import report_progress
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 1 and attempt == "0":
    sys.exit(4)
for step in range(1, 8):
    report_progress(step, 0.5)
    time.sleep(0.01)
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(5 if rank == 1 else 0)
"""


def read(path: Path) -> dict[tuple[str, str], float]:
    """Return (metric, rank or state) -> value."""
    families = parser.text_string_to_metric_families(path.read_text()) if path.exists() else []
    return {
        (sample.name, sample.labels.get("rank", sample.labels.get("state", ""))): sample.value
        for family in families
        for sample in family.samples
    }


def test_file_tells_of_every_rank_while_the_job_runs_and_of_its_end(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = tmp_path / "job.prom"
    options = ["--worker_num=2", "--max_restarts=1", f"--metrics_file={path}"]
    job = msrun.start(*options, "train.py", cwd=tmp_path)
    wait_until(lambda: {("msrun_worker_step", "0"), ("msrun_worker_step", "1")} <= read(path).keys(), "both ranks")
    running = read(path)
    assert (running["msrun_workers", "running"], running["msrun_restarts_total", ""]) == (2, 1)
    assert (running["msrun_job_running", ""], ("msrun_job_exit_code", "") in running) == (1, False)
    for rank in "01":
        assert running["msrun_worker_step", rank] == 7
        assert running["msrun_worker_loss", rank] == 0.5
        assert running["msrun_worker_memory_bytes", rank] > 1 << 20
        assert 0 <= running["msrun_worker_last_progress_age_seconds", rank] < 60
        assert running["msrun_worker_steps_per_second", rank] > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # the exporter is another user
    (tmp_path / "go").touch()
    assert job.finish().code == 5
    ended = read(path)
    assert (ended["msrun_job_running", ""], ended["msrun_job_exit_code", ""]) == (0, 5)
    assert (ended["msrun_workers", "failed"], ended["msrun_workers", "running"]) == (1, 0)
    assert not [name for name, _ in ended if name.startswith("msrun_worker_")]
    assert [entry.name for entry in tmp_path.glob("*.prom*")] == ["job.prom"]
    assert not list(tmp_path.glob(".*"))


def test_file_that_cannot_be_written_is_an_error_before_anything_starts(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    finished = msrun.run("--worker_num=1", "--metrics_file=nowhere/job.prom", "train.py", cwd=tmp_path)
    assert finished.code == 2
    assert finished.stderr.splitlines()[-1] == (
        f"msrun: error: --metrics_file {tmp_path}/nowhere/job.prom: cannot be written (No such file or directory); "
        "give a file in a directory that you may write"
    )
    assert not (tmp_path / "started").exists()


def test_odd_labels_and_numbers_come_through() -> None:
    odd = 'a "b" \\ \n c'
    samples = [({"log_dir": odd, "rank": str(rank)}, value) for rank, value in enumerate((1, 0.5, float("nan"), 1e300))]
    [family] = parser.text_string_to_metric_families(
        render_families([Family("x", "gauge", "help", samples), Family("none", "gauge", "help", [])])
    )
    assert [sample.labels["log_dir"] for sample in family.samples] == [odd] * 4
    assert [str(float(sample.value)) for sample in family.samples] == ["1.0", "0.5", "nan", "1e+300"]
