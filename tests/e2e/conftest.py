"""Hosts for the jobs on several of them: reached over SSH, with msrun typed on each, or rehearsed here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import FleetRunner
from host_net import HostNet, TypedHosts
from job_runner import JobRunner
from rehearsal import Rehearsals
from ssh_net import SshNet


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is another one on every host of `ssh_net`."""
    return tmp_path_factory.mktemp("own_disk")


@pytest.fixture(scope="module")
def ssh_net(own_disk: Path) -> Iterator[SshNet]:
    """Three hosts with SSH, and one to start from."""
    with SshNet(3, private=[own_disk]) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun: JobRunner, ssh_net: SshNet, tmp_path: Path) -> FleetRunner:
    return FleetRunner(msrun, ssh_net, tmp_path)


@pytest.fixture(scope="module")
def host_net() -> Iterator[HostNet]:
    """Three hosts."""
    with HostNet(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(msrun: JobRunner, host_net: HostNet, tmp_path: Path) -> TypedHosts:
    return TypedHosts(msrun, host_net, tmp_path)


@pytest.fixture
def rehearsals(msrun: JobRunner, tmp_path: Path) -> Rehearsals:
    return Rehearsals(msrun, tmp_path)


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven batches of 32 in MNIST's form."""
    import numpy as np

    from msrun.data import write_idx

    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    write_idx(folder / "train-images-idx3-ubyte", rng.integers(0, 256, (352, 28, 28), dtype=np.uint8))
    write_idx(folder / "train-labels-idx1-ubyte", rng.integers(0, 10, 352, dtype=np.uint8))
    return folder
