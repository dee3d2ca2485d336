"""How a rehearsal divides the machine: devices, cores, and what an agent knows of its user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrun.errors import ClusterError, UsageError
from msrun.launch import rehearsal
from msrun.launch.rehearsal import HostShare, check_addresses, share_machine
from msrun.planning.hosts.assignment import parse_rehearsal
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.placement.bind_options import CoreBinding
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec


def shares(text: str, environ: dict[str, str] | None = None, **options: Any) -> list[HostShare]:
    entries = parse_rehearsal(text)
    spec = LaunchSpec(
        program=Program("script", "/t.py"),
        worker_num=sum(entry.slots for entry in entries),
        local_worker_num=0,
        working_directory=Path("/"),
        log_dir=Path("/"),
        host_entries=entries,
        **options,
    )
    found = share_machine(spec, environ or {})
    return [found[entry] for entry in entries]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores and four GPUs, of which 3, 1, 2 and 0 are visible in this order."""
    facts = HostFacts("vm", "127.0.0.1", tuple(range(8)), gpus=("3", "1", "2", "0"))
    monkeypatch.setattr(rehearsal, "read_host_facts", lambda _environ: facts)


@pytest.mark.usefixtures("machine")
def test_no_device_and_no_core_is_of_two_hosts() -> None:
    first, second = shares("2x2")
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "3,1" and second.environment["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert (first.cpus, second.cpus) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.usefixtures("machine")
def test_more_workers_than_cores_share_all_of_them() -> None:
    assert [share.cpus for share in shares("3x3", device_target="cpu")] == [()] * 3
    named = CoreBinding(is_auto=False, devices={0: (7,)})
    assert [share.cpus for share in shares("2x1", device_target="cpu", bind_core=named)] == [()] * 2


@pytest.mark.usefixtures("machine")
def test_more_workers_than_devices_are_refused() -> None:
    with pytest.raises(UsageError, match=r"6 workers but 4 gpu devices visible on vm: .*--device_target cpu"):
        shares("3x2")
    with pytest.raises(UsageError, match="--env CUDA_VISIBLE_DEVICES: a rehearsal gives each host devices of its own"):
        shares("2x1", env=(("CUDA_VISIBLE_DEVICES", "0"),))


@pytest.mark.usefixtures("machine")
def test_agent_knows_its_user_and_nothing_of_the_launchers_shell() -> None:
    environ = {"HOME": "/no/such", "USER": "me", "FOO": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "/x"}
    (share,) = shares("1x1", environ, device_target="cpu")
    assert share.environment == {"HOME": "/no/such", "USER": "me", "CUDA_VISIBLE_DEVICES": ""}
    assert share.home == "/"


def test_address_that_does_not_answer_is_named() -> None:
    check_addresses(parse_rehearsal("3x1"))
    with pytest.raises(ClusterError, match=r"--rehearse: h is to be at 192.0.2.1, which does not answer here \(Cannot"):
        check_addresses((HostEntry("h", address="192.0.2.1", source="--rehearse"),))
