"""What a host decides of several before it talks to any: who has the scheduler, where logs go, what a dry run shows."""

import socket
from pathlib import Path

import pytest
from plans import small_spec

from msrun.agent.host import host_facts
from msrun.cluster import rendezvous
from msrun.cluster.rendezvous import UnresolvedName, resolve_address
from msrun.errors import ClusterError, UsageError
from msrun.launch import rendezvous as module
from msrun.launch.preflight.checks import inspect_host
from msrun.launch.rendezvous import (
    UNKNOWN,
    assume_fleet,
    count_devices,
    discover_host,
    has_scheduler,
    is_under_scheduler,
    local_part,
    view_host,
    with_own_address,
)
from msrun.launch.transport import opener
from msrun.launch.transport.opener import check_addresses, share_machine
from msrun.planning.host_options import HostOptions
from msrun.planning.hosts import Fleet, HostAssignment, HostEntry, parse_rehearsal
from msrun.planning.placement.host import Device, HostFacts
from msrun.planning.settings import FoundSetting
from msrun.planning.spec import CoreBinding

FACTS = HostFacts("here", "127.0.0.1", (0, 1))


def spec_for(**changes):
    place = {"local_worker_num": 2, "master_addr": "10.0.0.7", "log_dir": Path("/logs")}
    return small_spec(Path("/"), 4, **{**place, **changes})


@pytest.fixture(autouse=True)
def this_host(monkeypatch):
    monkeypatch.setattr(module, "own_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.7": "eth0"})


@pytest.mark.parametrize(
    ("node_rank", "address", "has"),
    [(0, "10.0.0.7", True), (1, "10.0.0.7", False), (-1, "10.0.0.7", True), (-1, "10.0.0.8", False)],
)
def test_scheduler_is_on_node_0_or_where_the_address_is(node_rank, address, has):
    assert has_scheduler(spec_for(node_rank=node_rank), address) is has


def test_node_0_without_the_address_is_refused():
    with pytest.raises(UsageError, match=r"--master_addr 10.0.0.7: not an address of this host.* 10.0.0.7, 127.0.0.1"):
        has_scheduler(spec_for(node_rank=0), "10.0.0.8")
    assert has_scheduler(spec_for(node_rank=0, stands_for=HostEntry("h")), "127.0.0.2"), "of a rehearsal"


def test_hosts_that_share_a_disk_write_different_files():
    assignments = tuple(HostAssignment(node, "h", f"10.0.0.{node}", (node,), (0,)) for node in range(2))
    folders = [local_part(spec_for(), Fleet(node, assignments, "10.0.0.0", "eth0")).log_dir for node in range(2)]
    assert folders == [Path("/logs"), Path("/logs/node_1")]


@pytest.mark.parametrize(
    ("changes", "node_rank", "ranks"),
    [
        ({}, 0, [(0, 1), (2, 3)]),
        ({"node_rank": 1}, 1, [(0, 1), (2, 3)]),
        ({"master_addr": "10.0.0.8"}, 1, [(0, 1), (2, 3)]),
        ({"worker_num": 5}, 0, [(0, 1), (2, 3), (4,)]),
        ({"worker_num": 3, "node_rank": 1}, 1, [(0,), (1, 2)]),
        ({"worker_num": 5, "node_rank": 2}, 2, [(0, 1), (2,), (3, 4)]),
    ],
)
def test_dry_run_without_a_table_assumes_equal_hosts(changes, node_rank, ranks):
    fleet = assume_fleet(spec_for(**changes), FACTS)
    assert fleet.is_assumed and fleet.node_rank == node_rank
    assert [assignment.ranks for assignment in fleet.hosts] == ranks
    assert (fleet.own.name, fleet.own.address, fleet.interface) == ("here", "10.0.0.7", "eth0")
    assert {assignment.name for assignment in fleet.hosts if assignment.node_rank != node_rank} == {UNKNOWN}


def test_dry_run_with_a_table_shows_its_hosts():
    table = (HostAssignment(0, "a", "10.0.0.8", (0, 1), (0, 1)), HostAssignment(1, "b", "10.0.0.7", (2, 3), (4, 5)))
    fleet = assume_fleet(spec_for(node_rank=1, table_hosts=table), FACTS)
    assert not fleet.is_assumed and fleet.own is table[1]


def test_name_that_stands_for_loopback_here_is_refused(monkeypatch):
    """Debian and its kin write their own name into /etc/hosts as 127.0.1.1."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(UsageError, match=r"--master_addr debian: is 127.0.1.1 .* which no other can reach"):
        resolve_address("debian")
    assert resolve_address("localhost") == "127.0.1.1"  # asked for: all msruns are on this machine


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no-such-host.invalid", "Name or service not known"), ("a" * 300, "not a host name"), ("..", "not a host name")],
)
def test_name_that_nobody_knows_is_refused(name, reason, monkeypatch):
    def fail(*_, **__):
        raise rendezvous.socket.gaierror(-2, "Name or service not known")

    if name.endswith("invalid"):  # no name server is asked
        monkeypatch.setattr(rendezvous.socket, "getaddrinfo", fail)
    with pytest.raises(UnresolvedName, match=rf"cannot be resolved \({reason}\)"):
        resolve_address(name)


def test_check_warns_of_a_name_that_nobody_knows_yet(monkeypatch):
    def resolve(name):
        raise UnresolvedName(f"{name}: not known")

    monkeypatch.setattr("msrun.launch.preflight.checks.resolve_address", resolve)
    (port,) = [finding for finding in inspect_host(spec_for(), {}) if finding.name == "master_port"]
    assert (port.status, port.text) == ("warn", "10.0.0.7: not known; a run waits for it as long as for a host")


DEFAULTS = {
    "worker_num": 8, "local_worker_num": None, "node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0,
    "device_target": "auto",
}  # fmt: skip
FOUND = HostOptions({"node_rank": 0, "master_addr": "n1"}, (FoundSetting("master_addr", "n1", "LIST"),))


def have(monkeypatch, *, gpus, npus):
    for name, count in (("read_gpus", gpus), ("read_npus", npus)):
        found = tuple(Device(str(number)) for number in range(count))
        assert hasattr(host_facts, name)
        monkeypatch.setattr(module, name, lambda found=found: found)


def resolve_to(monkeypatch, name, *own):
    """Let every name stand for one address, and this host have those of `own`."""
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [entry])
    monkeypatch.setattr(module, "own_addresses", lambda: dict.fromkeys(["127.0.0.1", "::1", *own], "eth0"))


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
def test_devices_count_that_a_job_would_use(monkeypatch, target, environ, count):
    have(monkeypatch, gpus=4, npus=2)
    assert count_devices(target, environ) == count


def test_host_is_named_without_its_domain(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "train-1.train.ns.svc.cluster.local")
    host = view_host({})
    assert (host.name, host.domain) == ("train-1", "train.ns.svc.cluster.local")
    assert host.cpu_count >= 1


def test_node_0_goes_by_its_address_where_its_name_is_loopback(monkeypatch):
    resolve_to(monkeypatch, "127.0.1.1", "10.0.0.7", "fd77::7", "169.254.1.1")
    found = with_own_address(FOUND)
    assert found.options == {"node_rank": 0, "master_addr": "10.0.0.7"}
    assert found.settings == (FoundSetting("master_addr", "10.0.0.7", "own address; LIST says n1"),)


@pytest.mark.parametrize(
    ("name", "own"), [("10.0.0.7", ["10.0.0.7"]), ("127.0.1.1", ["10.0.0.7", "10.1.0.7"]), ("127.0.1.1", [])]
)
def test_else_it_keeps_its_name(monkeypatch, name, own):
    resolve_to(monkeypatch, name, *own)
    assert with_own_address(FOUND) is FOUND


@pytest.mark.parametrize(
    ("rank", "given", "address"), [("0", {}, "10.0.0.7"), ("1", {}, "n1"), ("0", {"master_addr": "n1"}, None)]
)
def test_other_nodes_and_given_names_stay(monkeypatch, rank, given, address):
    resolve_to(monkeypatch, "127.0.1.1", "10.0.0.7")
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": rank, "PET_MASTER_ADDR": "n1"}
    found = discover_host({**DEFAULTS, **given}, set(given), environ)
    assert found.options.get("master_addr") == address


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "a\nb"}, True),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "n1"}, False),
        ({"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "n1"}, False),
        ({"SKYPILOT_NODE_RANK": "x", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "a\nb"}, False),
        ({}, False),
    ],
)
def test_what_people_export_themselves_is_no_scheduler(environ, expected):
    assert is_under_scheduler(environ) is expected


def shares(text, environ=None, **options):
    entries = parse_rehearsal(text)
    workers = sum(entry.slots for entry in entries)
    spec = small_spec(Path("/"), workers, local_worker_num=0, host_entries=entries, **options)
    found = share_machine(spec, environ or {})
    return [found[entry] for entry in entries]


@pytest.fixture
def machine(monkeypatch):
    """Eight cores and four GPUs, of which 3, 1, 2 and 0 are visible in this order."""
    facts = HostFacts("vm", "127.0.0.1", tuple(range(8)), gpus=("3", "1", "2", "0"))
    monkeypatch.setattr(opener, "read_host_facts", lambda _environ: facts)


@pytest.mark.usefixtures("machine")
def test_no_device_and_no_core_is_of_two_hosts():
    first, second = shares("2x2")
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "3,1" and second.environment["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert (first.cpus, second.cpus) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.usefixtures("machine")
def test_more_workers_than_cores_share_all_of_them():
    assert [share.cpus for share in shares("3x3", device_target="cpu")] == [()] * 3
    named = CoreBinding(is_auto=False, devices={0: (7,)})
    assert [share.cpus for share in shares("2x1", device_target="cpu", bind_core=named)] == [()] * 2


@pytest.mark.usefixtures("machine")
def test_more_workers_than_devices_are_refused():
    with pytest.raises(UsageError, match=r"6 workers but 4 gpu devices visible on vm: .*--device_target cpu"):
        shares("3x2")
    with pytest.raises(UsageError, match="--env CUDA_VISIBLE_DEVICES: a rehearsal gives each host devices of its own"):
        shares("2x1", env=(("CUDA_VISIBLE_DEVICES", "0"),))


@pytest.mark.usefixtures("machine")
def test_agent_knows_its_user_and_nothing_of_the_launchers_shell():
    environ = {"HOME": "/no/such", "USER": "me", "FOO": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "/x"}
    (share,) = shares("1x1", environ, device_target="cpu")
    assert share.environment == {"HOME": "/no/such", "USER": "me", "CUDA_VISIBLE_DEVICES": ""}
    assert share.home == "/"


def test_address_that_does_not_answer_is_named():
    check_addresses(parse_rehearsal("3x1"))
    with pytest.raises(ClusterError, match=r"--rehearse: h is to be at 192.0.2.1, which does not answer here \(Cannot"):
        check_addresses((HostEntry("h", address="192.0.2.1", source="--rehearse"),))
