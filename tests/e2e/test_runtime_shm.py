"""The backend shm: random programs give what they must, nobody waits for a rank that is gone, torch's own tests pass.

MSRUN_FUZZ_CASES and MSRUN_FUZZ_SEED (by default 6 and 1) say how many programs and which; MSRUN_CHAOS_SEED=N repeats
the jobs whose ranks are killed at random, MSRUN_CHAOS_CASES=N kills more of them, or fewer.
"""

import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from signal import Signals

import pytest
from host_net import HostNet
from job_runner import PRELOAD, REPOSITORY

PROGRAMS = int(os.environ.get("MSRUN_FUZZ_CASES", "6"))
SEED = int(os.environ.get("MSRUN_FUZZ_SEED", "1"))
PIDFD_OPEN, MEMFD_CREATE = 434, 319
DEADLINE_S = 60.0 + 5 * PROGRAMS
CHAOS_CASES = int(os.environ.get("MSRUN_CHAOS_CASES") or 20) // 5
CHAOS_SEED = int(os.environ.get("MSRUN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
SHARES = 12
REFUSED = ("monitored_barrier is only implemented for GLOO", "No backend type associated with device type cpu")
"""What torch says of `monitored_barrier`: its code takes it for gloo's alone, by the name of the backend."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.mark.parametrize("world_size", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_random_programs_give_what_every_rank_must_get(msrun, workers, tmp_path, world_size):
    worker = workers / "runtime" / "shm_programs.py"
    msrun.run_world(
        world_size, worker, tmp_path / "result.json", str(SEED), str(PROGRAMS), cwd=tmp_path, deadline_s=DEADLINE_S
    )
    assert json.loads((tmp_path / "result.json").read_text()) == []


@pytest.fixture(scope="module")
def net():
    """Two hosts."""
    with HostNet(2) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize("workers_of_hosts", [(2, 2), (3, 1)])
def test_random_programs_over_two_hosts(msrun, net, workers, tmp_path, workers_of_hosts):
    words = ["--worker_num=4", f"--master_addr={net.address(0)}", workers / "runtime" / "shm_programs.py"]
    words += [tmp_path / "result.json", str(SEED), str(PROGRAMS)]
    hosts = [
        msrun.start(
            f"--node_rank={node}",
            f"--local_worker_num={count}",
            *words,
            cwd=tmp_path,
            prefix=net.prefix(node),
            log_dir=f"log_output/node_{node}" if node else "log_output",
        )
        for node, count in enumerate(workers_of_hosts)
    ]
    assert [host.finish(DEADLINE_S).code for host in hosts] == [0, 0]
    assert json.loads((tmp_path / "result.json").read_text()) == []


def told_by(workers, folder, what, ranks):
    """Let ranks meet a failure; return what each was told, and after how long, None for one that is gone."""
    command = [sys.executable, str(workers / "runtime" / "shm_failures.py"), str(folder), what, str(ranks)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, check=True, timeout=60)
    paths = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


TOLD = [
    ("killed", (0, 1), "rank 2 has ended while rank {rank} waits for it in all_reduce of 3 ranks, 4000000 x"),
    ("killed_before_pending", (0, 1), "rank 2 has ended while rank {rank} waits for it in all_reduce of 3"),
    ("killed_before_message", (0, 1), "rank 2 has ended while rank {rank} waits for it in"),
    ("killed_before_turn", (2,), "rank 1 has ended while rank 2 waits for it in all_reduce of 3 ranks"),
    ("left", (0, 1), "rank 2 has left the group while rank {rank} waits for it in barrier"),
    ("other_operation", (0, 1), "rank {rank} all_reduce of 3 ranks, 3 x float32, rank 2 all_reduce of 3 ranks, 4 x"),
    ("own_time_out", (0, 1), "barrier of 3 ranks: Timed out after 0.2 s, waits for rank 2"),
    ("late", (0, 1), "all_reduce of 3 ranks, 4 x float32: Timed out after 0.2 s, waits for rank 2"),
    ("other_size_of_message", (0,), "rank 2 has sent 16 bytes with tag 0, and rank 0 waits for 12"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "ranks", "words"), TOLD, ids=[row[0] for row in TOLD])
def test_others_are_told_within_seconds(workers, tmp_path, what, ranks, words):
    found = told_by(workers, tmp_path, what, 3)
    for rank in ranks:
        texts, took = found[rank]
        assert words.format(rank=rank) in texts[0]
        assert took < 5
        assert what != "late" or len(texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sparse", "older_names", "inference", "busy_elsewhere"])
def test_what_torch_asks_of_gloo_is_done(workers, tmp_path, what):
    found = told_by(workers, tmp_path, what, 3)
    assert [texts for texts, _ in found] == [[]] * 3
    assert max(took for _, took in found) < 10


@pytest.mark.slow
@pytest.mark.parametrize(("call", "number", "rank"), [("pidfd_open", PIDFD_OPEN, 1), ("memfd_create", MEMFD_CREATE, 0)])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_job_that_may_not_share_memory_uses_gloo_and_says_so(msrun, workers, tmp_path, call, number, rank):
    job = msrun.start(
        "--worker_num=3", workers / "runtime" / "shm_forbidden.py", tmp_path, str(number), str(rank), cwd=tmp_path
    ).finish(DEADLINE_S)
    assert job.code == 0, job.stderr
    said = f"the backend shm cannot run here (rank {rank}: {call}: Operation not permitted): gloo is used"
    logs = [(tmp_path / "log_output" / f"worker_{other}.log").read_text().count(said) for other in range(3)]
    assert logs == [1, 0, 0]
    found = [json.loads((tmp_path / f"{other}.json").read_text()) for other in range(3)]
    assert found == [["gloo", [6.0] * 3], ["gloo", [6.0] * 3], ["gloo", [3.0] * 3]]


@pytest.mark.timeout(CHAOS_CASES * 20 + 60)
@pytest.mark.parametrize(
    "cases", [range(1), pytest.param(range(1, CHAOS_CASES), marks=pytest.mark.slow)], ids=["1", "others"]
)
def test_killed_rank_is_the_first_failure_and_nothing_is_left(msrun, workers, tmp_path, cases):
    for case in cases:
        draw = random.Random(f"{CHAOS_SEED}-{case}")
        size = draw.choice([2, 3, 4, 8])
        rank, killer = draw.randrange(size), draw.choice([Signals.SIGKILL, Signals.SIGKILL, Signals.SIGSEGV])
        folder = tmp_path / f"{case}"
        folder.mkdir()
        options = [f"--worker_num={size}", "--tail_worker_log=none", "--grace=1", *PRELOAD]
        job = msrun.start(*options, workers / "runtime" / "shm_busy.py", folder, cwd=folder, env=msrun.warm())
        job.wait_for_workers(size)
        time.sleep(draw.uniform(0, 0.3))
        pid = job.pid_of(str(rank))
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        assert any("memfd:msrun-shm" in line for line in mapped)
        named = [line for line in mapped if "/dev/shm/" in line and not line.endswith("(deleted)")]
        assert named == [], "memory that has a name outlives its processes"
        os.kill(pid, killer)
        finished = job.finish(30.0)
        story = (
            f"MSRUN_CHAOS_SEED={CHAOS_SEED}, case {case}: {killer.name} for rank {rank} of {size}\n{finished.stderr}"
        )
        assert finished.code == 128 + killer, story
        first = finished.read_json("failure.json")["first_failure"]
        assert (first["global_rank"], first["signal"]) == (rank, killer.name), story
        msrun.prove_nothing_left(deadline_s=1.0)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("share", range(SHARES))
def test_share_of_torchs_suite_passes(workers, tmp_path, share):
    result = tmp_path / "result.json"
    command = [sys.executable, str(workers / "runtime" / "torch_suite.py"), str(result), "4", f"{share}/{SHARES}"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, timeout=400, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(result.read_text())
    failed = {name: text for name, (outcome, text) in found.items() if outcome == "failed"}
    assert all("monitored_barrier" in name and any(words in text for words in REFUSED) for name, text in failed.items())
    assert sum(outcome == "passed" for outcome, _ in found.values()) >= 3
