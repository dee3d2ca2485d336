"""Jobs on several hosts, over SSH and rehearsed, that are hit at random: the end is right, in time, and complete."""

import pytest
from chaos_lives import HOSTS, SEED, TESTS, carry_out_losses, carry_out_round, named, plan_losses, plan_round, rounds
from chaos_places import OverSsh, Place
from fleet import FleetRunner
from job_runner import JobRunner
from rehearsal import Rehearsals
from ssh_net import SshNet

pytestmark = pytest.mark.slow

HEARTBEAT_S = 4


@pytest.fixture(scope="module")
def ssh_net(own_disk):
    with SshNet(HOSTS, private=[own_disk]) as hosts:
        yield hosts


@pytest.fixture(params=["ssh", "rehearsed"])
def place(request, tmp_path):
    """Gives the place of a round, in folders of its own."""

    def make(runner, index):
        cwd = tmp_path / f"round_{index}"
        cwd.mkdir()
        if request.param == "rehearsed":
            return Place(Rehearsals(runner, cwd))
        fleet = FleetRunner(runner, request.getfixturevalue("ssh_net"), cwd)
        return OverSsh(fleet, request.getfixturevalue("own_disk") / f"{tmp_path.name}_{index}")

    return make


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.timeout(600)
def test_whatever_is_hit_the_end_is_right_and_leaves_nothing(place, number):
    for index in rounds(number):
        with JobRunner() as runner:
            where = place(runner, index)
            plan = plan_round(f"{SEED}-{type(where).__name__}", index, has_network=where.has_network)
            with named(plan, index):
                carry_out_round(plan, where, HEARTBEAT_S)


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.timeout(900)
def test_whatever_is_lost_the_job_goes_on_while_hosts_and_restarts_are_left(place, number):
    for index in rounds(number):
        with JobRunner() as runner:
            where = place(runner, index)
            losses = plan_losses(f"{SEED}-{type(where).__name__}-{index}", has_network=where.has_network)
            with named(losses, index):
                carry_out_losses(losses, where, HEARTBEAT_S)
