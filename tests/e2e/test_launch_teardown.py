"""Ends at awkward moments: while the job starts, of workers that do not go easily, beside others, fifty times over."""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast, slow_but
from job_runner import WORKERS, is_alive, state_of, wait_until

# -- while the job starts -------------------------------------------------------------------------------------------

BLOCK = """
import os, pathlib, sys, time

def block():
    pathlib.Path("reached").touch()
    while not os.path.exists("gate"):  # until the test opens it
        time.sleep(0.01)
"""
PHASES = {
    "interpreter": (
        "sitecustomize.py",
        BLOCK + "if 'msrun.agent.processes.fork_server' in ' '.join(sys.orig_argv):\n    block()\n",
    ),
    "imports": ("held.py", BLOCK + "block()\n"),
    "workers": (
        "held.py",
        BLOCK + "server, forks = os.getpid(), []\n\n"
        "def count():\n    if os.getpid() != server:\n        return\n"
        "    forks.append(1)\n    if len(forks) == 3:\n        block()\n"
        "    end = time.monotonic() + 2\n"
        "    name = f'started_{len(forks) - 3}'\n"
        "    while len(forks) > 3 and time.monotonic() < end and not os.path.exists(name):\n"
        "        time.sleep(0.01)\n\n"
        "os.register_at_fork(before=count)\n",
    ),
}
"""Where the fork server is held, and the module that does it: while its interpreter starts, while it imports, or when
it has forked the scheduler and worker 0 and is in the middle of forking worker 1. If it forks more, each gets the time
to run."""


def search_modules(msrun, cwd):
    """Return the environment in which modules/ is searched first."""
    return {"PYTHONPATH": os.pathsep.join([str(cwd / "modules"), msrun.environ()["PYTHONPATH"]])}


def open_gate(cwd):
    """Let whoever waits in `block` go on."""
    (cwd / "gate").touch()


class HeldStart:
    """A job of four workers whose start is held at a phase."""

    def __init__(self, msrun, cwd, phase, *options):
        name, content = PHASES[phase]
        self._cwd = cwd
        (cwd / "modules").mkdir()
        (cwd / "modules" / name).write_text(content)
        (cwd / "train.py").write_text(
            "import os, pathlib, time\npathlib.Path('started_' + os.environ['RANK']).touch()\ntime.sleep(600)\n"
        )
        preload = [] if phase == "interpreter" else ["--preload=held"]
        words = ["--worker_num=4", *options, *preload, "train.py"]
        self.job = msrun.start(*words, cwd=cwd, env=search_modules(msrun, cwd))
        self.job.wait_for(cwd / "reached")
        if phase == "workers":
            self.job.wait_for(cwd / "started_0")

    def go_on(self):
        """Let the start go on, if there is still anybody who waits at the gate."""
        open_gate(self._cwd)

    def started(self):
        """Return what workers have made as the first thing that they do."""
        return sorted(file.name for file in self._cwd.glob("started_*"))


def assert_nobody_more_was_started(start, phase):
    """The worker that was being forked in that instant may have come to its first line, or not."""
    assert start.started() in ([["started_0"], ["started_0", "started_1"]] if phase == "workers" else [[]])


ENDS = {
    # how it ends: exit status, msrun's own words
    "signal": (143, "msrun: error: stopped by SIGTERM"),
    "killed launcher": (-signal.SIGKILL, ""),
    "killed fork server": (3, "the fork server ended unexpectedly"),
}


@pytest.mark.parametrize(("end", "phase"), slow_but(("signal/workers",), itertools.product(ENDS, PHASES)))
def test_end_in_each_phase_of_the_start_starts_nobody_more_and_leaves_nothing(msrun, tmp_path, end, phase):
    start = HeldStart(msrun, tmp_path, phase)
    if end == "killed fork server":
        (server,) = Path(f"/proc/{start.job.pid}/task/{start.job.pid}/children").read_text().split()
        os.kill(int(server), signal.SIGKILL)
    else:
        start.job.send(signal.SIGTERM if end == "signal" else signal.SIGKILL)
    if end == "signal":
        wait_until(lambda: "stopping all workers" in start.job.stderr, "msrun says that it stops")
        start.go_on()
    finished = start.job.finish()
    start.go_on()
    code, words = ENDS[end]
    assert finished.code == code and words in "\n".join(finished.errors), finished.stderr
    msrun.prove_nothing_left(deadline_s=10 if end == "killed launcher" else 0)
    assert_nobody_more_was_started(start, phase)


@pytest.mark.slow
@pytest.mark.parametrize("code", one_fast(7, 0))
def test_signal_when_all_is_over_does_not_change_the_exit_status(msrun, tmp_path, code):
    """msrun is held while its interpreter ends: the job is over, its end has been told."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(
        BLOCK + "import atexit\nif sys.orig_argv[1:3] == ['-m', 'msrun']:\n    atexit.register(block)\n"
    )
    words = ["--worker_num=2", WORKERS / "end.py", "all", str(code)]
    job = msrun.start(*words, cwd=tmp_path, env=search_modules(msrun, tmp_path))
    job.wait_for(tmp_path / "reached")
    job.send(signal.SIGTERM)
    open_gate(tmp_path)
    assert job.finish().code == code


# -- workers that do not go easily, and what they have started --------------------------------------------------------


def start_chaos(msrun, cwd, *words, family="alone"):
    """Start two workers that end with 0 when `go` is there and with 7 when fail_<rank> is; wait until both run."""
    manner = "stubborn" if family == "stubborn" else "plain"
    return msrun.start("--worker_num=2", *words, WORKERS / "chaos.py", manner, family, cwd=cwd).wait_for_workers(2)


def start_family(msrun, cwd):
    """Start two workers, each with a child and a daemon that ignore TERM; return the job and those processes."""
    job = start_chaos(msrun, cwd, "--grace=0.3", family="stubborn")
    files = [cwd / f"{role}_{rank}" for role in ("child", "daemon") for rank in (0, 1)]
    job.wait_for(*files)
    return job, [int(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("are_stopped", [False, True])
def test_children_and_daemons_of_workers_go_with_the_job(msrun, tmp_path, are_stopped):
    job, family = start_family(msrun, tmp_path)
    for pid in family if are_stopped else ():
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: state_of(pid) == "T", "it is stopped")
    if are_stopped:
        job.send(signal.SIGTERM)
    else:
        (tmp_path / "go").touch()
    assert job.finish().code == (143 if are_stopped else 0)
    assert not [pid for pid in family if is_alive(pid)]


DAEMON = """
import os, pathlib, subprocess, sys, time
code = "import os, time; os.fork() and os._exit(0); os.setsid(); open('pid', 'w').write(str(os.getpid())); "
code += "os.rename('pid', 'daemon'); time.sleep(600)"
subprocess.run(["env", "-i", sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL, check=True)
time.sleep(600)
"""
"""Starts a daemon with an empty environment, in a session of its own: nothing of a job marks it."""


@pytest.mark.parametrize(
    ("end", "start"),
    one_fast(("both", "cold"), ("both", "warm"), ("launcher", "cold"), ("fork server", "cold"), ("TERM", "cold")),
)
def test_daemon_that_nothing_marks_is_gone_at_every_end(msrun, tmp_path, end, start):
    (tmp_path / "train.py").write_text(DAEMON)
    env = msrun.warm() if start == "warm" else {}
    job = msrun.start("--worker_num=1", "train.py", cwd=tmp_path, env=env)
    job.wait_for(tmp_path / "daemon")
    daemon, server = int((tmp_path / "daemon").read_text()), job.pid_of_fork_server()
    if end == "both":
        os.kill(job.pid, signal.SIGSTOP)  # so that it does not see the end of its server
    if end in ("both", "fork server"):
        os.kill(server, signal.SIGKILL)
    if end != "fork server":
        job.send(signal.SIGTERM if end == "TERM" else signal.SIGKILL)
    job.finish()
    wait_until(lambda: not is_alive(daemon), "the daemon is gone", 20)
    msrun.prove_nothing_left()


@pytest.mark.slow
def test_daemon_that_starts_another_one_when_it_is_told_to_end_is_ended(msrun, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, pathlib, signal, time\n\n"
        "def again(*_):\n    if os.fork():\n        os._exit(0)\n    os.setsid()\n    run()\n\n"
        "def run():\n    signal.signal(signal.SIGTERM, again)\n    pathlib.Path('daemon').touch()\n"
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\n    while True:\n        time.sleep(600)\n\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n    run()\n"
        "time.sleep(600)\n"
    )
    job = msrun.start("--worker_num=1", "--grace=0.3", "train.py", cwd=tmp_path)
    job.wait_for(tmp_path / "daemon")
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    msrun.prove_nothing_left(deadline_s=0)


def test_second_control_c_ends_children_and_daemons_too(msrun, tmp_path):
    job = start_chaos(msrun, tmp_path, "--grace=600", family="stubborn")
    job.send(signal.SIGINT)
    wait_until(lambda: "stopping all workers" in job.stderr, "msrun says that it stops")
    job.send(signal.SIGINT)
    assert job.finish().code == 130
    msrun.prove_nothing_left(deadline_s=0)


# -- beside others --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "fork server", "launcher"])
def test_end_of_one_job_does_not_touch_the_one_beside_it(msrun, tmp_path, role):
    jobs = []
    for name in ("ends", "stays"):
        (tmp_path / name).mkdir()
        jobs.append(start_chaos(msrun, tmp_path / name, "--grace=0.3", family="meek"))
    pids = {"worker": jobs[0].pid_of("0"), "fork server": jobs[0].pid_of_fork_server()}
    os.kill(pids.get(role, jobs[0].pid), signal.SIGKILL)
    assert jobs[0].finish().code != 0
    wait_until(lambda: len(msrun.processes()) == 9, "of the other: launcher, fork server, scheduler, workers, families")
    (tmp_path / "stays" / "go").touch()
    finished = jobs[1].finish()
    assert finished.code == 0
    assert {event["how"] for event in finished.events if event["event"] == "exited"} == {"exit code 0"}


@pytest.mark.slow
def test_process_that_the_callers_shell_has_started_before_lives_on(msrun, tmp_path):
    """`monitor & exec msrun ...`, as in many a container: the monitor is then a child of msrun, yet not of the job."""
    prefix = ["/bin/sh", "-c", 'sleep 600 & echo $! > monitor; exec "$@"', "sh"]
    job = msrun.start("--worker_num=2", WORKERS / "end.py", "all", "SIGKILL", cwd=tmp_path, prefix=prefix)
    assert job.finish().code == 137
    monitor = int((tmp_path / "monitor").read_text())
    assert is_alive(monitor)
    os.kill(monitor, signal.SIGKILL)
    msrun.prove_nothing_left()


# -- again and again ------------------------------------------------------------------------------------------------

CODES = {0: 137, 1: 143, 2: 3, 3: 3, 4: 4}
"""What cycles.py makes of a job: worker killed, launcher told to end, fork server killed, exit code 3, and exit code 4
of a worker that leaves a child."""


@pytest.mark.slow
def test_fifty_jobs_in_one_process_leave_nothing_in_it(msrun, tmp_path):
    driver = [sys.executable, str(WORKERS / "cycles_driver.py")]
    finished = msrun.run("50", WORKERS / "cycles.py", cwd=tmp_path, command=driver, deadline_s=100)
    assert finished.code == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["codes"] == [CODES[number % 5] for number in range(50)]
    assert report["after"] == report["before"]
    assert report["after"]["children"] == [] and report["after"]["listening"] == []
    kept = {"stdout", "stderr"}
    assert all(set(os.listdir(folder)) == kept for folder in msrun.temporary.glob("run-*"))
