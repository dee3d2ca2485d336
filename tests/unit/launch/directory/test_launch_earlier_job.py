"""What goes from a log directory when the next job takes it, and that nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun import contract
from msrun.launch.directory.log_directory import log_of, remove_earlier_job

FOREIGN = ["notes.txt", "worker_3.txt", "worker_3.log.gz", "worker_9.log", "other_3.attempt_0.log", "ckpt_3.log.d"]


def write_plan(folder: Path, names: list[str], **changes: Any) -> None:
    """Write the plan of an earlier job whose workers had these logs, in the directory as it was called then."""
    workers = [
        {"global_rank": int(name.removesuffix(".log").rpartition("_")[2]), "log": f"/elsewhere/{name}"}
        for name in names
    ]
    plan = {"job_id": "a", "run_dir": "/r", "hosts": [{"name": "h", "workers": workers}], **changes}
    (folder / contract.PLAN_JSON).write_text(json.dumps(plan))


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("old")


def left_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) - {contract.PLAN_JSON}


def test_logs_of_a_bigger_job_go_with_their_attempts_and_rotated_files_and_nothing_else(tmp_path: Path) -> None:
    write_plan(tmp_path, ["worker_0.log", "worker_3.log"])
    earlier = ["worker_3.log", "worker_3.log.1", "worker_3.attempt_0.log", "worker_3.attempt_12.log.2", "msrun.log"]
    earlier += ["worker_0.attempt_0.log", "worker_0.log.10", "scheduler.log.1", "scheduler.attempt_0.log"]
    fill(tmp_path, *earlier, "worker_0.log", "scheduler.log", *FOREIGN)
    remove_earlier_job(tmp_path, {"worker_0.log", "scheduler.log"})
    assert left_in(tmp_path) == {"worker_0.log", "scheduler.log", *FOREIGN}


def test_logs_of_ranks_that_a_job_had_before_it_lost_hosts_go_too(tmp_path: Path) -> None:
    write_plan(tmp_path, ["worker_0.log", "worker_3.log"])
    plan = json.loads((tmp_path / contract.PLAN_JSON).read_text())
    plan["hosts"][0]["servers"] = [{"index": 0}, {"index": 1}]
    (tmp_path / contract.PLAN_JSON).write_text(json.dumps(plan))
    (tmp_path / contract.PLAN_JSON).rename(tmp_path / contract.attempt_plan_name(0))
    write_plan(tmp_path, ["worker_0.log"])
    earlier = ["worker_3.attempt_0.log", "worker_3.attempt_0.log.1", "trace_3.jsonl.attempt_0.log"]
    foreign = {*FOREIGN, "plan.attempt_00.json", "plan.attempt_x.json"}
    fill(tmp_path, *earlier, "worker_0.attempt_0.log", "server_1.attempt_0.log", "worker_0.log", *foreign)
    remove_earlier_job(tmp_path, {"worker_0.log"})
    assert left_in(tmp_path) == {"worker_0.log", *foreign}


def test_logs_of_another_name_go_too(tmp_path: Path) -> None:
    write_plan(tmp_path, ["w-127.0.0.1-host_0.log"])
    fill(tmp_path, "w-127.0.0.1-host_0.log", "w-127.0.0.1-host_0.attempt_1.log", "w-127_0.log")
    remove_earlier_job(tmp_path, {"worker_0.log"})
    assert left_in(tmp_path) == {"w-127_0.log"}


@pytest.mark.parametrize("plan", [None, "", "{", "[]", '{"job_id": "a"}', '{"job_id": 1, "run_dir": "r"}', "\udcff"])
def test_without_a_readable_plan_nothing_goes(tmp_path: Path, plan: str | None) -> None:
    names = {"worker_0.log", "worker_0.log.1", "msrun.log", *FOREIGN}
    fill(tmp_path, *names)
    if plan is not None:
        (tmp_path / contract.PLAN_JSON).write_bytes(plan.encode("utf-8", "surrogateescape"))
    remove_earlier_job(tmp_path, set())
    assert left_in(tmp_path) == names


def test_a_plan_cannot_name_what_is_no_workers_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    fill(tmp_path, "outside_0.log")
    fill(tmp_path / "logs", "train.py", "data.log", "_0")
    logs = ["train.py", "data.log", "../outside_0.log", "_0", "\0_0.log", "", ".", "..", "/", 5, None]
    hosts: list[Any] = [{"workers": [{"global_rank": 0, "log": log} for log in logs]}, {"workers": 5}, "h", None]
    write_plan(tmp_path / "logs", [], hosts=hosts)
    remove_earlier_job(tmp_path / "logs", set())
    assert left_in(tmp_path / "logs") == {"train.py", "data.log", "_0"}
    assert (tmp_path / "outside_0.log").exists()


def test_links_and_folders_of_a_logs_name_stay(tmp_path: Path) -> None:
    write_plan(tmp_path, ["worker_0.log", "worker_1.log"])
    fill(tmp_path, "target")
    (tmp_path / "worker_0.log").symlink_to(tmp_path / "target")
    (tmp_path / "worker_1.log").mkdir()
    remove_earlier_job(tmp_path, set())
    assert left_in(tmp_path) == {"target", "worker_0.log", "worker_1.log"}


@given(st.from_regex(r"[a-z._{}-]{1,8}_[0-9]{1,3}\.log", fullmatch=True), st.integers(0, 99), st.integers(1, 9))
def test_every_file_that_a_log_becomes_is_known_as_its(name: str, attempt: int, number: int) -> None:
    kept = contract.attempt_log_name(name, attempt)
    assert log_of(name) == log_of(f"{name}.{number}") == log_of(kept) == log_of(f"{kept}.{number}") == name
