"""Lives of jobs on several hosts, hit at random over SSH and rehearsed alike: what is done, and what has to follow.

MSRUN_CHAOS_SEED=N repeats a run, a failure names it; a quarter of MSRUN_CHAOS_CASES rounds of each kind are run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from chaos_places import find
from job_runner import is_alive, parent_of, wait_until

ROUNDS_PER_TEST = 5
CASES = int(os.environ.get("MSRUN_CHAOS_CASES") or 40) // 4
SEED = int(os.environ.get("MSRUN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
TESTS = -(-CASES // ROUNDS_PER_TEST)
HANG_S = 3
LIMIT_S = 60.0
"""The longest way to the end: two heartbeats, the grace, an overdue host."""
GOES_ON = ((0, ""),)
KILLS = (Signals.SIGKILL, Signals.SIGTERM)
CHAOS_WORKER = Path(__file__).parents[1] / "workers" / "chaos.py"


def rounds(number):
    """Yield the rounds of one of `TESTS` tests."""
    yield from range(number * ROUNDS_PER_TEST, min(CASES, (number + 1) * ROUNDS_PER_TEST))


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


@dataclass(frozen=True)
class Hit:
    """What can happen to a process of a job, and the ends that are right then."""

    target: str
    signum: Signals
    lasts: bool
    """Of a stop, or a cut: it is not undone."""
    endings: tuple[tuple[int, str], ...]
    """Exit status, and words of the reason. 0 where the job goes on until it is told to end."""

    @property
    def needs_network(self):
        """Whether it cannot happen in a rehearsal."""
        return self.target in ("connection", "cable")


LOST = ((3, "no sign of life"), (3, "lost "))
HITS = (
    *(Hit("worker", one, lasts=True, endings=((128 + one, "failed first: signal"),)) for one in KILLS),
    *(Hit("fork server", one, lasts=True, endings=((3, "the fork server ended unexpectedly"),)) for one in KILLS),
    *(Hit("scheduler", one, lasts=True, endings=((3, "the scheduler ended ("),)) for one in KILLS),
    Hit("agent", Signals.SIGKILL, lasts=True, endings=((3, "host"),)),
    Hit("launcher", Signals.SIGKILL, lasts=True, endings=((137, ""),)),
    Hit("launcher", Signals.SIGTERM, lasts=True, endings=((143, "stopped by SIGTERM"),)),
    Hit("connection", Signals.SIGKILL, lasts=True, endings=GOES_ON),
    Hit("cable", Signals.SIGSTOP, lasts=True, endings=LOST),
    *(
        Hit(target, Signals.SIGSTOP, lasts=False, endings=GOES_ON)
        for target in ("worker", "fork server", "scheduler", "agent", "launcher", "connection", "cable")
    ),
    Hit("worker", Signals.SIGSTOP, lasts=True, endings=((124, f"--hang_time_out {HANG_S}: "),)),
    Hit("agent", Signals.SIGSTOP, lasts=True, endings=LOST),
    *(
        Hit(target, Signals.SIGSTOP, lasts=True, endings=((3, f"the {target} (pid "),))
        for target in ("fork server", "scheduler")
    ),
    Hit("connection", Signals.SIGSTOP, lasts=True, endings=GOES_ON),
)


@dataclass(frozen=True)
class Round:
    """What is done to one job on three hosts."""

    hit: Hit
    host: int
    max_restarts: int
    delay_s: float
    pause_s: float
    """Until a stop or a cut is undone."""

    hosts = 3

    @property
    def hangs(self):
        """Whether a worker never goes on."""
        return self.hit.target == "worker" and self.hit.signum is Signals.SIGSTOP and self.hit.lasts

    @property
    def endings(self):
        """The ends that are right."""
        if self.hit.target in ("worker", "fork server", "scheduler") and self.max_restarts and not self.hangs:
            return GOES_ON  # again
        return self.hit.endings


def plan_round(seed, index, *, has_network):
    """Return a round of a seed: what is hit comes in turns, all else is drawn. Pure."""
    draw = random.Random(f"{seed}-{index}")
    hits = [hit for hit in HITS if has_network or not hit.needs_network]
    return Round(
        hit=hits[(random.Random(seed).randrange(len(hits)) + index) % len(hits)],
        host=draw.randrange(Round.hosts),
        max_restarts=draw.choice((0, 1)),
        delay_s=draw.uniform(0, 0.2),
        pause_s=draw.uniform(0.1, 1.5),
    )


def carry_out_round(plan, place, heartbeat_s):
    """Run one job, do to it what the plan says, and check its end."""
    job = place.start(
        [1] * Round.hosts,
        f"--heartbeat_time_out={heartbeat_s}",
        "--grace=0.3",
        "--tail_worker_log=none",
        f"--max_restarts={0 if plan.hangs else plan.max_restarts}",
        *([f"--hang_time_out={HANG_S}"] if plan.hangs else []),
        CHAOS_WORKER,
        "plain",
        "meek",
    )
    job.wait_for(*(place.cwd / f"ready_{rank}" for rank in range(Round.hosts)))
    time.sleep(plan.delay_s)
    stopped = []
    if plan.hit.target == "cable":
        place.cut(plan.host)
    else:
        stopped = find(place, plan.hit.target, plan.host, job)
        assert stopped, f"no {plan.hit.target} on host{plan.host}"
        send(stopped, plan.hit.signum)
    if not plan.hit.lasts:
        time.sleep(plan.pause_s)
        place.mend(plan.host)
        send(stopped, Signals.SIGCONT)
    if plan.endings == GOES_ON:
        (place.cwd / "go").touch()
    try:
        finished = job.finish(LIMIT_S)
        judge(plan.endings, finished)
    finally:
        place.mend(plan.host)
        if plan.hit.target == "connection":
            send(stopped, Signals.SIGCONT)
    place.prove_nothing_left(patience_s(finished))


def patience_s(finished):
    """Return how long what is left may take to go: agents of a killed launcher wait for another one, then end alone."""
    return LIMIT_S if finished.code < 0 else 10.0


def send(pids, signum):
    """Send a signal to those of the processes that are there still."""
    for pid in pids:
        if is_alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def judge(endings, finished):
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


def plan_losses(seed, *, has_network):
    """Return what is lost, attempt by attempt. Pure: the same seed gives the same losses."""
    draw = random.Random(seed)
    kinds = ("agent", "stopped agent", "worker", *(("cable",) if has_network else ()))
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
    place.prove_nothing_left(patience_s(finished))


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
