"""A fork server that runs before its job is known."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runner import REPOSITORY

from msrun import contract
from msrun.agent.processes.process_spec import ProcessSpec
from msrun.agent.processes.server_handle import ForkServerHandle, start_fork_server
from msrun.cluster.messages import Message
from msrun.planning.program import Program

DEADLINE_S = 60.0
EARLY = {
    contract.MSRUN_JOB_ID: "f00d",
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(REPOSITORY),
    "KEPT": "a=b\nc",
    "WORLD_SIZE": "old",
}

PROGRAM = """
import os, sys
print(os.environ["KEPT"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], "GROUP_WORLD_SIZE" in os.environ)
print("wave" in sys.modules, os.getcwd())
"""


def receive(server: ForkServerHandle, kind: str) -> Message:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        select.select([server.channel], [], [], DEADLINE_S)
        for message in server.receive():
            if message["type"] == kind:
                return message
        assert not server.channel.is_closed, f"the server ended before it said {kind!r}"
    raise AssertionError(f"no {kind!r} in {DEADLINE_S:g} s")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServerHandle]:
    with (tmp_path / "before").open("wb") as log:
        handle = start_fork_server(
            env={**EARLY, "GROUP_WORLD_SIZE": "2"}, working_directory=str(tmp_path), log_fd=log.fileno()
        )
    yield handle
    handle.kill()
    assert handle.wait(DEADLINE_S)
    handle.end(0.0)


def begin(server: ForkServerHandle, env: dict[str, str], log: Path) -> None:
    ours, theirs = socket.socketpair()
    with log.open("wb") as file, ours, theirs, socket.socket() as listener:
        fds = {"log_fd": file.fileno(), "scheduler_fd": theirs.fileno(), "listener_fd": listener.fileno()}
        server.begin(env, **fds, open_files=256)


def prepare(server: ForkServerHandle, run_dir: Path, **changes: Any) -> None:
    asked = {"preload": [], "start_method": "auto", "run_dir": str(run_dir), "blas_threads": 1}
    server.send("prepare", **{**asked, **changes})


def test_what_is_told_late_is_there_for_workers_and_early_imports_are_kept(
    server: ForkServerHandle, tmp_path: Path
) -> None:
    server.import_early(["wave", "no_such_module"])
    begin(server, {**EARLY, "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}, tmp_path / "after")
    prepare(server, tmp_path / "run", preload=["no_other_module"])
    assert receive(server, "ready")["start_method"] == "fork"
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    server.start([ProcessSpec(0, str(tmp_path / "worker_0.log"), Program("script", str(script)))])
    assert receive(server, "exited")["status"] == 0
    assert (tmp_path / "worker_0.log").read_text() == f"a=b\nc 4 10.0.0.1 False\nTrue {tmp_path}\n"
    assert "no_such_module" in (tmp_path / "before").read_text()
    assert "no_other_module" in (tmp_path / "after").read_text()
    server.send("finish")
    receive(server, "finished")


@pytest.mark.parametrize(
    ("changes", "folder", "can_serve"),
    [
        ({}, "", True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a", "GLOO_SOCKET_IFNAME": "eth0"}, "", True),
        ({"OMP_NUM_THREADS": "2"}, "", False),
        ({"LD_LIBRARY_PATH": "/lib"}, "", False),
        ({"MSRUN_JOB_ID": "other"}, "", False),
        ({}, "other", False),
    ],
    ids=["nothing else", "the job's", "threads", "libraries", "another job", "another directory"],
)
def test_a_server_serves_what_differs_in_nothing_that_imports_read(
    server: ForkServerHandle, tmp_path: Path, changes: dict[str, str], folder: str, can_serve: bool
) -> None:
    env = {**EARLY, "GROUP_WORLD_SIZE": "2", **changes}
    assert server.can_serve(env, str(tmp_path / folder)) is can_serve
