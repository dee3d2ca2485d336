"""Runs real `msrun` commands with deadlines and proves that nothing of their jobs is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS = REPOSITORY / "tests" / "workers"
WORKER_PATH = os.pathsep.join(str(REPOSITORY / name) for name in ("", "tests", "tests/support", "tests/cases"))
"""PYTHONPATH of a worker that imports what stands in tests/, as `pythonpath` in pyproject.toml has it for the tests."""
DEADLINE_S = float(os.environ.get("DEADLINE_S", "60"))
POLL_S = 0.01
WORKER_IMPORTS = ("msrun.runtime.parallel.auto_parallel", "torch.export._trace", "small_capture")
"""What the runtime imports and torch builds in every worker at its first call; the fork server does it once for all."""
PRELOAD = tuple(f"--preload={name}" for name in WORKER_IMPORTS)
"""What a job has to say that a warm server which has imported these is to be like it."""
WARM_SERVERS = "JOB_RUNNER_WARM_SERVERS"
"""Names the folder of the warm servers of this test run."""
MARK = "JOB_RUNNER_MARK"
"""Set for every process of a runner's jobs; found again in /proc/PID/environ."""

_JOB_VARIABLE = re.compile(
    r"(RANK|MS_|MSRUN_|OMPI_|PMIX?_|PRTE_|PET_|VC_|KUBERNETES_|SLURMD?_|TORCHELASTIC_|PYTEST_|MASTER_|LOCAL_|GROUP_|ROLE_|GLOO_|NCCL_|TP_SOCKET|TORCHINDUCTOR_)\w*\Z"
    r"|(WORLD_SIZE|DEVICE_ID|NODE_RANK|JOB_COMPLETION_INDEX|OMP_NUM_THREADS|MKL_NUM_THREADS|OPENBLAS_NUM_THREADS|PYTHONUNBUFFERED)\Z"
)


def is_job_variable(name):
    """Return whether a launcher, a cluster or a user of either sets this variable; not where captures are kept.

    And what torch sets in a process that captures: a job that had it would ask for another warm server.
    """
    return bool(_JOB_VARIABLE.match(name)) and name not in ("PYTEST_CURRENT_TEST", "MSRUN_CAPTURE_CACHE")


def wait_until(condition, what, deadline_s=DEADLINE_S):
    """Return the first true value of `condition`; fail, naming `what`, when none comes in time."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(POLL_S)


def run_python(source):
    """Run a program in a process of its own and return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-c", source]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def free_port():
    """Return a port of this host that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def read_record(folder, rank):
    """Return what workers/record.py has written."""
    return json.loads((folder / f"record_{rank}.json").read_text())


def is_alive(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


def stat_of(pid):
    """Return the fields of a process from its state on; proc(5)."""
    return Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].decode().split()


def state_of(pid):
    """Return the letter of a process's state."""
    return stat_of(pid)[0]


def parent_of(pid):
    return int(stat_of(pid)[1])


def latest_job(log_dir):
    """Return the folder of the latest job in a log directory, also by a host's own link; else the folder as it is."""
    if (log_dir / "latest").is_symlink():
        return log_dir / os.readlink(log_dir / "latest")
    if log_dir.is_symlink():
        return latest_job(log_dir.parent) / log_dir.name
    return log_dir


@dataclass(frozen=True)
class Finished:
    """A job that has ended."""

    code: int
    stdout: bytes
    stderr: str
    log_dir: Path
    """The job's own folder."""

    def log(self, global_rank):
        """Return what a worker wrote."""
        return (self.log_dir / f"worker_{global_rank}.log").read_bytes()

    def read_json(self, name):
        """Return the content of plan.json, failure.json or rank_table.json."""
        return json.loads((self.log_dir / name).read_text())

    def read_plan(self):
        """Return the content of plan.json with the log directory where the job's own folder in it stands."""
        return json.loads((self.log_dir / "plan.json").read_text().replace(f"/{self.log_dir.name}", ""))

    @property
    def events(self):
        """The lines of events.jsonl."""
        return [json.loads(line) for line in (self.log_dir / "events.jsonl").read_text().splitlines()]

    @property
    def errors(self):
        """msrun's own error lines."""
        return [line for line in self.stderr.splitlines() if line.startswith("msrun: error:")]


class Running:
    """A job that was started and may still run."""

    def __init__(self, process, folder, cwd, log_dir):
        self.process = process
        self.pid = process.pid
        self.log_dir = cwd / log_dir
        self._cwd = cwd
        self._folder = folder

    @property
    def stderr(self):
        """What msrun has said so far."""
        return (self._folder / "stderr").read_text(errors="backslashreplace")

    @property
    def stdout(self):
        """What has come on its standard output so far."""
        return (self._folder / "stdout").read_text(errors="backslashreplace")

    def send(self, signum):
        """Send a signal to the launcher alone."""
        self.process.send_signal(signum)

    def wait_for(self, *paths):
        """Wait until all these files exist, which workers make when they are where the test wants them."""

        def have_come():
            if self.process.poll() is not None and not all(path.exists() for path in paths):
                raise AssertionError(f"msrun ended with {self.process.returncode} too early:\n{self.stderr}")
            return all(path.exists() for path in paths)

        wait_until(have_come, f"files {[path.name for path in paths]}; msrun said:\n{self.stderr}")

    def wait_for_workers(self, count, name="ready"):
        """Return the job once each of so many workers has begun, such as workers/wait.py: it has made NAME_RANK."""
        self.wait_for(*(self._cwd / f"{name}_{rank}" for rank in range(count)))
        return self

    def pid_of(self, role):
        """Return the process id of "scheduler", of "server_0" or of a worker, "0" and so on, from the event log."""

        def find():
            for line in (self.log_dir / "events.jsonl").read_text().splitlines():
                event = json.loads(line)
                name = f"server_{event['index']}" if event["event"] == "server" else event["event"]
                if name == role:  # scheduler, server_0
                    return int(event["pid"])
                if event["event"] == "started" and str(event["global_rank"]) == role:
                    return int(event["pid"])
            return 0

        return int(wait_until(find, f"{role} has started"))

    def pid_of_fork_server(self):
        """Return the process id of the parent of worker 0."""
        return parent_of(self.pid_of("0"))

    def finish(self, deadline_s=DEADLINE_S):
        """Wait for the end."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"msrun has not ended within {deadline_s:g} s; it said:\n{self.stderr}") from None
        return Finished(code, (self._folder / "stdout").read_bytes(), self.stderr, latest_job(self.log_dir))


class JobRunner:
    """Starts jobs with a temporary directory of their own; leaving the context proves that they are gone."""

    def __init__(self):
        self.mark = uuid.uuid4().hex
        # Short, not tmp_path: sockets are made below it, and their names are limited to 108 bytes.
        self.temporary = Path(tempfile.mkdtemp(prefix="jr-", dir="/tmp"))
        self._runs = 0
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        try:
            if kind is None:
                self.prove_nothing_left()
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            for job in self._started:
                job.process.wait(DEADLINE_S)
            shutil.rmtree(self.temporary, ignore_errors=True)

    def environ(self, extra: Mapping[str, str] = {}):
        """Return the environment of a user who has set nothing, on a host without accelerators."""
        env = {name: value for name, value in os.environ.items() if not is_job_variable(name)}
        env.pop("PYTEST_CURRENT_TEST", None)
        env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        env["TMPDIR"] = str(self.temporary)
        env["CUDA_VISIBLE_DEVICES"] = env["ASCEND_RT_VISIBLE_DEVICES"] = ""
        env[MARK] = self.mark
        return {**env, **extra}

    def warm(self, kind="torch"):
        """Return variables with which a job starts from this test run's warm servers, in a tenth of the time.

        With the others, which some jobs would not need, one server is like all jobs of a kind: each imports for six
        seconds, and so does a job that finds none. The first of a kind is such a job, and others wait for its server;
        that of torch is ended before it has imported as well, and whoever started it waits like the others.
        """
        folder = Path(os.environ[WARM_SERVERS])
        alike = {"PYTHONPATH": WORKER_PATH, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
        env = {"MSRUN_WARM": "True", "XDG_RUNTIME_DIR": str(folder), **alike}
        first = folder / f"{kind}.first"
        try:
            first.touch(exist_ok=False)
            if kind != "torch":
                return env
            job = self.start("--worker_num=1", "--quiet", *PRELOAD, WORKERS / "wait.py", cwd=self.temporary, env=env)
            wait_until(lambda: [*folder.glob("*/*.new"), *folder.glob("*/*.sock")], "a warm server imports")
            job.send(signal.SIGTERM)
            job.finish()
        except FileExistsError:
            pass
        begun = first.stat().st_mtime

        def is_there():
            servers, kinds = len([*folder.glob("*/*.sock")]), len([*folder.glob("*.first")])
            return servers >= kinds or time.time() > begun + DEADLINE_S

        wait_until(is_there, "a warm server", 2 * DEADLINE_S)
        return env

    def start(
        self,
        *args,
        cwd,
        env=None,
        prefix=(),
        log_dir="log_output",
        command=(sys.executable, "-m", "msrun"),
        hand_on=None,
    ):
        """Start `msrun ARGS` in `cwd`.

        Args:
            env: set over the clean environment.
            prefix: command that starts msrun, such as nohup.
            log_dir: where the logs will be, seen from `cwd`; to be given in `args` too when it is not the default.
            command: another launcher, for comparison.
            hand_on: called in the process that becomes msrun, such as for a limit.
        """
        self._runs += 1
        folder = self.temporary / f"run-{self._runs}"
        folder.mkdir()
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [*prefix, *command, *args],
                cwd=cwd,
                env=self.environ(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=hand_on,
            )
        job = Running(process, folder, cwd, log_dir)
        self._started.append(job)
        return job

    def run(self, *args, cwd, deadline_s=DEADLINE_S, **settings):
        """Run `msrun ARGS` in `cwd` to its end; when it has ended, nothing of it may be left."""
        finished = self.start(*args, cwd=cwd, **settings).finish(deadline_s)
        self.prove_nothing_left(deadline_s=0.0)
        return finished

    def run_alone(self, program, *words, cwd=None, code=0, deadline_s=240.0, **env):
        """Run a program as one plain process, without msrun, to the end that it should have."""
        command, env = [sys.executable, program, *map(str, words)], self.environ({"OMP_NUM_THREADS": "1", **env})
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=deadline_s)
        assert done.returncode == code, done.stderr
        return done

    def run_world(self, world_size, script, *args, cwd, preload=(), kind="torch", env=None, deadline_s=DEADLINE_S):
        """Run a worker that uses the runtime, and may import what stands in tests/cases, to its good end.

        It starts from a warm server, which has imported torch for all tests of a run.

        Args:
            preload: modules, beside `WORKER_IMPORTS`, whose import the fork server does for all ranks.
            kind: see `warm`.
        """
        finished = self.run(
            f"--worker_num={world_size}",
            "--quiet",
            *PRELOAD,
            *(f"--preload={name}" for name in preload),
            script,
            *args,
            cwd=cwd,
            env={**self.warm(kind), **(env or {})},
            deadline_s=deadline_s,
        )
        assert finished.code == 0, finished.stderr
        ready = next(event for event in finished.events if event["event"] == "ready")
        assert ready["start_method"] == "fork", f"every rank imports all: {ready['reason']}"
        return finished

    def processes(self):
        """Return every living process of this runner's jobs: those with its mark, and those with a job's id."""
        wanted = [f"{MARK}={self.mark}".encode()]
        wanted += [f"MSRUN_JOB_ID={job_id}".encode() for job_id in self.job_ids()]
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(text in environ for text in wanted) and is_alive(int(entry.name)):
                found.append(int(entry.name))
        return found

    def prove_nothing_left(self, deadline_s=10.0):
        """Fail when a process, a session or a temporary folder of a job is there after the deadline."""

        def gone():
            return not (self.processes() or self._sessions() or self._folders())

        try:
            wait_until(gone, "job gone", deadline_s)
        except AssertionError:
            left = [(pid, Path("/proc", str(pid), "cmdline").read_bytes()) for pid in self.processes()]
            raise AssertionError(
                f"left behind: processes {left}, sessions {self._sessions()}, folders {self._folders()}"
            ) from None

    def job_ids(self):
        """Return the ids of the jobs that have come as far as their plan."""
        for job in self._started:
            plan = job.log_dir / "plan.json"
            if plan.is_file():
                yield json.loads(plan.read_text())["job_id"]

    def _sessions(self):
        """Return living processes in the session of any process that the event logs name."""
        leaders = set()
        for job in self._started:
            events = job.log_dir / "events.jsonl"
            if events.is_file():
                leaders |= {json.loads(line).get("pid") for line in events.read_text().splitlines() if line}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and leaders:
                try:
                    fields = stat_of(int(entry.name))
                except OSError:
                    continue
                if int(fields[3]) in leaders and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def _folders(self):
        return [path.name for path in self.temporary.glob("msrun-*")]
