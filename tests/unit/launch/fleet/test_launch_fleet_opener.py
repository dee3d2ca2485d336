"""The way to each host: a child process where it is this host, SSH to all others."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_agents import FakePipe

from msrun.launch.fleet.opener import HostOpener
from msrun.launch.transport.pipe import LocalPipe, agent_command
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec, SshSettings

HERE, THERE = HostEntry("localhost", 1, (0,)), HostEntry("192.0.2.1", 1, (0,), python="/opt/python")


class Connector:
    """An `SshConnector` that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[HostEntry, str, float]] = []
        self.is_closed = False

    def open(self, entry: HostEntry, command: str, *, deadline: float) -> FakePipe:
        self.asked.append((entry, command, deadline))
        return FakePipe()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[HostOpener]:
    spec = LaunchSpec(
        program=Program("script", "/t.py"),
        worker_num=2,
        local_worker_num=0,
        working_directory=tmp_path,
        log_dir=tmp_path,
        host_entries=(HERE, THERE),
        ssh=SshSettings(connect_time_out_s=20.0),
    )
    made = HostOpener(spec, "JOB", lambda _: None)
    assert made._connector is not None
    made._connector.close()
    connector: Any = Connector()
    made._connector = connector
    yield made
    made.close()
    assert connector.is_closed


def asked(opener: HostOpener) -> list[tuple[HostEntry, str, float]]:
    connector: Any = opener._connector
    return list(connector.asked)


def test_this_host_needs_no_ssh(opener: HostOpener) -> None:
    assert (opener.can_resume(HERE), opener.can_resume(THERE)) == (False, True)
    pipe = opener.open(HERE, None)
    assert isinstance(pipe, LocalPipe)
    pipe.close()
    assert asked(opener) == []


def test_other_host_is_reached_with_its_own_python(opener: HostOpener) -> None:
    opener.open(THERE, 1234.5)
    assert asked(opener) == [(THERE, agent_command("/opt/python"), 1234.5)]
    assert sys.executable not in asked(opener)[0][1]


def test_usual_time_begins_when_it_is_the_hosts_turn(opener: HostOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    opener.open(THERE, None)
    ((_, _, deadline),) = asked(opener)
    assert begin + 20.0 <= deadline <= time.monotonic() + 20.0


def test_agent_of_this_host_cannot_be_attached_to_again(opener: HostOpener) -> None:
    codes = [opener.code(entry, {}, 0, dict) for entry in (HERE, THERE)]
    assert [bool(code.attach) for code in codes] == [False, True]
    assert all(code.start and code.salvage() for code in codes)
