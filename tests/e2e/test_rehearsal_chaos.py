"""Rehearsed jobs that are hit at random: the end is right, in time, and complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_lives import SEED, TESTS, carry_out_losses, carry_out_round, named, plan_losses, plan_round, rounds
from chaos_places import Rehearsed
from job_runner import JobRunner
from rehearsal import Rehearsals

pytestmark = pytest.mark.slow

HEARTBEAT_S = 4


def place(runner: JobRunner, tmp_path: Path, index: int) -> Rehearsed:
    """Return the place of a round, in a folder of its own."""
    cwd = tmp_path / f"round_{index}"
    cwd.mkdir()
    return Rehearsed(Rehearsals(runner, cwd))


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.timeout(600)
def test_whatever_is_hit_the_end_is_right_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    for index in rounds(number):
        plan = plan_round(f"{SEED}-rehearsed-{index}", has_network=False)
        with named(plan, index), JobRunner() as runner:
            carry_out_round(plan, place(runner, tmp_path, index), HEARTBEAT_S)


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.timeout(900)
def test_whatever_is_lost_the_job_goes_on_while_hosts_and_restarts_are_left(tmp_path: Path, number: int) -> None:
    for index in rounds(number):
        losses = plan_losses(f"{SEED}-rehearsal-{index}", has_network=False)
        with named(losses, index), JobRunner() as runner:
            carry_out_losses(losses, place(runner, tmp_path, index), HEARTBEAT_S)
