"""The log directory: every byte of every worker, private files, the record of the job, what the console shows."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import Finished, JobRunner

LINES = 3000


def expected_log(rank: int, count: int = LINES) -> bytes:
    """Return what flood.py writes to its one file, stdout and stderr in the order of their writing."""
    lines = "".join(f"rank {rank} line {number} {'x' * (number % 97)}\n" for number in range(count)).encode()
    return lines + bytes(range(256)) + "ünïcode ☃ on stderr\n".encode() + b"no end of line"


@pytest.fixture(scope="module", params=one_fast("fork", "exec"))
def flooded(
    msrun_of_module: JobRunner,
    workers: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Finished:
    cwd = tmp_path_factory.mktemp("flood")
    options = ["--worker_num=3", "--start_method", request.param, "--tail_worker_log=2", "--raw"]
    finished = msrun_of_module.run(*options, workers / "flood.py", str(LINES), cwd=cwd, env={"PYTHONUTF8": "1"})
    assert finished.code == 0, finished.stderr
    return finished


def test_every_byte_of_every_worker_is_in_its_log(flooded: Finished) -> None:
    for rank in range(3):
        assert flooded.log(rank) == expected_log(rank)


@pytest.mark.slow
def test_a_million_lines_of_each_worker_are_in_its_log(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run("--worker_num=2", workers / "flood.py", "1000000", cwd=tmp_path, env={"PYTHONUTF8": "1"})
    assert finished.code == 0, finished.stderr
    for rank in range(2):
        assert finished.log(rank) == expected_log(rank, 1_000_000)


def test_raw_console_shows_the_bytes_of_the_chosen_rank_only(flooded: Finished) -> None:
    assert flooded.stdout == expected_log(2)
    assert "rank 2 line" not in flooded.stderr


def test_directory_holds_the_files_of_the_contract_and_is_private(flooded: Finished) -> None:
    names = {"events.jsonl", "job.lock", "plan.json", "rank_table.json", "scheduler.log"}
    names |= {f"worker_{rank}.log" for rank in range(3)}
    assert set(os.listdir(flooded.log_dir)) == names
    assert stat.S_IMODE(flooded.log_dir.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in flooded.log_dir.iterdir()} == {0o600}


def test_events_tell_the_whole_job_in_order(flooded: Finished) -> None:
    events = [event["event"] for event in flooded.events]
    assert events[:2] == ["preparing", "ready"]
    assert sorted(events[2:]) == sorted(["scheduler", *["started"] * 3, "running", *["exited"] * 3, "over"])
    assert events.index("running") < events.index("exited")
    assert events[-1] == "over"
    times = [event["job_s"] for event in flooded.events]
    assert times == sorted(times)
    assert {event["state"] for event in flooded.events if event["event"] == "exited"} == {"done"}


def test_scheduler_log_tells_who_came_and_how_they_ended(flooded: Finished) -> None:
    text = (flooded.log_dir / "scheduler.log").read_text()
    assert f"job {flooded.read_json('plan.json')['job_id']}: 3 workers on" in text
    for rank in range(3):
        assert f"rank {rank} registered: pid " in text
        assert f"rank {rank} ended: exit code 0" in text
    assert "3 of 3" in text
    assert text.splitlines()[-2].endswith("job over: all workers ended with exit code 0")


def test_rank_table_is_of_this_job_and_valid(flooded: Finished) -> None:
    from ranktable import read_table, validate_table

    table = read_table(flooded.log_dir / "rank_table.json")
    assert table.world_size == 3
    assert [p for p in validate_table(table, device_target="cpu") if p.severity == "error"] == []


@pytest.mark.slow
def test_scheduler_log_of_a_failed_job_tells_who_failed(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run("--worker_num=2", workers / "end.py", "1", "4", cwd=tmp_path)
    text = (finished.log_dir / "scheduler.log").read_text()
    assert "rank 1 ended: exit code 4" in text
    assert "stopping the job: rank 1 ended with exit code 4" in text
    assert "rank 0 ended: signal SIGTERM" in text
    assert text.splitlines()[-2].endswith("job over: rank 1 failed first: exit code 4")


def test_several_tailed_ranks_have_host_and_rank_in_front_and_whole_lines(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    finished = msrun.run("--worker_num=2", "--tail_worker_log=all", workers / "flood.py", "2000", cwd=tmp_path)
    host = socket.gethostname()
    by_rank: dict[bytes, list[bytes]] = {f"[{host}:{rank}]".encode(): [] for rank in (0, 1)}
    for line in finished.stdout.splitlines():
        head, _, rest = line.partition(b" ")
        if rest.startswith(b"rank "):
            by_rank[head].append(rest)
    for rank in (0, 1):
        expected = [f"rank {rank} line {number} {'x' * (number % 97)}".encode() for number in range(2000)]
        assert by_rank[f"[{host}:{rank}]".encode()] == expected


@pytest.mark.slow
def test_nothing_is_tailed_when_none_is_asked_for(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run("--worker_num=1", "--tail_worker_log=none", workers / "end.py", "all", "0", cwd=tmp_path)
    assert finished.stdout == b""
    assert finished.log(0) == b"rank 0 begins\n"


def test_quiet_says_nothing_but_errors(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    assert msrun.run("--quiet", "--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path).stderr == ""
    failed = msrun.run("--quiet", "--worker_num=1", workers / "end.py", "all", "3", cwd=tmp_path)
    assert failed.stderr.startswith("msrun: error: rank 0 on ")


@pytest.mark.slow
def test_log_name_takes_stem_and_placeholders(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run(
        "--worker_num=1", "--worker_log_name=w-{ip}-{hostname}", workers / "end.py", "all", "0", cwd=tmp_path
    )
    name = f"w-127.0.0.1-{os.uname().nodename}_0.log"
    assert (finished.log_dir / name).read_text() == "rank 0 begins\n"


@pytest.mark.slow
def test_second_job_in_the_same_directory_starts_with_empty_logs(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        finished = msrun.run("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path)
        assert finished.log(0) == b"rank 0 begins\n"
        assert [event["event"] for event in finished.events].count("over") == 1


@pytest.mark.slow
def test_two_jobs_side_by_side_with_logs_of_their_own_do_not_meet(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    jobs = []
    for name in ("one", "two"):
        (tmp_path / f"records_{name}").mkdir()
        env = {"RECORD_DIR": f"records_{name}"}
        options = ["--worker_num=2", f"--log_dir={name}"]
        jobs.append(msrun.start(*options, workers / "record.py", cwd=tmp_path, env=env, log_dir=name))
    finished = [job.finish() for job in jobs]
    assert [job.code for job in finished] == [0, 0]
    plans = [job.read_json("plan.json") for job in finished]
    for key in ("job_id", "run_dir", "log_dir"):
        assert plans[0][key] != plans[1][key]
    assert plans[0]["master"]["port"] != plans[1]["master"]["port"]
    for name, plan in zip(("one", "two"), plans, strict=True):
        for rank in (0, 1):
            env = json.loads((tmp_path / f"records_{name}" / f"record_{rank}.json").read_text())["env"]
            assert (env["MSRUN_JOB_ID"], env["RANK"]) == (plan["job_id"], str(rank))


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
@pytest.mark.parametrize(("options", "is_lost"), [((), False), (("--env=PYTHONUNBUFFERED=",), True)])
def test_last_line_of_a_worker_that_ends_hard_is_there_unless_blocks_were_asked_for(
    msrun: JobRunner, tmp_path: Path, method: str, options: tuple[str, ...], is_lost: bool
) -> None:
    (tmp_path / "w.py").write_text("import os\nprint('the last line')\nos._exit(0)\n")
    finished = msrun.run("--worker_num=1", f"--start_method={method}", *options, "w.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert finished.log(0) == (b"" if is_lost else b"the last line\n")


@pytest.mark.slow
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_lines_written_in_blocks_are_all_there_at_the_end(msrun: JobRunner, tmp_path: Path, method: str) -> None:
    (tmp_path / "w.py").write_text("for number in range(20000): print('line', number)\n")
    options = ("--worker_num=2", f"--start_method={method}", "--env=PYTHONUNBUFFERED=", "--tail_worker_log=none")
    finished = msrun.run(*options, "w.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert finished.log(1).decode().splitlines() == [f"line {number}" for number in range(20000)]
