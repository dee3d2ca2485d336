"""The jobs of a log directory: what has a name there, and what goes when there are too many."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun import contract
from msrun.launch.directory.log_directory import find_job, list_jobs, log_of, publish

OLD, NEW = "20261127-205806-3f2a9c1b", "20261127-205807-00000000"
FOREIGN = ["notes.txt", "worker_3.txt", "worker_3.log.gz", "worker_9.log", "other_3.attempt_0.log", "ckpt_3.log.d"]


def make_job(root, job_id, names, **changes):
    """Write the folder of a job whose workers had these logs, in the directory as it was called then."""
    folder = root / job_id
    folder.mkdir(parents=True)
    workers = [
        {"global_rank": int(name.removesuffix(".log").rpartition("_")[2]), "log": f"/elsewhere/{name}"}
        for name in names
    ]
    plan = {"job_id": "a", "run_dir": "/r", "hosts": [{"name": "h", "workers": workers}], **changes}
    (folder / contract.PLAN_JSON).write_text(json.dumps(plan))
    (folder / contract.LOCK_FILE).write_text('{"job_id": "a", "pid": 1, "host": "h", "started_at": 0}\n')
    return folder


def fill(folder, *names):
    for name in names:
        (folder / name).write_text("old")


def start_next(root, keep_jobs=1):
    (root / NEW).mkdir()
    publish(root / NEW, NEW, ["/elsewhere/worker_0.log"], keep_jobs)


def test_files_of_the_latest_job_have_their_names_in_the_log_directory(tmp_path):
    old = make_job(tmp_path, OLD, ["worker_0.log", "worker_1.log"])
    fill(old, "worker_0.log", "worker_1.log", "failure.json")
    publish(old, OLD, ["worker_0.log", "worker_1.log"], 10)
    names = {"latest", "plan.json", "failure.json", "worker_0.log", "worker_1.log"}
    assert {path.name for path in tmp_path.iterdir()} - {OLD} == names
    start_next(tmp_path, keep_jobs=10)
    assert (tmp_path / "latest").readlink() == Path(NEW)
    assert set(os.listdir(tmp_path)) == {OLD, NEW, "latest", "worker_0.log"}
    assert find_job(tmp_path) == find_job(tmp_path / "latest") == tmp_path / NEW
    assert find_job(old) == old
    assert list_jobs(tmp_path) == [old, tmp_path / NEW]


def test_a_file_of_an_earlier_launcher_gives_way_to_a_link_and_a_folder_does_not(tmp_path):
    fill(tmp_path, "worker_0.log")
    (tmp_path / "latest").mkdir()
    start_next(tmp_path)
    assert not (tmp_path / "latest").is_symlink()
    assert (tmp_path / "worker_0.log").read_text() == "old"  # without `latest` there is nothing that it could name
    assert find_job(tmp_path) == tmp_path / NEW
    (tmp_path / "latest").rmdir()
    publish(tmp_path / NEW, NEW, ["worker_0.log"], 1)
    assert (tmp_path / "worker_0.log").is_symlink()


def test_a_link_that_cannot_be_moved_into_place_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: os.listdir(tmp_path / "gone"))
    start_next(tmp_path)
    assert os.listdir(tmp_path) == [NEW]


def test_a_link_that_leads_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "elsewhere")
    assert find_job(tmp_path) == tmp_path
    os.mkfifo(tmp_path / "worker_0.log")
    start_next(tmp_path)
    assert find_job(tmp_path) == tmp_path / NEW and (tmp_path / "worker_0.log").is_fifo(), "nor is a pipe replaced"


def test_a_hosts_own_folder_has_its_name_in_the_log_directory_too(tmp_path):
    (tmp_path / NEW / "node_1").mkdir(parents=True)
    publish(tmp_path / NEW / "node_1", NEW, ["worker_4.log"], 10)
    assert {path.name: str(path.readlink()) for path in tmp_path.iterdir() if path.is_symlink()} == {
        "latest": NEW,
        "node_1": "latest/node_1",
    }


def test_a_folder_that_is_no_jobs_own_is_left_alone(tmp_path):
    (tmp_path / "spool").mkdir()
    publish(tmp_path / "spool", NEW, ["worker_0.log"], 1)
    assert os.listdir(tmp_path) == ["spool"]


def test_jobs_that_are_too_many_go_with_their_attempts_and_rotated_files_and_nothing_else(tmp_path):
    old = make_job(tmp_path, OLD, ["worker_0.log", "worker_3.log"], hosts=[])
    plan = json.loads((old / contract.PLAN_JSON).read_text())
    workers = [{"global_rank": rank, "log": f"/elsewhere/worker_{rank}.log"} for rank in (0, 3)]
    plan["hosts"] = [{"name": "h", "workers": workers, "servers": [{"index": 0}, {"index": 1}]}]
    (old / contract.attempt_plan_name(0)).write_text(json.dumps(plan))
    ours = ["worker_3.log", "worker_3.log.1", "worker_3.attempt_0.log", "worker_3.attempt_12.log.2", "msrun.log"]
    ours += ["worker_0.attempt_0.log", "worker_0.log.10", "scheduler.log.1", "scheduler.attempt_0.log"]
    ours += ["server_1.attempt_0.log", "trace_3.jsonl.attempt_0.log", "trace_0.jsonl", "failure.json", "events.jsonl"]
    fill(old, *ours, *FOREIGN)
    start_next(tmp_path)
    assert set(os.listdir(old)) == set(FOREIGN)


def test_a_job_whose_folder_holds_nothing_else_goes_as_a_whole_with_the_parts_of_its_hosts(tmp_path):
    old = make_job(tmp_path, OLD, ["w-127.0.0.1-host_0.log"])
    fill(old, "w-127.0.0.1-host_0.log", "w-127.0.0.1-host_0.attempt_1.log")
    fill(make_job(old, "node_1", ["worker_3.log"]), "worker_3.log", "scheduler.log")
    start_next(tmp_path)
    assert not old.exists()
    assert list_jobs(tmp_path) == [tmp_path / NEW]


def test_as_many_jobs_stay_as_are_asked_for(tmp_path):
    for second in range(10, 16):
        make_job(tmp_path, f"20261127-2058{second}-00000000", [])
    (tmp_path / "20261127-2058").mkdir()
    last = "20261127-205815-00000000"
    publish(tmp_path / last, last, (), 3)
    assert [path.name[9:15] for path in list_jobs(tmp_path)] == ["205813", "205814", "205815"]
    assert (tmp_path / "20261127-2058").exists()


@pytest.mark.parametrize("plan", [None, "", "{", "[]", '{"job_id": "a"}', '{"job_id": 1, "run_dir": "r"}', "\udcff"])
def test_without_a_readable_plan_no_log_goes(tmp_path, plan):
    old = make_job(tmp_path, OLD, [])
    (old / contract.PLAN_JSON).unlink()
    names = {"worker_0.log", "worker_0.log.1", *FOREIGN}
    fill(old, *names)
    if plan is not None:
        (old / contract.PLAN_JSON).write_bytes(plan.encode("utf-8", "surrogateescape"))
    start_next(tmp_path)
    assert set(os.listdir(old)) == names


def test_a_plan_cannot_name_what_is_no_workers_log(tmp_path):
    logs = ["train.py", "data.log", "../outside_0.log", "_0", "\0_0.log", "", ".", "..", "/", 5, None]
    hosts = [{"workers": [{"global_rank": 0, "log": log} for log in logs]}, {"workers": 5}, "h", None]
    old = make_job(tmp_path, OLD, [], hosts=hosts)
    fill(tmp_path, "outside_0.log")
    fill(old, "train.py", "data.log", "_0")
    start_next(tmp_path)
    assert set(os.listdir(old)) == {"train.py", "data.log", "_0"}
    assert (tmp_path / "outside_0.log").exists()


def test_links_and_folders_of_a_logs_name_stay(tmp_path):
    old = make_job(tmp_path, OLD, ["worker_0.log", "worker_1.log"])
    fill(old, "target")
    (old / "worker_0.log").symlink_to(old / "target")
    (old / "worker_1.log").mkdir()
    start_next(tmp_path)
    assert set(os.listdir(old)) == {"target", "worker_0.log", "worker_1.log"}


@given(st.from_regex(r"[a-z._{}-]{1,8}_[0-9]{1,3}\.log", fullmatch=True), st.integers(0, 99), st.integers(1, 9))
def test_every_file_that_a_log_becomes_is_known_as_its(name, attempt, number):
    kept = contract.attempt_log_name(name, attempt)
    assert log_of(name) == log_of(f"{name}.{number}") == log_of(kept) == log_of(f"{kept}.{number}") == name
