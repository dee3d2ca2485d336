"""An agent's folder on its host, by its socket and its record, and what goes home when the agent is lost."""

import os
import stat
import subprocess
import sys
import tempfile
import time

import pytest
from job_runner import REPOSITORY, is_alive, wait_until

from msrun.agent.processes.process_control import start_time
from msrun.cluster.messages import FrameBuffer, encode_message
from msrun.errors import ClusterError
from msrun.launch.directory.log_directory import new_job_id
from msrun.launch.remote import logs as spool
from msrun.launch.remote.logs import AGENT, NO_AGENT, listen_in, unpack_piece
from msrun.launch.transport.pipe import MARKER

SUN_PATH_BYTES = 108


def test_socket_is_reached_in_a_folder_that_is_deeper_than_its_address_is_long(tmp_path):
    folder = tmp_path / ("deep" * 40)
    folder.mkdir()
    assert len(str(folder)) > SUN_PATH_BYTES
    with spool.listen_in(folder) as listener, spool.connect_in(folder) as ours:
        theirs, _ = listener.accept()
        with theirs:
            ours.sendall(b"here")
            assert theirs.recv(4) == b"here"
    with spool.listen_in(folder):
        assert (folder / spool.SOCKET).is_socket(), "what an earlier one has left is no hindrance"


def test_folder_is_its_owner_s_alone_and_names_this_agent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, hold = spool.make_spool("f00d", 3)
    os.close(hold)
    assert folder == spool.spool_path("f00d", 3) and folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / spool.AGENT).read_text().split() == [str(os.getpid()), str(start_time(os.getpid()))]
    with pytest.raises(ClusterError, match=r"cannot make .*f00d-3 .File exists.; set TMPDIR"):
        spool.make_spool("f00d", 3)


def test_folder_that_has_gone_is_named(tmp_path):
    with pytest.raises(ClusterError, match=r"cannot listen in .*gone .No such file or directory.; set TMPDIR"):
        spool.listen_in(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        spool.connect_in(tmp_path / "gone")


def test_agent_is_killed_by_its_record_and_nobody_else_is(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            for text in ("", "nonsense", f"{process.pid} 1", f"{process.pid}"):
                (tmp_path / spool.AGENT).write_text(text)
                assert not spool.kill_agent(tmp_path)
                assert is_alive(process.pid)
            (tmp_path / spool.AGENT).write_text(f"{process.pid} {start_time(process.pid)}\n")
            assert spool.kill_agent(tmp_path)
            wait_until(lambda: not is_alive(process.pid), "killed")
        finally:
            process.kill()


def test_folders_that_agents_left_behind_go_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    now = time.time()
    target = tmp_path / "elsewhere"
    names = ("0a1f-0", f"{new_job_id()}-13", "0a1f-2", "x-1")
    old, restarted, written, other = (tmp_path / f"msrun-spool-{name}" for name in names)
    held, descriptor = spool.make_spool("0a1f", 1)
    for folder in (old, restarted, held, written, other, target):
        (folder / "below").mkdir(parents=True)
        (folder / "worker_0.log").write_text("x")
    link = tmp_path / "msrun-spool-0a1f-3"
    link.symlink_to(target)
    (old / "link").symlink_to(target)
    for folder in (old, restarted, held, written, other, target):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (now - spool.KEEP_S - 1,) * 2, follow_symlinks=False)
    (written / "worker_0.log").write_text("x" * 2)
    try:
        spool.remove_old_spools(now)
    finally:
        os.close(descriptor)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {held.name, written.name, other.name, target.name, link.name}
    assert {path.name for path in target.iterdir()} == {"below", "worker_0.log"}
    spool.remove_old_spools(now)
    assert not held.exists(), "its agent has ended"


def test_folder_of_somebody_else_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "msrun-spool-0a1f-0"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        spool.remove_old_spools(time.time() + 2 * spool.KEEP_S)
    assert folder.exists()
    spool.remove_old_spools(time.time() + 2 * spool.KEEP_S)
    assert not folder.exists()


SALVAGE = "from msrun.launch.remote.logs import salvage; salvage('JOB', 3, {sizes!r})"
ATTACH = "from msrun.launch.remote.logs import attach; attach('JOB', 3)"


@pytest.fixture
def left(tmp_path):
    path = tmp_path / "msrun-spool-JOB-3"
    path.mkdir()
    return path


def environ(left):
    return {**os.environ, "TMPDIR": str(left.parent), "PYTHONPATH": str(REPOSITORY)}


def salvage(left, **sizes):
    """Return what comes home, of logs of which so many bytes are there."""
    code = SALVAGE.format(sizes={f"{name}.log": size for name, size in sizes.items()})
    done = subprocess.run([sys.executable, "-c", code], env=environ(left), capture_output=True, timeout=60, check=True)
    assert done.stdout.startswith(MARKER)
    return FrameBuffer().messages(done.stdout[len(MARKER) :])


def texts(messages):
    found = {}
    for message in messages:
        found[message["name"]] = found.get(message["name"], b"") + unpack_piece(message)
    return found


def test_what_is_missing_at_home_is_sent_and_the_folder_goes(left):
    (left / "worker_6.log").write_bytes(b"known, new")
    (left / "worker_7.log").write_bytes(b"x" * (1 << 20))
    found = texts(salvage(left, worker_6=7, worker_7=0, worker_8=0))
    assert found == {"worker_6.log": b"new", "worker_7.log": b"x" * (1 << 20)}
    with pytest.raises(ValueError, match="a piece of a log is damaged"):
        unpack_piece({"data": "AAAA"})
    assert not left.exists()


def test_agent_is_ended_and_its_logs_stay_when_the_launcher_has_gone_meanwhile(left):
    (left / "worker_6.log").write_bytes(b"x" * (1 << 20))
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as agent:
        wait_until(lambda: start_time(agent.pid), "it runs")
        (left / AGENT).write_text(f"{agent.pid} {start_time(agent.pid)}\n")
        code = SALVAGE.format(sizes={"worker_6.log": 0})
        streams = {"stdout": writer, "stderr": subprocess.PIPE}
        done = subprocess.run([sys.executable, "-c", code], env=environ(left), **streams, timeout=60, check=False)
        os.close(writer)
        assert agent.wait(30) == -9
    assert done.stderr == b""
    assert (left / "worker_6.log").stat().st_size == 1 << 20


def attached(left, **streams):
    return subprocess.Popen([sys.executable, "-c", ATTACH], env=environ(left), **streams)


def test_bytes_pass_between_the_launcher_and_the_agent_that_runs(left):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with listen_in(left) as listener, attached(left, **pipes) as process:
        listener.settimeout(60)
        agent, _ = listener.accept()
        with agent:
            agent.settimeout(60)
            assert process.stdin is not None and process.stdout is not None
            said = encode_message({"type": "attach"})
            process.stdin.write(said)
            process.stdin.flush()
            assert agent.recv(1 << 16) == said
            agent.sendall(b"y" * 100_000)
            assert process.stdout.read(100_000) == b"y" * 100_000
        assert process.wait(60) == 0, "the agent has closed"


def test_host_without_an_agent_says_so(left):
    with attached(left, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == NO_AGENT
    assert stderr.startswith(b"msrun agent: no agent of this job runs here any more (")
