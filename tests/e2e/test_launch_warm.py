"""--warm: a job starts from a process that has imported already, and is like any other in everything else."""

import os
import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import REPOSITORY, is_alive, parent_of, wait_until

SCRIPT = """\
import os, sys
import numpy
print(dict(value=numpy.VALUE, cwd=os.getcwd(), foo=os.environ.get("FOO"), args=sys.argv[1:]), flush=True)
"""
"""`numpy` is a module of the test's own, quick to import; the name is one that a fork server imports unasked."""
GRANDCHILD = """\
import os, subprocess, sys, time
import numpy
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
open(f"ready_{os.environ['RANK']}", "w").write(str(child.pid))
time.sleep(600)
"""


class Warm:
    """Jobs with --warm that share one folder of warm servers."""

    def __init__(self, runner, folder):
        self.runner = runner
        self.folder = folder
        run = folder / f"run, {'with a long name ' * 6}"
        self.cwd = folder / "work"
        self.library = folder / "library" / "numpy" / "__init__.py"
        self.library.parent.mkdir(parents=True)
        self.library.write_text("VALUE = 1\n")
        self.cwd.mkdir()
        run.mkdir()
        self.env = {"XDG_RUNTIME_DIR": str(run), "PYTHONPATH": f"{self.library.parents[1]}:{REPOSITORY}"}

    def script(self, text=SCRIPT):
        path = self.cwd / "script.py"
        path.write_text(text)
        return path

    def run(self, *words, env=None):
        settings = {"cwd": self.cwd, "env": {**self.env, **(env or {})}}
        finished = self.runner.run("--worker_num=2", "--quiet", "--warm", *words, **settings)
        assert finished.code == 0, finished.stderr
        return finished

    def said(self, *words, env=None):
        """Run the script and return what rank 0 has printed."""
        return dict(eval(self.run(*words, self.script(), env=env).log(0)))

    def stop(self):
        return self.runner.run("--warm=stop", cwd=self.cwd, env=self.env).stdout.decode().strip()

    def servers(self):
        """Return the warm servers that run, when none is still importing."""
        wait_until(lambda: not [*self.folder.glob("run*/*/*.new")], "warm servers have imported")
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid):
        try:
            words = Path("/proc", str(pid), "cmdline").read_bytes()
            environ = Path("/proc", str(pid), "environ").read_bytes()
        except OSError:
            return False
        return words.startswith(b"msrun: warm server") and str(self.library.parents[1]).encode() in environ


@pytest.fixture
def warm(msrun, tmp_path):
    warm = Warm(msrun, tmp_path)
    yield warm
    warm.stop()
    wait_until(lambda: not warm.servers(), "warm servers have ended")


def test_second_job_starts_from_the_process_that_the_first_has_left(warm):
    cold = warm.said("--env=FOO=1")
    [server] = warm.servers()
    assert os.getsid(server) == server, "no Ctrl-C of that terminal reaches it"
    Path(warm.cwd, "other").mkdir()
    job = start_waiting(warm)
    assert parent_of(job.pid_of_fork_server()) == server
    job.send(signal.SIGTERM)
    assert job.finish().code == 128 + signal.SIGTERM
    second = warm.said(f"--chdir={warm.cwd}/other", "--env=BAR=2")
    assert cold == {"value": 1, "cwd": str(warm.cwd), "foo": "1", "args": []}
    assert second == {"value": 1, "cwd": f"{warm.cwd}/other", "foo": None, "args": []}, "nothing of the first job"
    assert warm.servers() == [server]


def start_waiting(warm):
    path = warm.cwd / "waiting.py"
    path.write_text(GRANDCHILD)
    job = warm.runner.start("--worker_num=2", "--warm", "--quiet", path, cwd=warm.cwd, env=warm.env)
    return job.wait_for_workers(2)


@pytest.mark.slow
@pytest.mark.parametrize("killed", one_fast("fork server", "launcher", "warm server"))
def test_kill_leaves_nothing_of_the_job(warm, killed):
    warm.run(warm.script())
    [server] = warm.servers()
    job = start_waiting(warm)
    grandchild = int(wait_until(Path(warm.cwd, "ready_0").read_text, "written"))
    assert is_alive(grandchild)
    assert parent_of(job.pid_of_fork_server()) == server
    os.kill({"fork server": job.pid_of_fork_server(), "launcher": job.pid, "warm server": server}[killed], 9)
    if killed == "warm server":  # the job does not need it any more
        assert job.process.poll() is None
        job.send(signal.SIGTERM)
    finished = job.finish()
    assert finished.code == {"fork server": 3, "launcher": -9, "warm server": 143}[killed]
    if killed == "fork server":
        assert "the fork server ended unexpectedly" in finished.stderr
    warm.runner.prove_nothing_left()
    wait_until(lambda: not is_alive(grandchild), "what a worker has started has ended")
    assert warm.said()["value"] == 1
