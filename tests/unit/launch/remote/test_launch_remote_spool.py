"""An agent's folder on its host, by its socket and its record of the agent."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from job_runner import is_alive, wait_until

from msrun.agent.processes.process_control import start_time
from msrun.errors import ClusterError
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
