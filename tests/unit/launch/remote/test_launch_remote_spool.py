"""An agent's folder on its host, by its socket and its record of the agent."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from job_runner import is_alive, wait_until

from msrun.agent.processes.process_control import start_time
from msrun.errors import ClusterError
from msrun.launch.directory.jobs import new_job_id
from msrun.launch.remote import spool

SUN_PATH_BYTES = 108


def test_socket_is_reached_in_a_folder_that_is_deeper_than_its_address_is_long(tmp_path: Path) -> None:
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


def test_folder_is_its_owner_s_alone_and_names_this_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = spool.make_spool("f00d", 3)
    assert folder == spool.spool_path("f00d", 3) and folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / spool.AGENT).read_text().split() == [str(os.getpid()), str(start_time(os.getpid()))]
    with pytest.raises(ClusterError, match=r"cannot make .*f00d-3 .File exists.; set TMPDIR"):
        spool.make_spool("f00d", 3)


def test_folder_that_has_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot listen in .*gone .No such file or directory.; set TMPDIR"):
        spool.listen_in(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        spool.connect_in(tmp_path / "gone")


def test_agent_is_killed_by_its_record_and_nobody_else_is(tmp_path: Path) -> None:
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


def test_folders_that_agents_left_behind_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    now = time.time()
    target = tmp_path / "elsewhere"
    names = (
        "msrun-spool-0a1f-0",
        f"msrun-spool-{new_job_id()}-13",
        "msrun-spool-0a1f-1",
        "msrun-spool-0a1f-2",
        "msrun-spool-x-1",
    )
    old, restarted, held, written, other = (tmp_path / name for name in names)
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
    descriptor = spool.hold_spool(held)
    try:
        spool.remove_old_spools(now)
    finally:
        os.close(descriptor)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {held.name, written.name, other.name, target.name, link.name}
    assert {path.name for path in target.iterdir()} == {"below", "worker_0.log"}
    spool.remove_old_spools(now)
    assert not held.exists(), "its agent has ended"


def test_folder_of_somebody_else_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "msrun-spool-0a1f-0"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        spool.remove_old_spools(time.time() + 2 * spool.KEEP_S)
    assert folder.exists()
    spool.remove_old_spools(time.time() + 2 * spool.KEEP_S)
    assert not folder.exists()
