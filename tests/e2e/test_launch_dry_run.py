"""--dry_run touches nothing and prints exactly the plan that a run carries out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from asked_cases import one_fast
from job_runner import JobRunner

OPTIONS = ["--worker_num=3", "--env", "API_KEY=hidden", "--env", "A=b c", "--tail_worker_log=0,2", "--grace=2.5"]


def snapshot(*folders: Path) -> list[tuple[str, int, int]]:
    """Return every entry below these folders with size and time of change."""
    found = []
    for folder in folders:
        for root, names, files in os.walk(folder):
            for name in [*names, *files]:
                status = os.lstat(os.path.join(root, name))
                found.append((os.path.join(root, name), status.st_size, status.st_mtime_ns))
    return sorted(found)


@pytest.mark.parametrize("form", one_fast("--dry_run", "--dry-run", "--dry_run=text", "--dry_run=json"))
def test_dry_run_touches_nothing(msrun: JobRunner, workers: Path, odd_path: Path, form: str) -> None:
    (odd_path / "train.py").write_bytes((workers / "record.py").read_bytes())
    before = snapshot(odd_path)
    finished = msrun.run(*OPTIONS, form, "train.py", "--lr", "0.1", cwd=odd_path)
    assert finished.code == 0, finished.stderr
    assert finished.stderr == ""
    assert finished.stdout
    assert snapshot(odd_path) == before
    assert b"hidden" not in finished.stdout


def test_dry_run_opens_no_socket(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    hook = (
        "import sys\n"
        "def hook(event, args):\n"
        "    if event in ('socket.bind', 'socket.connect', 'subprocess.Popen', 'os.fork', 'os.exec',\n"
        "                 'tempfile.mkdtemp', 'os.mkdir'):\n"
        "        raise SystemExit(f'{event} in a dry run')\n"
        "sys.addaudithook(hook)\n"
        "from msrun.cli import main\n"
        "main()\n"
    )
    finished = msrun.run(
        "--dry_run", "--worker_num=2", workers / "all_reduce.py", cwd=tmp_path, command=[sys.executable, "-c", hook]
    )
    assert finished.code == 0, finished.stderr


def test_dry_run_is_the_plan_of_the_run(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    script = [workers / "record.py", "--lr", "0.1"]
    dry = json.loads(msrun.run(*OPTIONS, "--dry_run=json", *script, cwd=tmp_path).stdout)
    finished = msrun.run(*OPTIONS, *script, cwd=tmp_path)
    real = finished.read_plan()

    def without_what_is_chosen_at_start(plan: dict[str, Any]) -> dict[str, Any]:
        env = plan["hosts"][0]["env"]
        job_id, run_dir, port = plan.pop("job_id"), plan.pop("run_dir"), plan["master"].pop("port")
        assert (env.pop("MSRUN_JOB_ID"), env.pop("TORCHELASTIC_RUN_ID")) == (job_id, job_id)
        assert env.pop("MSRUN_RENDEZVOUS") == f"file://{run_dir}/store"
        assert env.pop("MSRUN_PROGRESS") == f"{run_dir}/progress"
        assert (env.pop("MASTER_PORT"), env.pop("MS_SCHED_PORT")) == (str(port), str(port))
        return plan

    assert without_what_is_chosen_at_start(dry) == without_what_is_chosen_at_start(real)


def test_two_dry_runs_print_the_same(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    texts = {msrun.run(*OPTIONS, "--dry_run", workers / "record.py", cwd=tmp_path).stdout for _ in range(2)}
    assert len(texts) == 1


def test_text_names_ranks_logs_command_and_environment(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    text = msrun.run(*OPTIONS, "--dry_run", workers / "record.py", "a b", cwd=tmp_path).stdout.decode()
    assert f"{workers / 'record.py'} 'a b'" in text
    for rank in range(3):
        assert str(tmp_path / "log_output" / f"worker_{rank}.log") in text
    assert "A=b c" in text and "API_KEY=********" in text and "WORLD_SIZE=3" in text


@pytest.mark.slow
def test_bytes_that_are_no_text_can_be_printed(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run("--dry_run", workers / "record.py", b"\xff", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert b"\xff" in finished.stdout
    finished = msrun.run("--dry_run=json", workers / "record.py", b"\xff", cwd=tmp_path)
    assert json.loads(finished.stdout)["hosts"][0]["program"]["args"] == ["\udcff"]
