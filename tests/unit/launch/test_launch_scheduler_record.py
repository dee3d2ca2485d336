"""What the scheduler is told of a job, and that it holds nobody up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from msrun.cluster.messages import Channel
from msrun.launch.own_start import SchedulerRecord
from msrun.planning.build import build_plan
from msrun.planning.placement.host import HostFacts
from msrun.planning.plan import LaunchPlan
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    spec = LaunchSpec(
        program=Program("script", "x.py"),
        worker_num=2,
        local_worker_num=2,
        working_directory=tmp_path,
        log_dir=tmp_path,
    )
    return build_plan(spec, HostFacts("h", "127.0.0.1", (0,)), caller={}, job_id="J", run_dir="/tmp/r", master_port=1)


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    both = Channel(ours), Channel(theirs)
    yield both
    for channel in both:
        channel.close()


def test_first_moment_is_the_job_and_the_others_go_as_they_are(
    plan: LaunchPlan, channels: tuple[Channel, Channel]
) -> None:
    ours, theirs = channels
    record = SchedulerRecord(plan, has_store=True)
    record.follow(ours)
    record.note("started", {"global_rank": 1, "pid": 7})
    job, started = theirs.receive()
    assert (job["type"], job["job_id"], job["world_size"], job["has_store"]) == ("job", "J", 2, True)
    assert started == {"type": "started", "global_rank": 1, "pid": 7}
