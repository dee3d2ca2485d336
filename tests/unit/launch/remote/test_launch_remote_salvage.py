"""What a lost agent has left on its host goes home, and its folder goes, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_runner import REPOSITORY, wait_until

from msrun.agent.processes.process_control import start_time
from msrun.cluster.messages import Message, MessageBuffer, encode_message
from msrun.launch.remote.log_sender import unpack_piece
from msrun.launch.remote.spool import AGENT, NO_AGENT, listen_in
from msrun.launch.transport.pipe import MARKER

SALVAGE = "from msrun.launch.remote.spool import salvage; salvage('JOB', 3, {sizes!r})"
ATTACH = "from msrun.launch.remote.spool import attach; attach('JOB', 3)"


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    path = tmp_path / "msrun-spool-JOB-3"
    path.mkdir()
    return path


def environ(spool: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(spool.parent), "PYTHONPATH": str(REPOSITORY)}


def salvage(spool: Path, **sizes: int) -> list[Message]:
    """Return what comes home, of logs of which so many bytes are there."""
    code = SALVAGE.format(sizes={f"{name}.log": size for name, size in sizes.items()})
    done = subprocess.run([sys.executable, "-c", code], env=environ(spool), capture_output=True, timeout=60, check=True)
    assert done.stdout.startswith(MARKER)
    return MessageBuffer().feed(done.stdout[len(MARKER) :])


def texts(messages: list[Message]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for message in messages:
        found[message["name"]] = found.get(message["name"], b"") + unpack_piece(message)
    return found


def test_what_is_missing_at_home_is_sent_and_the_folder_goes(spool: Path) -> None:
    (spool / "worker_6.log").write_bytes(b"known, new")
    (spool / "worker_7.log").write_bytes(b"x" * (1 << 20))
    found = texts(salvage(spool, worker_6=7, worker_7=0, worker_8=0))
    assert found == {"worker_6.log": b"new", "worker_7.log": b"x" * (1 << 20)}
    assert not spool.exists()


def test_log_that_is_rotated_is_left_where_it_is_with_its_folder(spool: Path) -> None:
    (spool / "worker_6.log").write_bytes(b"new")
    (spool / "worker_6.log.1").write_bytes(b"old")
    (spool / "worker_7.log").write_bytes(b"other")
    assert texts(salvage(spool, worker_6=0, worker_7=0)) == {"worker_7.log": b"other"}
    assert (spool / "worker_6.log").read_bytes() == b"new"


def test_agent_that_is_stopped_is_ended(spool: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as agent:
        wait_until(lambda: start_time(agent.pid), "it runs")
        (spool / AGENT).write_text(f"{agent.pid} {start_time(agent.pid)}\n")
        assert salvage(spool) == []
        assert agent.wait(30) == -9


def test_agent_is_ended_and_its_logs_stay_when_the_launcher_has_gone_meanwhile(spool: Path) -> None:
    (spool / "worker_6.log").write_bytes(b"x" * (1 << 20))
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as agent:
        wait_until(lambda: start_time(agent.pid), "it runs")
        (spool / AGENT).write_text(f"{agent.pid} {start_time(agent.pid)}\n")
        code = SALVAGE.format(sizes={"worker_6.log": 0})
        streams: Any = {"stdout": writer, "stderr": subprocess.PIPE}
        done = subprocess.run([sys.executable, "-c", code], env=environ(spool), **streams, timeout=60, check=False)
        os.close(writer)
        assert agent.wait(30) == -9
    assert done.stderr == b""
    assert (spool / "worker_6.log").stat().st_size == 1 << 20


def attached(spool: Path, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ATTACH], env=environ(spool), **streams)


def test_bytes_pass_between_the_launcher_and_the_agent_that_runs(spool: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with listen_in(spool) as listener, attached(spool, **pipes) as process:
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


def test_attached_process_ends_with_its_launcher(spool: Path) -> None:
    with listen_in(spool), attached(spool, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_host_without_an_agent_says_so(spool: Path) -> None:
    with attached(spool, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == NO_AGENT
    assert stderr.startswith(b"msrun agent: no agent of this job runs here any more (")
