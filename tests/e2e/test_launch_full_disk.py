"""A disk that is full, on a real file system of one megabyte: said clearly, and nobody hangs."""

from __future__ import annotations

from pathlib import Path

from job_runner import JobRunner


def test_worker_that_fills_the_disk_of_the_logs_fails_and_is_reported(
    msrun: JobRunner, tmp_path: Path, small_disk: Path
) -> None:
    (tmp_path / "w.py").write_text(
        "import os, time\nif os.environ['RANK'] == '0': time.sleep(600)\nwhile True: print('x' * 1000)\n"
    )
    log_dir = str(small_disk / "logs")
    options = ("--worker_num=2", f"--log_dir={log_dir}", "--tail_worker_log=none")
    finished = msrun.run(*options, "w.py", cwd=tmp_path, log_dir=log_dir)
    assert finished.code != 0
    (line,) = finished.errors
    assert "rank 1 on " in line and "failed first: exit code 1" in line
    assert len(finished.log(1)) > 500_000


def test_log_directory_on_a_full_disk_is_refused_before_anything_starts(
    msrun: JobRunner, workers: Path, tmp_path: Path, small_disk: Path
) -> None:
    (small_disk / "filler").write_bytes(b"x" * (1 << 20))
    finished = msrun.run(
        f"--log_dir={small_disk / 'logs'}",
        workers / "end.py",
        "all",
        "0",
        cwd=tmp_path,
        log_dir=str(small_disk / "logs"),
    )
    assert finished.code in (2, 3)
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"msrun: error: --log_dir {small_disk / 'logs'}")
    assert not (small_disk / "logs" / "worker_0.log").exists()
