"""Jobs over SSH whose processes and cables are hit at random: the end is right, in time, and complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_lives import (
    HITS,
    HOSTS,
    SEED,
    TESTS,
    Round,
    carry_out_losses,
    carry_out_round,
    named,
    plan_losses,
    plan_round,
    rounds,
)
from chaos_places import OverSsh
from fleet import FleetRunner
from job_runner import JobRunner
from ssh_net import SshNet

pytestmark = pytest.mark.slow

HEARTBEAT_S = 4


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is another one on every host."""
    return tmp_path_factory.mktemp("own_disk")


@pytest.fixture(scope="module")
def net(own_disk: Path) -> Iterator[SshNet]:
    """Hosts, and one to start from."""
    with SshNet(HOSTS, private=[own_disk]) as hosts:
        yield hosts


def place(runner: JobRunner, net: SshNet, tmp_path: Path, own_disk: Path, index: int) -> OverSsh:
    """Return the place of a round, in folders of its own."""
    cwd = tmp_path / f"round_{index}"
    cwd.mkdir()
    return OverSsh(FleetRunner(runner, net, cwd), own_disk / f"{tmp_path.name}_{index}")


def test_plans_hit_everything_on_every_host() -> None:
    plans = [plan_round(f"coverage-{number}", has_network=True) for number in range(2000)]
    assert {(plan.hit, plan.host) for plan in plans} == {(hit, host) for hit in HITS for host in range(Round.hosts)}
    assert plan_round("coverage-7", has_network=True) == plans[7]


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.timeout(600)
def test_whatever_is_hit_the_end_is_right_and_leaves_nothing(
    net: SshNet, own_disk: Path, tmp_path: Path, number: int
) -> None:
    for index in rounds(number):
        plan = plan_round(f"{SEED}-fleet-{index}", has_network=True)
        with named(plan, index), JobRunner() as runner:
            carry_out_round(plan, place(runner, net, tmp_path, own_disk, index), HEARTBEAT_S)


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.timeout(900)
def test_whatever_is_lost_the_job_goes_on_while_hosts_and_restarts_are_left(
    net: SshNet, own_disk: Path, tmp_path: Path, number: int
) -> None:
    for index in rounds(number):
        losses = plan_losses(f"{SEED}-losses-{index}", has_network=True)
        with named(losses, index), JobRunner() as runner:
            carry_out_losses(losses, place(runner, net, tmp_path, own_disk, index), HEARTBEAT_S)
