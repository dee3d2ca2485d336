"""Rehearsed jobs with a spare host that lose hosts, workers and their launcher at random.

They go on as long as hosts and restarts are left, and leave nothing. MSRUN_CHAOS_SEED=N repeats a run, a failure names
it; a quarter of MSRUN_CHAOS_CASES are run here.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from job_runner import JobRunner, Running, is_alive, wait_until
from rehearsal import Rehearsals

pytestmark = pytest.mark.slow

HOSTS, SPARES, RESTARTS = 4, 1, 3
ROUNDS_PER_TEST = 5
CASES = int(os.environ.get("MSRUN_CHAOS_CASES") or 40) // 4
SEED = int(os.environ.get("MSRUN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
PROGRAM = """\
import os, time
from pathlib import Path
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
path = Path(f"up_{attempt}_{rank}")
path.with_suffix(".new").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']}")
path.with_suffix(".new").rename(path)
while not Path("go").exists():
    time.sleep(0.01)
"""
STATUS = {"agent": 3, "worker": 137, "launcher": -9}


@dataclass(frozen=True)
class Hit:
    """What is killed in one attempt."""

    target: str
    which: float
    """The place among its like, 0 to 1."""
    delay_s: float


def plan_round(seed: str) -> list[Hit]:
    """Return what is killed, attempt by attempt. Pure: the same seed gives the same round."""
    draw = random.Random(seed)
    targets = draw.choices(("agent", "worker"), k=draw.randint(1, RESTARTS + 1))
    if draw.random() < 0.2:
        targets[-1] = "launcher"
    return [Hit(target, draw.random(), draw.uniform(0, 0.2)) for target in targets]


def started(rehearsals: Rehearsals, job: Running, attempt: int) -> list[int]:
    """Return the workers of an attempt, once all of them run."""
    first = rehearsals.cwd / f"up_{attempt}_0"
    job.wait_for(first)
    paths = [rehearsals.cwd / f"up_{attempt}_{rank}" for rank in range(int(first.read_text().split()[1]))]
    job.wait_for(*paths)
    return [int(path.read_text().split()[0]) for path in paths]


def agents(rehearsals: Rehearsals) -> list[int]:
    """Return the agents that run, in the order of their hosts."""
    found = sorted(rehearsals.runner.temporary.glob("msrun-spool-*/agent.pid"), key=lambda p: p.parent.name[::-1])
    return [pid for path in found if is_alive(pid := int(path.read_text().split()[0]))]


def carry_out(hits: list[Hit], rehearsals: Rehearsals) -> None:
    """Run one job, hit every attempt, and check its end."""
    script = rehearsals.cwd / "program.py"
    script.write_text(PROGRAM)
    options = (f"--spares={SPARES}", "--min_hosts=1", f"--max_restarts={RESTARTS}", "--grace=0.3", "--quiet")
    job = rehearsals.start(f"{HOSTS}x1", *options, script)
    for attempt, hit in enumerate(hits):
        workers = started(rehearsals, job, attempt)
        time.sleep(hit.delay_s)
        own = {"worker": workers, "launcher": [job.pid]}.get(hit.target) or wait_until(
            lambda: agents(rehearsals), "an agent"
        )
        os.kill(own[int(hit.which * len(own))], signal.SIGKILL)
    is_over = hits[-1].target == "launcher" or len(hits) > RESTARTS
    if not is_over:
        started(rehearsals, job, len(hits))
        (rehearsals.cwd / "go").touch()
    finished = job.finish()
    assert finished.code == (STATUS[hits[-1].target] if is_over else 0), finished.stderr
    if finished.code >= 0:
        again = [event["attempt"] for event in finished.events if event["event"] == "restarting"]
        assert again == list(range(1, min(len(hits), RESTARTS) + 1))
    if finished.code > 0:
        attempts = json.loads((finished.log_dir / "failure.json").read_text())["attempts"]
        assert len(attempts) == RESTARTS
    assert "Traceback" not in finished.stderr
    rehearsals.runner.prove_nothing_left()


@pytest.mark.parametrize("number", range(-(-CASES // ROUNDS_PER_TEST)))
@pytest.mark.timeout(600)
def test_whatever_is_lost_the_job_goes_on_while_hosts_and_restarts_are_left(tmp_path: Path, number: int) -> None:
    for index in range(number * ROUNDS_PER_TEST, min(CASES, (number + 1) * ROUNDS_PER_TEST)):
        hits = plan_round(f"{SEED}-rehearsal-{index}")
        cwd = tmp_path / f"round_{index}"
        cwd.mkdir()
        try:
            with JobRunner() as runner:
                carry_out(hits, Rehearsals(runner, cwd))
        except AssertionError as error:
            raise AssertionError(f"MSRUN_CHAOS_SEED={SEED}, round {index}: {hits}\n{error}") from error
