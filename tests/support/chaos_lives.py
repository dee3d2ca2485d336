"""Lives of jobs, hit at random on one host, over SSH and rehearsed alike: what is done, and what has to follow.

MSRUN_CHAOS_SEED=N repeats a run, a failure names it; MSRUN_CHAOS_CASES rounds are run on one host, a quarter elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from chaos_places import find
from job_runner import is_alive, parent_of, wait_until

CASES = int(os.environ.get("MSRUN_CHAOS_CASES") or 40)
SEED = int(os.environ.get("MSRUN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
HANG_S = 3
LIMIT_S = 60.0
"""The longest way to the end: two heartbeats, the grace, an overdue host."""
MAY_END_S = 0.3
"""How long a job may take to die of what may kill it, before its workers are told to end."""
CHAOS_WORKER = Path(__file__).parents[1] / "workers" / "chaos.py"


@contextlib.contextmanager
def named(plan, index):
    """Have a failure say what was done, and how it is done again."""
    print(f"MSRUN_CHAOS_SEED={SEED}, round {index}: {plan}")
    begin = time.monotonic()
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"MSRUN_CHAOS_SEED={SEED}, round {index}: {plan}\n{error}") from error
    print(f"  {time.monotonic() - begin:.2f} s")


# -- without spare hosts: one hit, and the end that is right -----------------------------------------------------------

WELL = (0, "")
"""Exit status, and a pattern of the reason. Here the job goes on until it is told to end."""
UNTOLD = (None, None)
"""It ends as a shell shows what a signal has ended, 128 + N, and need not say why."""
STOP = (Signals.SIGSTOP,)
FATAL = (Signals.SIGKILL, Signals.SIGSEGV)
ASKING = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGQUIT)
MOMENTS = {"start": 0.3, "running": 0.2, "teardown": 0.15}
"""When a process is hit, and how long after the begin of that at most, in seconds."""


@dataclass(frozen=True)
class Hit:
    """What can happen to a process of a job, and the ends that are right then."""

    target: str
    signals: tuple[Signals, ...]
    endings: tuple[tuple[int | None, str | None], ...] = (WELL,)
    lasts: bool = True
    """Of a stop, or a cut: it is not undone."""

    @property
    def hangs(self):
        """Whether a worker never goes on."""
        return self.target == "worker" and self.signals == STOP and self.lasts


LOST = ((3, "no sign of life"), (3, "lost "))
HITS = (
    Hit("worker", FATAL + ASKING, ((None, "^rank {rank} .*failed first: "),)),
    Hit("fork server", FATAL + ASKING, ((3, "the fork server ended unexpectedly"),)),
    Hit("scheduler", FATAL + ASKING, ((3, r"the scheduler ended \("),)),
    Hit("agent", FATAL, ((3, "host"),)),
    Hit("launcher", FATAL, (UNTOLD,)),
    Hit("launcher", ASKING, ((None, "stopped by {signal}"),)),
    Hit("connection", FATAL),
    Hit("cable", STOP, LOST),
    *(
        Hit(target, STOP, lasts=False)
        for target in ("worker", "fork server", "scheduler", "agent", "launcher", "connection", "cable")
    ),
    Hit("worker", STOP, ((124, f"--hang_time_out {HANG_S}: "),)),
    Hit("agent", STOP, LOST),
    *(Hit(target, STOP, ((3, rf"the {target} \(pid "),)) for target in ("fork server", "scheduler")),
    Hit("connection", STOP),
)


@dataclass(frozen=True)
class Round:
    """What is done to one job of three workers, on as many hosts or on one."""

    hit: Hit
    moment: str
    signum: Signals
    rank: int
    """Which worker is hit, or on whose host something is."""
    cause: str
    """What ends the job, for a hit during teardown: go, fail, term."""
    manner: str
    """What a worker does on TERM: plain, tidy, stubborn."""
    family: str
    """What each worker has started: alone, meek, stubborn."""
    max_restarts: int
    delay_s: float
    pause_s: float
    """Until a stop or a cut is undone."""

    workers = 3

    @property
    def failing_rank(self):
        """The rank that fails to begin a teardown: another one than is hit."""
        return (self.rank + 1) % self.workers

    @property
    def endings(self):
        """The ends that are right: several where what was done and the job's own course race."""
        of_hit = self.endings_of_hit()
        if self.moment == "teardown":
            failed = f"^rank {self.failing_rank} .*failed first: exit code 7"
            own = {"go": WELL, "fail": (7, failed), "term": (128 + Signals.SIGTERM, "stopped by SIGTERM")}[self.cause]
            # What comes while msrun ends a job changes nothing; what comes before its workers' end, or when it starts
            # again, does.
            counts = self.cause == "go" or (self.cause == "fail" and self.max_restarts) or self.hit.endings == (UNTOLD,)
            return (own, *(of_hit if counts else ()))
        if self.hit.target == "worker" and self.signum is Signals.SIGTERM and self.manner != "plain":
            return (WELL,) if self.moment == "running" else (WELL, *of_hit)  # had it asked for TERM by then?
        if self.hit.target == "worker" and self.signum is Signals.SIGINT and self.moment == "start":
            # An interpreter that is starting prints and drops a KeyboardInterrupt that meets it in a callback.
            return (WELL, *of_hit)
        if self.hit.target == "launcher" and self.moment == "start":
            return (*of_hit, (128 + self.signum, None))
        return of_hit

    def endings_of_hit(self):
        """Return what it makes of a job that would go on."""
        if self.max_restarts and self.cause != "fail" and self.hit.target in ("worker", "fork server", "scheduler"):
            return (WELL,)
        return tuple(
            (
                128 + self.signum if status is None else status,
                pattern and pattern.format(rank=self.rank, signal=self.signum.name),
            )
            for status, pattern in self.hit.endings
        )


def plan_round(seed, index, place):
    """Return a round of a seed: what is hit, and when, comes in turns, all else is drawn. Pure."""
    draw = random.Random(f"{seed}-{index}")
    turns = [
        (hit, moment)
        for hit in HITS
        if hit.target not in place.lacks
        for moment in (("running",) if hit.signals == STOP else place.moments)
    ]
    hit, moment = turns[(random.Random(seed).randrange(len(turns)) + index) % len(turns)]
    return Round(
        hit=hit,
        moment=moment,
        signum=draw.choice(hit.signals),
        rank=draw.randrange(Round.workers),
        cause=draw.choice(("go", "fail", "term")) if moment == "teardown" else "",
        manner=draw.choice(("plain", "plain", "tidy", "stubborn")),
        family=draw.choice(("alone", "meek", "stubborn")),
        max_restarts=0 if hit.hangs else draw.choice((0, 1)),
        delay_s=draw.uniform(0, MOMENTS[moment]),
        pause_s=draw.uniform(0.1, 1.5),
    )


def carry_out_round(plan, place, heartbeat_s):
    """Run one job, do to it what the plan says, and check its end."""
    job = place.start(
        [1] * Round.workers,
        f"--heartbeat_time_out={heartbeat_s}",
        "--grace=0.3",
        "--tail_worker_log=none",
        f"--max_restarts={plan.max_restarts}",
        *([f"--hang_time_out={HANG_S}"] if plan.hit.hangs else []),
        CHAOS_WORKER,
        plan.manner,
        plan.family,
    )
    if plan.moment != "start":
        job.wait_for(*(place.cwd / f"ready_{rank}" for rank in range(Round.workers)))
    elif plan.signum is Signals.SIGINT:
        # Earlier the interpreter itself is interrupted while it starts, and says so in its own ways.
        wait_until(job.log_dir.exists, "the job's logs")
    if plan.moment == "teardown":
        begin_teardown(plan, job, place.cwd)
    time.sleep(plan.delay_s)
    stopped, what = [], (plan.hit.target, plan.rank, job)
    if plan.hit.target == "cable":
        place.cut(plan.rank)
    else:
        wait_until(lambda: find(place, *what) or job.process.poll() is not None, f"{plan.hit.target} exists")
        stopped = find(place, *what)
        send(stopped, plan.signum)
    if not plan.hit.lasts:
        time.sleep(plan.pause_s)
        place.mend(plan.rank)
        send(stopped, Signals.SIGCONT)
    if WELL in plan.endings:
        if len(plan.endings) > 1:
            time.sleep(MAY_END_S)
        (place.cwd / "go").touch()
    try:
        finished = job.finish(LIMIT_S)
        judge(plan.endings, finished)
    finally:
        place.mend(plan.rank)
        if plan.hit.target == "connection":
            send(stopped, Signals.SIGCONT)
    prove_nothing_left(place, finished)


def begin_teardown(plan, job, cwd):
    """Make the job end; returns when msrun has begun to end it, or the workers themselves have."""
    if plan.cause == "go":
        (cwd / "go").touch()
        return
    if plan.cause == "fail":
        (cwd / f"fail_{plan.failing_rank}").touch()
    else:
        job.send(signal.SIGTERM)
    wait_until(lambda: "stopping all workers" in job.stderr, "msrun says that it stops")


def prove_nothing_left(place, finished):
    """Fail when anything is left; agents of a killed launcher wait for another one, then end alone."""
    place.prove_nothing_left(LIMIT_S if finished.code < 0 else place.patience_s)


def send(pids, signum):
    """Send a signal to those of the processes that are there still."""
    for pid in pids:
        if is_alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def judge(endings, finished):
    """Fail unless the job ended in one of these ways and told the truth."""
    status = finished.code if finished.code >= 0 else 128 - finished.code
    is_recorded = (finished.log_dir / "failure.json").exists()
    failure = finished.read_json("failure.json") if is_recorded else {"reason": "", "exit_code": status}
    reason = failure["reason"]
    assert any(
        status == right and (pattern is None or (re.search(pattern, reason) and bool(pattern) is bool(reason)))
        for right, pattern in endings
    ), f"{status}, {reason!r} is none of {endings}; msrun said:\n{finished.stderr}"
    if finished.code >= 0:  # a launcher may be killed right after it wrote the file
        assert failure["exit_code"] == finished.code
    assert not [line for line in finished.stderr.splitlines() if line.startswith("Traceback")], "of msrun itself"


# -- with a spare host: one loss after the other, as long as there are restarts ----------------------------------------

RESTARTS = 3
HOSTS = RESTARTS + 1
"""One of them is spare; no more than RESTARTS can be lost before the job may not start again."""
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
STATUS = {"agent": 3, "stopped agent": 3, "cable": 3, "worker": 137, "launcher": -9}
"""What is hit, and the exit status when it is the last that the job bears."""


@dataclass(frozen=True)
class Loss:
    """What is lost in one attempt."""

    target: str
    rank: float
    """The worker that is hit, or on whose host something is: its place among all, 0 to 1."""
    delay_s: float
    paused: str
    """What is stopped before that for a moment, which harms nobody: agent, worker, launcher, or nothing."""
    pause_s: float


def plan_losses(seed, place):
    """Return what is lost, attempt by attempt. Pure: the same seed gives the same losses."""
    draw = random.Random(seed)
    kinds = ("agent", "stopped agent", "worker", *(() if "cable" in place.lacks else ("cable",)))
    targets = draw.choices(kinds, k=draw.randint(1, RESTARTS + 1))
    if draw.random() < 0.2:
        targets[-1] = "launcher"
    pauses = ("", "", "agent", "worker", "launcher")
    return [
        Loss(target, draw.random(), draw.uniform(0, 0.2), draw.choice(pauses), draw.uniform(0.1, 1.0))
        for target in targets
    ]


def carry_out_losses(losses, place, heartbeat_s):
    """Run one job, hit every attempt, and check its end."""
    script = place.cwd / "program.py"
    script.write_text(PROGRAM)
    options = ("--spares=1", "--min_hosts=1", f"--max_restarts={RESTARTS}", "--grace=0.3", "--quiet")
    limits = (f"--heartbeat_time_out={heartbeat_s}", "--ssh_connect_time_out=3")
    job = place.start([1] * HOSTS, *options, *limits, script)
    try:
        for attempt, loss in enumerate(losses):
            inflict(loss, started(place, job, attempt), place, job)
        is_over = losses[-1].target == "launcher" or len(losses) > RESTARTS
        if not is_over:
            started(place, job, len(losses))
            (place.cwd / "go").touch()
        finished = job.finish(LIMIT_S)
    finally:
        for host in range(HOSTS):
            place.mend(host)
    assert finished.code == (STATUS[losses[-1].target] if is_over else 0), finished.stderr
    if finished.code >= 0:
        again = [event["attempt"] for event in finished.events if event["event"] == "restarting"]
        assert again == list(range(1, min(len(losses), RESTARTS) + 1))
    if finished.code > 0:
        assert len(json.loads((finished.log_dir / "failure.json").read_text())["attempts"]) == RESTARTS
    assert "Traceback" not in finished.stderr
    prove_nothing_left(place, finished)


def started(place, job, attempt):
    """Return the workers of an attempt by rank, once all of them run."""
    first = place.cwd / f"up_{attempt}_0"
    wait_until(lambda: first.exists() or job.process.poll() is not None, f"attempt {attempt}", LIMIT_S)
    job.wait_for(first)
    paths = [place.cwd / f"up_{attempt}_{rank}" for rank in range(int(first.read_text().split()[1]))]
    job.wait_for(*paths)
    return [int(path.read_text().split()[0]) for path in paths]


def inflict(loss, workers, place, job):
    """Do it to an attempt that runs."""
    worker = workers[int(loss.rank * len(workers))]
    pid_of = {"worker": lambda: worker, "agent": lambda: parent_of(parent_of(worker)), "launcher": lambda: job.pid}
    if loss.paused:
        paused = pid_of[loss.paused]()
        os.kill(paused, signal.SIGSTOP)
        time.sleep(loss.pause_s)
        os.kill(paused, signal.SIGCONT)
    time.sleep(loss.delay_s)
    if loss.target == "cable":
        place.cut(next(host for host in range(HOSTS) if worker in place.processes(host)))
    elif loss.target == "stopped agent":
        os.kill(pid_of["agent"](), signal.SIGSTOP)
    else:
        os.kill(pid_of[loss.target](), signal.SIGKILL)
