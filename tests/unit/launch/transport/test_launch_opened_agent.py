"""How an agent is opened: a child process on this host, SSH to all others, and the code that --ship sends along."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_runner import wait_until
from pipe_ends import read
from plans import small_spec

from msrun.agent.processes.process_control import is_stopped
from msrun.errors import ClusterError
from msrun.launch.remote.logs import NO_AGENT
from msrun.launch.transport import pipe as module
from msrun.launch.transport.opener import HostOpener, agent_codes, pack_msrun
from msrun.launch.transport.pipe import HostShare, LocalPipe, agent_command
from msrun.launch.transport.ssh import SshConnector
from msrun.planning.hosts import HostEntry
from msrun.planning.spec import SshSettings


@pytest.fixture
def start():
    pipes = []

    def make(code):
        pipes.append(LocalPipe([sys.executable, "-c", code], "10.0.0.1"))
        return pipes[-1]

    yield make
    for pipe in pipes:
        pipe.process.kill()
        pipe.close()
        pipe._socket.close()  # open until nobody has the pipe any more: its last bytes may still be read
        pipe._stderr.close()


def test_nothing_is_waited_for(start, monkeypatch):
    monkeypatch.setattr(module, "END_S", 0.05)
    pipe = start("import time; time.sleep(600)")
    assert pipe.read() is None and pipe.exit_status is None, "it has said nothing"
    data = bytes(1 << 16)
    while pipe.write(data) == len(data):
        pass
    while pipe.write(data):
        pass
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ | selectors.EVENT_WRITE)
        assert not selector.select(0), "there is no room, and nothing to read"
        pipe.close()
        assert selector.select(30)
    assert read(pipe) == b""
    with pytest.raises(BrokenPipeError):
        pipe.write(b"hello\n")


def test_end_of_what_it_said_on_stderr_is_kept(start, monkeypatch):
    monkeypatch.setattr(module, "MAX_STDERR_BYTES", 5)
    pipe = start("import sys; sys.stderr.write('x' * 100 + 'last\\n')")
    assert read(pipe) == b"" and pipe.exit_status == 0
    assert pipe.stderr_text() == "last\n"


def test_agent_that_is_stopped_is_killed_and_one_that_is_slow_is_not(start, monkeypatch):
    monkeypatch.setattr(module, "END_S", 0.05)
    slow = start("import time; print(1, flush=True); time.sleep(600)")
    stopped = start("import time; print(1, flush=True); time.sleep(600)")
    for pipe in (slow, stopped):
        assert read(pipe) == b"1\n"
    os.kill(stopped.process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(stopped.process.pid), "it is stopped")
    for pipe in (slow, stopped):
        pipe.close()
    assert stopped.process.wait(30) == -signal.SIGKILL
    assert slow.process.poll() is None


def test_stopped_agent_of_a_rehearsal_lives_on_without_the_connection(monkeypatch):
    monkeypatch.setattr(module, "END_S", 0.05)
    pipe = LocalPipe([sys.executable, "-c", "import time; time.sleep(600)"], "", HostShare({"A": "1"}))
    environ = Path(f"/proc/{pipe.process.pid}/environ")
    assert wait_until(environ.read_bytes, "it has begun") == b"A=1\0"
    os.kill(pipe.process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pipe.process.pid), "it is stopped")
    pipe.close()
    assert (read(pipe), pipe.process.poll()) == (b"", None)
    pipe.process.kill()
    assert pipe.process.wait(30) == -signal.SIGKILL


def test_interpreter_that_is_not_there_is_named():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ClusterError, match=r"this host: cannot start /no/python \(No such file or directory\); see --py"
    ) as caught:
        LocalPipe(["/no/python"], "")
    assert caught.value.__traceback__, "holds the pipe, so nothing is closed by the collector"
    assert len(os.listdir("/proc/self/fd")) == before


CODE = agent_codes({}, "0" * 16, 0, pack_msrun())[1]
"""Ends at once: there is no agent to connect to."""


def run_code(folder, home, **env):
    """Run the code on a host with this home folder; its temporary folder is `folder`."""
    env = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": str(folder), **env}
    command = [sys.executable, "-c", "import sys; exec(sys.stdin.buffer.read())"]
    done = subprocess.run(command, input=CODE, env=env, cwd=folder, capture_output=True, check=False)
    assert done.returncode == NO_AGENT, done.stderr


def test_code_that_is_sent_runs_whatever_msrun_the_host_has(tmp_path):
    other = tmp_path / "other" / "msrun" / "launch" / "remote"
    other.mkdir(parents=True)
    for name in ("launch/remote/agent.py", "__init__.py"):
        (tmp_path / "other" / "msrun" / name).write_text("raise SystemExit('another version')\n")
    run_code(tmp_path, str(tmp_path), PYTHONPATH=str(tmp_path / "other"))


def test_code_is_kept_once_where_the_home_folder_cannot_be_written(tmp_path):
    for _ in range(2):
        run_code(tmp_path, "/proc/nowhere")
    (kept,) = tmp_path.iterdir()
    assert kept.name == f"msrun-code-{os.geteuid()}" and kept.stat().st_mode & 0o777 == 0o700
    assert len(list(kept.iterdir())) == 1


@pytest.mark.parametrize(
    "squat",
    [Path.touch, lambda path: path.symlink_to("theirs"), lambda path: (path.mkdir(), path.chmod(0o777))],
    ids=["file", "link", "open folder"],
)
def test_folder_that_somebody_else_may_write_is_not_used(tmp_path, squat):
    taken = tmp_path / f"msrun-code-{os.geteuid()}"
    (tmp_path / "theirs").mkdir()
    squat(taken)
    run_code(tmp_path, "/proc/nowhere")
    assert not (taken.is_dir() and list(taken.iterdir())) and not list((tmp_path / "theirs").iterdir())
    assert len(list(tmp_path.glob("msrun-code-*/*.zip"))) == 1


HERE, THERE = HostEntry("localhost", 1, (0,)), HostEntry("192.0.2.1", 1, (0,), python="/opt/python")


def test_this_host_needs_no_ssh_and_others_are_reached_in_their_time_with_their_own_python(tmp_path, monkeypatch):
    asked = []

    class Connector(SshConnector):
        def open(self, entry, command, *, deadline):
            asked.append((entry, command, deadline))

        def close(self):
            asked.append("closed")
            super().close()

    monkeypatch.setattr("msrun.launch.transport.opener.SshConnector", Connector)
    entries, ssh = (HERE, THERE), SshSettings(connect_time_out_s=20.0)
    opener = HostOpener(small_spec(tmp_path, 2, local_worker_num=0, host_entries=entries, ssh=ssh), "JOB", print)
    with contextlib.closing(opener):
        assert (opener.can_resume(HERE), opener.can_resume(THERE)) == (False, True)
        with contextlib.closing(opener.open(HERE, None)) as pipe:
            assert isinstance(pipe, LocalPipe) and not asked
        begin = time.monotonic()
        opener.open(THERE, 1234.5)
        opener.open(THERE, None)
        codes = [opener.way(entry, {}, 0) for entry in entries]
    assert asked[2:] == ["closed"]
    command = agent_command("/opt/python")
    assert asked[0] == (THERE, command, 1234.5)
    assert begin + 20.0 <= asked[1][2] <= time.monotonic() + 20.0
    assert [bool(code.attach) for code in codes] == [False, True]
    assert all(code.start and code.salvage({}) for code in codes)
