"""A worker's end and `--worker_num` pass through the functions that docs/architecture.md draws, and in that order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asked_cases import one_fast
from followed_walks import WAYS, FollowedJob, Step, read_walk
from host_net import HostNet
from job_runner import JobRunner
from rehearsal import Rehearsals

MOST_FUNCTIONS = 10
END, START = "From a worker's end to the report", "From `--worker_num` to a worker's environment"


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    with HostNet(2) as hosts:
        yield hosts


def check(job: FollowedJob, steps: list[Step], way: int) -> None:
    """Fail unless the value was in the functions of this way, in their order, and in none of another way's."""
    seen = job.first_moments()
    wanted = [name for step in steps for name in step.by_way[way]]
    assert [name for name in wanted if name not in seen] == []
    assert sorted(wanted, key=seen.__getitem__) == wanted
    others = {name for step in steps for names in step.by_way for name in names} - set(wanted)
    assert others & set(seen) == set()


@pytest.mark.parametrize("heading", [END, START])
def test_no_walk_is_longer_than_ten_functions(heading: str) -> None:
    steps = read_walk(heading)
    lengths = {way: sum(len(step.by_way[number]) for step in steps) for number, way in enumerate(WAYS)}
    assert all(0 < length <= MOST_FUNCTIONS for length in lengths.values()), lengths


WALKS = pytest.mark.parametrize(
    ("heading", "value", "program", "code"),
    one_fast(
        (END, r"(?<![\w.])(77|19712)(?![\w.])", "exit $((70 + 7))", 77),
        (START, r"(?<![\w.])6(?![\w.])", "true", 0),
    ),
)


@WALKS
def test_walk_on_one_host(msrun: JobRunner, tmp_path: Path, heading: str, value: str, program: str, code: int) -> None:
    steps = read_walk(heading)
    job = FollowedJob(tmp_path, steps, value)
    done = msrun.start("--worker_num=6", "sh", "-c", program, cwd=tmp_path, env=job.variables).finish()
    assert done.code == code, done.stderr
    check(job, steps, 0)


@WALKS
def test_walk_on_hosts_that_one_launcher_drives(
    msrun: JobRunner, tmp_path: Path, heading: str, value: str, program: str, code: int
) -> None:
    steps = read_walk(heading)
    job = FollowedJob(tmp_path, steps, value)
    words = (f"--python={job.interpreter()}", "sh", "-c", program)
    done = Rehearsals(msrun, tmp_path).start("2x3", "--worker_num=6", *words, **job.variables).finish()
    assert done.code == code, done.stderr
    check(job, steps, 1)


@WALKS
def test_walk_on_hosts_where_msrun_is_typed_on_each(
    msrun: JobRunner, net: HostNet, tmp_path: Path, heading: str, value: str, program: str, code: int
) -> None:
    steps = read_walk(heading)
    job = FollowedJob(tmp_path, steps, value)
    size = ("--worker_num=6", "--local_worker_num=3", f"--master_addr={net.address(0)}")
    started = [
        msrun.start(
            *size,
            f"--node_rank={node}",
            f"--log_dir=node_{node}",
            *("sh", "-c", program),
            cwd=tmp_path,
            env=job.variables if node == 0 or heading == END else {},  # the other host is no agent's: it plans sooner
            prefix=net.prefix(node),
            log_dir=f"node_{node}",
        )
        for node in range(2)
    ]
    ended = [one.finish() for one in started]
    assert [one.code for one in ended] == [code, code], ended
    check(job, steps, 1)
