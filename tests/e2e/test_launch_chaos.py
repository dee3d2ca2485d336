"""Jobs on one host whose processes are killed at random: the end is always right and leaves nothing.

MSRUN_CHAOS_SEED=N repeats a run, a failure names it; MSRUN_CHAOS_CASES=N runs more, or fewer.
"""

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import pytest
from chaos_lives import SEED, named, send
from job_runner import WORKERS, wait_until

CASES = int(os.environ.get("MSRUN_CHAOS_CASES") or 40)
ROUNDS_PER_TEST = 1

GRACE_S = 0.3
LIMIT_S = 30.0
"""The longest way to the end: the grace, a fork server that does not answer, its leftovers, a stuck scheduler."""
MAY_END_S = 0.3
"""How long a job may take to die of what may kill it, before its workers are told to end."""

DEADLY = (Signals.SIGKILL, Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGQUIT, Signals.SIGSEGV)
MOMENTS = {"start": 0.3, "running": 0.1, "teardown": 0.15}
"""When a process is hit, and how long after the begin of that at most, in seconds."""
TARGETS = ("worker", "worker", "fork server", "scheduler", "launcher")


@dataclass(frozen=True)
class Round:
    """What is done to one job."""

    world_size: int
    manner: str
    """What a worker does on TERM: plain, tidy, stubborn."""
    family: str
    """What each worker has started: alone, meek, stubborn."""
    moment: str
    cause: str
    """What ends the job, for a hit during teardown: go, fail, term."""
    delay_s: float
    target: str
    rank: int
    """Which worker is hit."""
    signum: Signals
    max_restarts: int


def plan_round(seed):
    """Return the round of a seed. Pure: the same seed gives the same round."""
    draw = random.Random(seed)
    world_size = draw.randint(2, 4)
    target = draw.choice(TARGETS)
    moment = draw.choice(list(MOMENTS))
    return Round(
        world_size=world_size,
        manner=draw.choice(("plain", "plain", "tidy", "stubborn")),
        family=draw.choice(("alone", "alone", "meek", "stubborn")),
        moment=moment,
        cause=draw.choice(("go", "fail", "term")) if moment == "teardown" else "",
        delay_s=draw.uniform(0, MOMENTS[moment]),
        target=target,
        rank=draw.randrange(world_size),
        signum=draw.choice(DEADLY),
        max_restarts=draw.choice((0, 0, 1)),
    )


@dataclass(frozen=True)
class Outcome:
    """An end that is right."""

    status: int
    """As a shell shows it: 128 + N for a launcher that signal N has ended."""
    culprit: int | None = None
    """The rank that failed first."""
    reason: str = ""
    """What the job's reason begins with, where no rank failed."""
    is_recorded: bool = True
    """Whether the launcher lived to write the failure file."""


WELL = Outcome(0)


def failing_rank(plan):
    """Return the rank that fails to begin a teardown: another one than is hit."""
    return (plan.rank + 1) % plan.world_size


def right_outcomes(plan):
    """Return the ends that are right: several where what was done and the job's own course race."""
    outcomes = outcomes_without_restart(plan)
    if not plan.max_restarts:
        return outcomes
    if plan.cause == "fail" and plan.target != "worker":
        outcomes = [*outcomes, *outcomes_of_hit(plan)]  # between two attempts there is nothing that had failed before
    repeated = [] if plan.target == "launcher" else outcomes_of_hit(plan)
    if plan.cause == "fail" and plan.target != "worker":
        repeated = []  # the worker fails again
    return list(dict.fromkeys(WELL if one in repeated else one for one in outcomes))


def outcomes_without_restart(plan):
    """Return the ends that are right for a job that does not start again."""
    told = Outcome(128 + Signals.SIGTERM, reason="stopped by SIGTERM")
    if plan.moment == "teardown":
        own = {"go": WELL, "fail": Outcome(7, failing_rank(plan)), "term": told}[plan.cause]
        if plan.target == "launcher" and plan.signum in (Signals.SIGKILL, Signals.SIGSEGV):
            return [own, Outcome(128 + plan.signum, is_recorded=False)]
        # What comes while msrun ends a job changes nothing; what comes before the last worker's end does.
        return [own, *outcomes_of_hit(plan)] if plan.cause == "go" else [own]
    if plan.target == "worker" and plan.signum is Signals.SIGTERM and plan.manner != "plain":
        return [WELL] if plan.moment == "running" else [WELL, *outcomes_of_hit(plan)]  # had it asked for TERM by then?
    if plan.target == "worker" and plan.signum is Signals.SIGINT and plan.moment == "start":
        # An interpreter that is starting prints and drops a KeyboardInterrupt that meets it in a callback.
        return [WELL, *outcomes_of_hit(plan)]
    return outcomes_of_hit(plan)


def outcomes_of_hit(plan):
    """Return what a deadly signal makes of a job that would go on."""
    if plan.target == "worker":
        return [Outcome(128 + plan.signum, plan.rank)]
    if plan.target == "fork server":
        return [Outcome(3, reason="the fork server ended unexpectedly")]
    if plan.target == "scheduler":
        return [Outcome(3, reason="the scheduler ended (")]
    if plan.signum in (Signals.SIGKILL, Signals.SIGSEGV):
        return [Outcome(128 + plan.signum, is_recorded=False)]
    stopped = Outcome(128 + plan.signum, reason=f"stopped by {plan.signum.name}")
    return [stopped, Outcome(128 + plan.signum, is_recorded=False)] if plan.moment == "start" else [stopped]


# -- carrying it out ------------------------------------------------------------------------------------------------


def carry_out(plan, msrun, worker, cwd):
    """Run one job, do to it what the plan says, and check its end."""
    options = [f"--worker_num={plan.world_size}", f"--grace={GRACE_S}", "--tail_worker_log=none"]
    options.append(f"--max_restarts={plan.max_restarts}")
    job = msrun.start(*options, worker, plan.manner, plan.family, cwd=cwd)
    if plan.moment == "start":
        if plan.target == "launcher" and plan.signum is Signals.SIGINT:
            # Earlier the interpreter itself is interrupted while it starts, and says so in its own ways.
            wait_until(lambda: any(msrun.temporary.glob("msrun-*")), "the job's folder")
    else:
        job.wait_for(*(cwd / f"ready_{rank}" for rank in range(plan.world_size)))
    if plan.moment == "teardown":
        begin_teardown(plan, job, cwd)
    time.sleep(plan.delay_s)
    pid = find_target(plan, job)
    if pid:
        send([pid], plan.signum)
    outcomes = right_outcomes(plan)
    if WELL in outcomes:
        if len(outcomes) > 1:
            wait_briefly(lambda: job.process.poll() is not None)
        (cwd / "go").touch()
    judge(outcomes, job.finish(LIMIT_S), msrun)


def begin_teardown(plan, job, cwd):
    """Make the job end; returns when msrun has begun to end it, or the workers themselves have."""
    if plan.cause == "go":
        (cwd / "go").touch()
        return
    if plan.cause == "fail":
        (cwd / f"fail_{failing_rank(plan)}").touch()
    else:
        job.send(signal.SIGTERM)
    wait_until(lambda: "stopping all workers" in job.stderr, "msrun says that it stops")


def find_target(plan, job):
    """Wait until the process that is to be hit exists and return its id; 0 when the job has ended before."""
    if plan.target == "launcher":
        return job.pid
    role = str(plan.rank) if plan.target == "worker" else plan.target

    def find():
        if job.process.poll() is not None:
            return -1
        return fork_server_of(job.pid) if role == "fork server" else started_pid(job, role)

    return max(0, int(wait_until(find, f"{role} exists")))


def started_pid(job, role):
    """Return the process id of "scheduler" or of a rank from the event log, 0 when it is not there yet."""
    events = job.log_dir / "events.jsonl"
    for line in events.read_text().splitlines() if events.exists() else ():
        event = json.loads(line)
        if (event["event"], role) == ("scheduler", "scheduler") or (
            event["event"] == "started" and str(event["global_rank"]) == role
        ):
            return int(event["pid"])
    return 0


def fork_server_of(pid):
    """Return the child of the launcher, 0 while there is none.

    Nor in the instant between its fork and its exec, for which the launcher waits in the kernel: whatever is stopped
    there stops both.
    """
    try:
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        is_executed = b"msrun.agent.processes.fork_server" in Path(f"/proc/{child}/cmdline").read_bytes()
    except (OSError, ValueError):
        return 0
    return int(child) if is_executed else 0


def wait_briefly(condition):
    """Wait until the condition holds or MAY_END_S are over."""
    end = time.monotonic() + MAY_END_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def judge(outcomes, finished, msrun):
    """Fail unless the job ended in one of these ways, told the truth and left nothing."""
    status = finished.code if finished.code >= 0 else 128 - finished.code
    file = finished.log_dir / "failure.json"
    failure = finished.read_json("failure.json") if file.exists() else None
    first = failure["first_failure"] if failure else None
    found = Outcome(
        status,
        first["global_rank"] if first else None,
        failure["reason"] if failure and not first else "",
        failure is not None or status == 0,
    )

    def matches(right):
        if not right.is_recorded:
            return found.status == right.status
        return (found.status, found.culprit, found.is_recorded) == (right.status, right.culprit, True) and (
            found.reason.startswith(right.reason) and bool(found.reason) is bool(right.reason)
        )

    assert any(matches(right) for right in outcomes), f"{found} is none of {outcomes}; msrun said:\n{finished.stderr}"
    if failure and finished.code >= 0:  # a launcher may be killed right after it wrote the file
        assert failure["exit_code"] == finished.code
    assert not [line for line in finished.stderr.splitlines() if line.startswith("Traceback")]  # of msrun itself
    if finished.code >= 0:
        msrun.prove_nothing_left(deadline_s=0)
        return
    wait_until(lambda: not msrun.processes(), "processes gone", 10)
    for folder in msrun.temporary.glob("msrun-*"):
        events = finished.log_dir / "events.jsonl"
        if not events.exists() or '"event": "ready"' not in events.read_text():  # else the fork server cleans up
            (folder / "progress").unlink(missing_ok=True)
            folder.rmdir()  # killed before anybody else knew of the folder: it held that file at most
    msrun.prove_nothing_left()


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, -(-CASES // ROUNDS_PER_TEST)))]
)
def test_whatever_is_hit_the_end_is_right_and_leaves_nothing(msrun, tmp_path, number):
    for index in range(number * ROUNDS_PER_TEST, min(CASES, (number + 1) * ROUNDS_PER_TEST)):
        plan = plan_round(f"{SEED}-{index}")
        cwd = tmp_path / f"round_{index}"
        cwd.mkdir()
        with named(plan, index):
            carry_out(plan, msrun, WORKERS / "chaos.py", cwd)
