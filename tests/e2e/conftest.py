"""Hosts for the jobs on several of them: reached over SSH, with msrun typed on each, or rehearsed here."""

import pytest
from fleet import FleetRunner
from host_net import HostNet, TypedHosts
from rehearsal import Rehearsals
from ssh_net import SshNet


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory):
    """A folder that is another one on every host of `ssh_net`."""
    return tmp_path_factory.mktemp("own_disk")


@pytest.fixture(scope="module")
def ssh_net(own_disk):
    """Three hosts with SSH, and one to start from."""
    with SshNet(3, private=[own_disk]) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun, ssh_net, tmp_path):
    return FleetRunner(msrun, ssh_net, tmp_path)


@pytest.fixture(scope="module")
def host_net():
    """Three hosts."""
    with HostNet(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(msrun, host_net, tmp_path):
    return TypedHosts(msrun, host_net, tmp_path)


@pytest.fixture
def rehearsals(msrun, tmp_path):
    return Rehearsals(msrun, tmp_path)


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """Eleven batches of 32 in MNIST's form."""
    import numpy as np

    from msrun.data import write_idx

    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    write_idx(folder / "train-images-idx3-ubyte", rng.integers(0, 256, (352, 28, 28), dtype=np.uint8))
    write_idx(folder / "train-labels-idx1-ubyte", rng.integers(0, 10, 352, dtype=np.uint8))
    return folder
