"""Limits that a job runs into while it runs, of the kernel, a disk or its time: named with their remedy."""

import json
import re
import signal
import sys
import uuid
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import PRELOAD, WORKERS


@pytest.mark.slow
def test_msrun_raises_its_own_limit_and_workers_keep_that_of_the_user(msrun, tmp_path):
    """40 workers need more descriptors than they may have themselves."""
    program = tmp_path / "limit.py"
    program.write_text("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    few = ["prlimit", "--nofile=64:200"]
    job = msrun.run("--worker_num=40", program, cwd=tmp_path, prefix=few)
    assert job.code == 0, job.stderr
    assert {job.log(rank) for rank in range(40)} == {b"(64, 200)\n"}


@pytest.mark.slow
def test_job_runs_with_more_inherited_descriptors_than_select_can_take(msrun, tmp_path):
    many = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "for _ in range(1100): os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    finished = msrun.run("--worker_num=1", "true", cwd=tmp_path, prefix=[sys.executable, "-c", many])
    assert finished.code == 0, finished.stderr


@pytest.mark.slow
def test_limit_on_address_space_that_ends_the_import_of_torch_is_named(msrun, tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    small = ["sh", "-c", 'ulimit -v 400000 && exec "$@"', "sh"]
    finished = msrun.run("--worker_num=1", "--max_restarts=3", "train.py", cwd=tmp_path, prefix=small)
    assert finished.code != 0
    words = "ulimit -v 400000: it may have 400000 KiB of address space; raise the limit (RLIMIT_AS)"
    assert words in finished.stderr, finished.stderr
    assert "restart 1" not in finished.stderr, "it would end in the same way"


@pytest.mark.slow
def test_limit_on_cpu_time_is_named(msrun, tmp_path):
    short = ["sh", "-c", 'ulimit -t 2 && exec "$@"', "sh"]
    finished = msrun.run("--worker_num=1", "sh", "-c", "while :; do :; done", cwd=tmp_path, prefix=short)
    assert finished.code in (137, 152)
    assert "ulimit -t 2: it may use 2 s of CPU time; raise the limit (RLIMIT_CPU)" in finished.errors[0]


LIMIT_BYTES = 192 << 20
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")

GREEDY = """
import os, pathlib, time
if os.environ["RANK"] != "1":
    time.sleep(600)
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
print("rank 1 takes what it can get", flush=True)
held = []
while True:
    held.append(bytearray(b"x") * (16 << 20))
"""


@pytest.fixture
def join_file():
    """The file of a new cgroup of limited memory that a process writes its pid to; the cgroup goes afterwards."""
    is_v1 = (V1 / "memory.limit_in_bytes").exists()
    folder = (V1 if is_v1 else V2) / f"msrun-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder / "cgroup.procs"
    folder.rmdir()


@pytest.mark.slow
def test_worker_killed_for_its_memory_is_said_to_be(msrun, tmp_path, join_file):
    (tmp_path / "w.py").write_text(GREEDY)
    prefix = ("sh", "-c", f'echo $$ > {join_file} && exec "$@"', "sh")
    finished = msrun.run("--worker_num=2", "--start_method=exec", "w.py", cwd=tmp_path, prefix=prefix)
    assert finished.code == 128 + signal.SIGKILL, finished.stderr
    first = finished.read_json("failure.json")["first_failure"]
    assert (first["global_rank"], first["signal"]) == (1, "SIGKILL")
    assert "out of memory" in first["hint"]
    assert first["hint"] in finished.errors[0]
    assert first["excerpt"] == ["rank 1 takes what it can get"]


@pytest.mark.parametrize(("where", "limit_s"), one_fast(("--worker_num=2", 3), ("--rehearse=2x1", 8)))
def test_workers_get_term_and_the_job_ends_with_124(msrun, tmp_path, where, limit_s):
    ended = msrun.run(where, f"--time_limit={limit_s}", WORKERS / "save_when_ended.py", "SIGTERM", cwd=tmp_path)
    assert ended.code == 124, ended.stderr
    assert f"stopped by --time_limit: the job has run for {limit_s} s" in ended.stderr
    assert all(ended.log(rank).startswith(b"saved after SIGTERM\n") for rank in (0, 1))


@pytest.mark.slow
def test_the_time_of_earlier_attempts_counts_and_no_attempt_follows(msrun, tmp_path):
    words = ["--worker_num=1", "--time_limit=3", "--max_restarts=3", "--restart_on=1"]
    ended = msrun.run(*words, WORKERS / "save_when_ended.py", "SIGTERM", "fail", cwd=tmp_path)
    assert ended.code == 124, ended.stderr
    assert ended.log(0).startswith(b"saved after SIGTERM\n")
    assert len(list(ended.log_dir.glob("worker_0.attempt_*.log"))) == 1


def test_worker_that_fills_the_disk_of_the_logs_is_reported(msrun, tmp_path, small_disk):
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


def test_log_directory_on_a_full_disk_is_refused_at_once(msrun, tmp_path, small_disk):
    (small_disk / "filler").write_bytes(b"x" * (1 << 20))
    log_dir = str(small_disk / "logs")
    words = (f"--log_dir={log_dir}", WORKERS / "end.py", "all", "0")
    finished = msrun.run(*words, cwd=tmp_path, log_dir=log_dir)
    assert finished.code in (2, 3)
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"msrun: error: --log_dir {log_dir}")
    assert not (small_disk / "logs" / "worker_0.log").exists()


# -- jobs that get stuck: the ones that hold the others up named, everybody's stacks written --------------------------


def run_stuck(msrun, cwd, how, *options):
    words = ("--worker_num=2", *PRELOAD, *options, WORKERS / "runtime" / "stuck.py", how)
    return msrun.run(*words, cwd=cwd, env=msrun.warm())


@pytest.mark.parametrize(
    ("how", "words"), one_fast(("sleep", "step 2"), ("spin", "step 2"), ("stop", "step 2, stopped by a signal"))
)
def test_rank_that_holds_others_up_is_named_with_its_step(msrun, tmp_path, how, words):
    finished = run_stuck(msrun, tmp_path, how, "--hang_time_out=3")
    assert finished.code == 124, finished.stderr
    (line,) = finished.errors
    assert re.search(r"--hang_time_out 3: no progress for [3-9] s; behind: rank 1 \(" + words + r"\)", line), line
    assert re.search(r"; rank 0 \(step 3, waits in \w+ of 2 ranks", line), line
    lagging = finished.read_json("failure.json")["lagging"]
    assert [worker["global_rank"] for worker in lagging] == [1]
    assert "hold_the_others_up" in finished.log(1).decode()
    assert "hold_the_others_up" in finished.stderr, "its stack is part of the report"
    other = finished.log(0).decode()
    assert "stacks of all threads:" in other and "in wait" in other


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_silence_of_a_plain_script_is_found(msrun, tmp_path, method):
    (tmp_path / "w.py").write_text("import time\ndef asleep(): time.sleep(600)\nprint('begin', flush=True)\nasleep()\n")
    finished = msrun.run("--worker_num=2", f"--start_method={method}", "--hang_time_out=1", "w.py", cwd=tmp_path)
    assert finished.code == 124
    assert re.search("no progress for [1-9] s; running: ranks 0-1", finished.errors[0])
    expected = "in asleep" if method == "fork" else "cannot write its stacks; the kernel's view: sleeping"
    assert expected in finished.log(0).decode()
    assert expected in finished.log(1).decode()


@pytest.mark.parametrize("where", one_fast("--worker_num=3", "--rehearse=3x1"))
def test_torchs_flight_recorder_names_the_collective_that_one_rank_has_not_begun(msrun, tmp_path, where):
    script = WORKERS / "plain_stuck.py"
    warm = msrun.warm() if where == "--worker_num=3" else {}
    finished = msrun.run(where, *PRELOAD, "--hang_time_out=2", script, cwd=tmp_path, env=warm)
    assert finished.code == 124, finished.stderr
    if where == "--worker_num=3":
        held = 1 + script.read_text().splitlines().index("    time.sleep(600)")
        assert f"; behind: rank 1 (at plain_stuck.py:{held} in hold_the_others_up)" in finished.errors[0]
        assert re.search(r"; ranks 0, 2 \(waits in all_reduce at plain_stuck\.py:\d+ in step\)", finished.errors[0])
    dumps = [json.loads((finished.log_dir / f"flight_recorder_{rank}.json").read_text()) for rank in range(3)]
    newest = [dump["entries"][-1] for dump in dumps]
    assert [entry["retired"] for entry in newest] == [False, True, False]
    begun = newest[1]["collective_seq_id"]
    assert [entry["collective_seq_id"] for entry in newest] == [begun + 1, begun, begun + 1]


EARLY = r"rank 1 (exited early \(code 0\)|left the job early)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("leave", 1, rf"{EARLY}; rank 0 on \S+ then failed: exit code 1"),
        ("release", 1, r"rank 1 left the job early; rank 0 on \S+ then failed: exit code 1"),
    ],
)
def test_rank_that_leaves_while_others_need_it_is_named_and_not_called_a_hang(msrun, tmp_path, how, code, words):
    finished = run_stuck(msrun, tmp_path, how)
    assert finished.code == code, finished.stderr
    assert re.search(words, finished.errors[0])
