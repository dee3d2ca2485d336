"""Jobs on shared memory whose ranks are killed at random: the first failure is named, and nothing is left.

MSRUN_CHAOS_SEED=N repeats a run, a failure names it; MSRUN_CHAOS_CASES=N kills more jobs, or fewer.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from signal import Signals

import pytest
from job_runner import JobRunner

CASES = int(os.environ.get("MSRUN_CHAOS_CASES") or 20) // 5
SEED = int(os.environ.get("MSRUN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
LIMIT_S = 30.0

pytestmark = pytest.mark.timeout(CASES * 20 + 60)


@pytest.mark.parametrize(
    "cases", [range(1), pytest.param(range(1, CASES), marks=pytest.mark.slow)], ids=["1", "others"]
)
def test_killed_rank_is_the_first_failure_and_nothing_is_left(
    msrun: JobRunner, workers: Path, tmp_path: Path, cases: range
) -> None:
    for case in cases:
        draw = random.Random(f"{SEED}-{case}")
        size = draw.choice([2, 3, 4, 8])
        rank, killer = draw.randrange(size), draw.choice([Signals.SIGKILL, Signals.SIGKILL, Signals.SIGSEGV])
        folder = tmp_path / f"{case}"
        folder.mkdir()
        options = [f"--worker_num={size}", "--tail_worker_log=none", "--grace=1", "--preload=msrun.runtime.shm"]
        job = msrun.start(*options, workers / "runtime" / "shm_busy.py", folder, cwd=folder)
        job.wait_for(*(folder / f"ready_{other}" for other in range(size)))
        time.sleep(draw.uniform(0, 0.3))
        pid = job.pid_of(str(rank))
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "memfd:msrun-shm" in mapped
        assert "/dev/shm/" not in mapped, "memory that has a name outlives its processes"
        os.kill(pid, killer)
        finished = job.finish(LIMIT_S)
        story = f"MSRUN_CHAOS_SEED={SEED}, case {case}: {killer.name} for rank {rank} of {size}\n{finished.stderr}"
        assert finished.code == 128 + killer, story
        first = finished.read_json("failure.json")["first_failure"]
        assert (first["global_rank"], first["signal"]) == (rank, killer.name), story
        msrun.prove_nothing_left(deadline_s=1.0)
