"""What is looked up on this host to find its place among others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from msrun.agent.host import host_facts
from msrun.launch import host_discovery
from msrun.launch.host_discovery import count_devices, discover_host, is_under_scheduler, view_host, with_own_address
from msrun.planning.discovery.host_options import HostOptions
from msrun.planning.placement.host import Device
from msrun.planning.settings import FoundSetting

OPTIONS = {
    "worker_num": 8, "local_worker_num": None, "node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0,
    "device_target": "auto",
}  # fmt: skip
FOUND = HostOptions({"node_rank": 0, "master_addr": "n1"}, (FoundSetting("master_addr", "n1", "LIST"),))


def have(monkeypatch: pytest.MonkeyPatch, *, gpus: int, npus: int) -> None:
    for name, count in (("read_gpus", gpus), ("read_npus", npus)):
        found = tuple(Device(str(number)) for number in range(count))
        assert hasattr(host_facts, name)
        monkeypatch.setattr(host_discovery, name, lambda found=found: found)


def resolve_to(monkeypatch: pytest.MonkeyPatch, name: str, *own: str) -> None:
    """Let every name stand for one address, and this host have those of `own`."""
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [entry])
    monkeypatch.setattr(host_discovery, "own_addresses", lambda: dict.fromkeys(["127.0.0.1", "::1", *own], "eth0"))


@pytest.mark.parametrize(
    ("target", "environ", "count"),
    [
        ("auto", {}, 2),
        ("gpu", {}, 4),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "1,3"}, 2),
        ("auto", {"ASCEND_RT_VISIBLE_DEVICES": ""}, 4),
        ("cpu", {}, 0),
    ],
)
def test_devices_count_that_a_job_would_use(
    monkeypatch: pytest.MonkeyPatch, target: str, environ: dict[str, str], count: int
) -> None:
    have(monkeypatch, gpus=4, npus=2)
    assert count_devices(target, environ) == count


def test_host_is_named_without_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "train-1.train.ns.svc.cluster.local")
    host = view_host({})
    assert (host.name, host.domain) == ("train-1", "train.ns.svc.cluster.local")
    assert host.cpu_count >= 1


def test_node_0_goes_by_its_address_where_its_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.1.1", "10.0.0.7", "fd77::7", "169.254.1.1")
    found = with_own_address(FOUND)
    assert found.options == {"node_rank": 0, "master_addr": "10.0.0.7"}
    assert found.settings == (FoundSetting("master_addr", "10.0.0.7", "own address; LIST says n1"),)


@pytest.mark.parametrize(
    ("name", "own"), [("10.0.0.7", ["10.0.0.7"]), ("127.0.1.1", ["10.0.0.7", "10.1.0.7"]), ("127.0.1.1", [])]
)
def test_else_it_keeps_its_name(monkeypatch: pytest.MonkeyPatch, name: str, own: list[str]) -> None:
    resolve_to(monkeypatch, name, *own)
    assert with_own_address(FOUND) is FOUND


@pytest.mark.parametrize(
    ("rank", "given", "address"), [("0", {}, "10.0.0.7"), ("1", {}, "n1"), ("0", {"master_addr": "n1"}, None)]
)
def test_other_nodes_and_given_names_stay(
    monkeypatch: pytest.MonkeyPatch, rank: str, given: dict[str, Any], address: str | None
) -> None:
    resolve_to(monkeypatch, "127.0.1.1", "10.0.0.7")
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": rank, "PET_MASTER_ADDR": "n1"}
    found = discover_host({**OPTIONS, **given}, set(given), environ)
    assert found.options.get("master_addr") == address


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "a\nb"}, True),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "n1"}, False),
        ({"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "n1"}, False),
        ({}, False),
    ],
)
def test_what_people_export_themselves_is_no_scheduler(environ: dict[str, str], expected: bool) -> None:
    assert is_under_scheduler(environ) is expected
