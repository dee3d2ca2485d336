"""Jobs on one host, over SSH and rehearsed, that are hit at random: the end is right, in time, and complete."""

import pytest
from asked_cases import one_fast
from chaos_lives import CASES, HOSTS, SEED, carry_out_losses, carry_out_round, named, plan_losses, plan_round
from chaos_places import OneHost, OverSsh, Place
from fleet import FleetRunner
from rehearsal import Rehearsals
from ssh_net import SshNet

HEARTBEAT_S = 4
ON_SEVERAL_HOSTS = [(kind, index) for kind in ("ssh", "rehearsed") for index in range(CASES // 4)]


@pytest.fixture(scope="module")
def ssh_net(own_disk):
    with SshNet(HOSTS, private=[own_disk]) as hosts:
        yield hosts


@pytest.fixture
def place(request, msrun, tmp_path, kind):
    if kind == "one host":
        return OneHost(msrun, tmp_path)
    if kind == "rehearsed":
        return Place(Rehearsals(msrun, tmp_path))
    fleet = FleetRunner(msrun, request.getfixturevalue("ssh_net"), tmp_path)
    return OverSsh(fleet, request.getfixturevalue("own_disk") / tmp_path.name)


@pytest.mark.parametrize(
    ("kind", "index"), one_fast(*(("one host", index) for index in range(CASES)), *ON_SEVERAL_HOSTS)
)
def test_whatever_is_hit_the_end_is_right_and_leaves_nothing(place, kind, index):
    plan = plan_round(f"{SEED}-{kind}", index, place)
    with named(plan, index):
        carry_out_round(plan, place, HEARTBEAT_S)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "index"), ON_SEVERAL_HOSTS)
@pytest.mark.timeout(300)
def test_whatever_is_lost_the_job_goes_on_while_hosts_and_restarts_are_left(place, kind, index):
    losses = plan_losses(f"{SEED}-{kind}-{index}", place)
    with named(losses, index):
        carry_out_losses(losses, place, HEARTBEAT_S)
