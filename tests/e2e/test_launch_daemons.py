"""A daemon that a worker has started with an empty environment, in a session of its own: nothing of a job marks it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, is_alive, wait_until

PROGRAM = """
import os, pathlib, subprocess, sys, time
code = "import os, time; os.fork() and os._exit(0); os.setsid(); open('pid', 'w').write(str(os.getpid())); "
code += "os.rename('pid', 'daemon'); time.sleep(600)"
subprocess.run(["env", "-i", sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL, check=True)
time.sleep(600)
"""


def prove_gone(msrun: JobRunner, daemon: int) -> None:
    """Fail when the daemon or anything else of the job is left."""
    wait_until(lambda: not is_alive(daemon), "the daemon is gone", 20)
    msrun.prove_nothing_left()


@pytest.mark.parametrize("start", one_fast("cold", "warm"))
def test_daemon_ends_when_launcher_and_fork_server_are_killed_together(
    msrun: JobRunner, tmp_path: Path, start: str
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    env = msrun.warm() if start == "warm" else {}
    job = msrun.start("--worker_num=1", "train.py", cwd=tmp_path, env=env)
    job.wait_for(tmp_path / "daemon")
    daemon, server = int((tmp_path / "daemon").read_text()), job.pid_of_fork_server()
    os.kill(job.pid, signal.SIGSTOP)  # so that it does not see the end of its server
    os.kill(server, signal.SIGKILL)
    job.send(signal.SIGKILL)
    job.finish()
    prove_gone(msrun, daemon)


@pytest.mark.parametrize("killed", one_fast("", "launcher", "fork server"))
def test_daemon_is_gone_at_every_end(msrun: JobRunner, tmp_path: Path, killed: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    job = msrun.start("--worker_num=1", "train.py", cwd=tmp_path)
    job.wait_for(tmp_path / "daemon")
    daemon = int((tmp_path / "daemon").read_text())
    if killed == "fork server":
        os.kill(job.pid_of_fork_server(), signal.SIGKILL)
    else:
        job.send(signal.SIGKILL if killed else signal.SIGTERM)
    job.finish()
    prove_gone(msrun, daemon)
