"""Jobs on three hosts over SSH whose processes and cables are hit at random: the end is right, in time, and complete.

MSRUN_CHAOS_SEED=N repeats a run, a failure names it; a quarter of MSRUN_CHAOS_CASES are run here.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import pytest
from fleet import FleetRunner
from job_runner import Finished, JobRunner, Running, is_alive
from ssh_net import SshNet

pytestmark = pytest.mark.slow

HOSTS = 3
ROUNDS_PER_TEST = 5
CASES = int(os.environ.get("MSRUN_CHAOS_CASES") or 40) // 4
SEED = int(os.environ.get("MSRUN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))

HEARTBEAT_S = 4
HANG_S = 3
LIMIT_S = 60.0
"""The longest way to the end: two heartbeats, the grace, an overdue host."""
LOST = 3, "no sign of life"
KILLS = (Signals.SIGKILL, Signals.SIGTERM)


@dataclass(frozen=True)
class Hit:
    """What can happen to a process of a job, and the ends that are right then."""

    target: str
    signum: Signals
    lasts: bool
    """Of a stop, or a cut: it is not undone."""
    endings: tuple[tuple[int, str], ...]
    """Exit status, and words of the reason. 0 where the job goes on until it is told to end."""


GOES_ON = ((0, ""),)
HITS = (
    *(Hit("worker", one, lasts=True, endings=((128 + one, "failed first: signal"),)) for one in KILLS),
    *(Hit("fork server", one, lasts=True, endings=((3, "the fork server ended unexpectedly"),)) for one in KILLS),
    *(Hit("scheduler", one, lasts=True, endings=((3, "the scheduler ended ("),)) for one in KILLS),
    Hit("agent", Signals.SIGKILL, lasts=True, endings=((3, "host"),)),
    Hit("launcher", Signals.SIGKILL, lasts=True, endings=((137, ""),)),
    Hit("launcher", Signals.SIGTERM, lasts=True, endings=((143, "stopped by SIGTERM"),)),
    Hit("connection", Signals.SIGKILL, lasts=True, endings=GOES_ON),
    Hit("cable", Signals.SIGSTOP, lasts=True, endings=((3, "no sign of life"), (3, "lost "))),
    *(
        Hit(target, Signals.SIGSTOP, lasts=False, endings=GOES_ON)
        for target in ("worker", "fork server", "scheduler", "agent", "launcher", "connection", "cable")
    ),
    Hit("worker", Signals.SIGSTOP, lasts=True, endings=((124, f"--hang_time_out {HANG_S}: "),)),
    Hit("agent", Signals.SIGSTOP, lasts=True, endings=((3, "no sign of life"), (3, "lost "))),
    *(
        Hit(target, Signals.SIGSTOP, lasts=True, endings=((3, f"the {target} (pid "),))
        for target in ("fork server", "scheduler")
    ),
    Hit("connection", Signals.SIGSTOP, lasts=True, endings=GOES_ON),
)


@dataclass(frozen=True)
class Round:
    """What is done to one job."""

    hit: Hit
    host: int
    max_restarts: int
    delay_s: float
    pause_s: float
    """Until a stop or a cut is undone."""


def plan_round(seed: str) -> Round:
    """Return the round of a seed. Pure: the same seed gives the same round."""
    draw = random.Random(seed)
    return Round(
        hit=draw.choice(HITS),
        host=draw.randrange(HOSTS),
        max_restarts=draw.choice((0, 1)),
        delay_s=draw.uniform(0, 0.2),
        pause_s=draw.uniform(0.1, 1.5),
    )


def right_endings(plan: Round) -> tuple[tuple[int, str], ...]:
    """Return the ends that are right."""
    if plan.hit.target == "worker" and plan.hit.signum is not Signals.SIGSTOP and plan.max_restarts:
        return GOES_ON  # again
    return plan.hit.endings


# -- carrying it out ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is another one on every host."""
    return tmp_path_factory.mktemp("own_disk")


@pytest.fixture(scope="module")
def net(own_disk: Path) -> Iterator[SshNet]:
    """Three hosts and one to start from."""
    with SshNet(HOSTS, private=[own_disk]) as hosts:
        yield hosts


def carry_out(plan: Round, fleet: FleetRunner, worker: Path, log_dir: Path) -> None:
    """Run one job, do to it what the plan says, and check its end."""
    hangs = plan.hit.target == "worker" and plan.hit.signum is Signals.SIGSTOP and plan.hit.lasts
    job = fleet.start(
        [1, 2, 1],
        f"--heartbeat_time_out={HEARTBEAT_S}",
        "--grace=0.3",
        "--tail_worker_log=none",
        f"--max_restarts={0 if hangs else plan.max_restarts}",
        *([f"--hang_time_out={HANG_S}"] if hangs else []),
        worker,
        "plain",
        "meek",
        log_dir=log_dir,
    )
    fleet.wait_for_workers(job, 4)
    time.sleep(plan.delay_s)
    stopped = strike(plan, fleet, job)
    endings = right_endings(plan)
    if not plan.hit.lasts:
        time.sleep(plan.pause_s)
        undo(plan, fleet, stopped)
    if endings == GOES_ON:
        (fleet.cwd / "go").touch()
    try:
        judge(endings, job.finish(LIMIT_S))
    finally:
        undo(plan, fleet, [pid for pid in stopped if plan.hit.target == "connection"])
    fleet.prove_nothing_left()


def strike(plan: Round, fleet: FleetRunner, job: Running) -> list[int]:
    """Do it; returns the processes that were hit."""
    target, host = plan.hit.target, plan.host
    if target == "cable":
        fleet.net.cut(host)
        return []
    if target == "launcher":
        pids = [job.pid]
    elif target == "agent":
        pids = fleet.agents(host)
    elif target == "connection":
        pids = fleet.net.sessions(host)
    else:
        sign = {"worker": b"msrun: worker", "scheduler": b"msrun: scheduler", "fork server": b"fork_server"}[target]
        pids = [pid for pid in fleet.net.processes(host) if sign in command_line(pid)]
        if target == "worker":
            leaders = [pid for pid in pids if os.getsid(pid) == pid]
            pids = sorted(leaders)[:1]
    assert pids, f"no {target} on host{host}"
    for pid in pids:
        os.kill(pid, plan.hit.signum)
    return pids


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def undo(plan: Round, fleet: FleetRunner, stopped: list[int]) -> None:
    """Let what was stopped go on, and put the cable in again."""
    if plan.hit.target == "cable":
        fleet.net.mend(plan.host)
    for pid in stopped:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)


def judge(endings: tuple[tuple[int, str], ...], finished: Finished) -> None:
    """Fail unless the job ended in one of these ways and told the truth."""
    is_told = finished.code >= 0
    status = finished.code if is_told else 128 - finished.code
    file = finished.log_dir / "failure.json"
    reason = finished.read_json("failure.json")["reason"] if file.exists() and is_told else ""
    assert any(status == right and words in reason for right, words in endings), (
        f"{status}, {reason!r} is none of {endings}; msrun said:\n{finished.stderr}"
    )
    assert bool(reason) is (is_told and status != 0)
    assert "Traceback" not in finished.stderr


# -- tests ----------------------------------------------------------------------------------------------------------


def test_plans_hit_everything_on_every_host() -> None:
    plans = [plan_round(f"coverage-{number}") for number in range(2000)]
    assert {(plan.hit, plan.host) for plan in plans} == {(hit, host) for hit in HITS for host in range(HOSTS)}
    assert plan_round("coverage-7") == plans[7]


@pytest.mark.parametrize("number", range(-(-CASES // ROUNDS_PER_TEST)))
@pytest.mark.timeout(600)
def test_whatever_is_hit_on_three_hosts_the_end_is_right_and_leaves_nothing(
    net: SshNet, own_disk: Path, workers: Path, tmp_path: Path, number: int
) -> None:
    for index in range(number * ROUNDS_PER_TEST, min(CASES, (number + 1) * ROUNDS_PER_TEST)):
        plan = plan_round(f"{SEED}-fleet-{index}")
        cwd = tmp_path / f"round_{index}"
        cwd.mkdir()
        print(f"MSRUN_CHAOS_SEED={SEED}, round {index}: {plan}")
        begin = time.monotonic()
        try:
            with JobRunner() as runner:
                carry_out(
                    plan, FleetRunner(runner, net, cwd), workers / "chaos.py", own_disk / f"{tmp_path.name}_{index}"
                )
        except AssertionError as error:
            raise AssertionError(f"MSRUN_CHAOS_SEED={SEED}, round {index}: {plan}\n{error}") from error
        print(f"  {time.monotonic() - begin:.2f} s")
