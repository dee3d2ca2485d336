"""A disk that is full, on a real file system of one megabyte: said clearly, and nobody hangs."""

from __future__ import annotations

import os
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
    assert f"the disk of its log is full ({finished.log_dir}): make room, or give another --log_dir" in line
    assert f"{finished.log_dir}/failure.json could not be written (No space left on device)" in finished.stderr
    assert not list(finished.log_dir.glob(".failure.json*"))
    assert len(finished.log(1)) > 500_000


def test_folder_for_temporary_files_on_a_disk_without_room_for_the_workers_records_is_named(
    msrun: JobRunner, workers: Path, tmp_path: Path, small_disk: Path
) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    room = os.statvfs(small_disk).f_bavail * page
    (small_disk / "filler").write_bytes(b"x" * (room - page))  # for one page, and 64 records take two
    finished = msrun.run(
        "--worker_num=64", workers / "end.py", "all", "0", cwd=tmp_path, env={"TMPDIR": str(small_disk)}
    )
    assert finished.code == 3
    (line,) = finished.errors
    assert f"cannot make {small_disk}/msrun-" in line
    assert "No space left on device; set TMPDIR to another folder" in line


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
