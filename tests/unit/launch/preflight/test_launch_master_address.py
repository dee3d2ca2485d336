"""Where the scheduler listens: at the given address if node 0 has it, else where node 0 is known to be reached."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_reports import make_entries, make_report
from host_net import HostNet

from msrun.cluster.host_report import HostAddress
from msrun.errors import UsageError
from msrun.launch.preflight.checks import try_reach
from msrun.launch.preflight.fleet_checks import HostAnswer, choose_master_address

ETH = HostAddress("10.0.0.1", "eth0", 24)
MANAGEMENT = HostAddress("192.168.7.1", "eth1", 24)
DOCKER = HostAddress("172.17.0.1", "docker0", 16)
IPV6 = HostAddress("fd77::1", "eth0", 64)
ALL = (DOCKER, MANAGEMENT, ETH, IPV6)


def answers(reached_as="", first=None, others=None):
    """Return the answers of three hosts, the first of which has the addresses ALL."""
    found = {0: HostAnswer(make_report(0, **{"addresses": ALL, **(first or {})}), 0.0, 0.0, reached_as)}
    for node in (1, 2):
        found[node] = HostAnswer(make_report(node, **(others or {})), 0.0, 0.0, f"10.0.0.{node + 1}")
    return found


CHOICES = [
    ("as it was reached", {"reached_as": "10.0.0.1"}, "10.0.0.1"),
    ("as it was reached over IPv6", {"reached_as": "fd77::1"}, "fd77::1"),
    ("reached by another address than its own", {"reached_as": "203.0.113.5"}, "10.0.0.1"),
    ("reached over loopback", {"reached_as": "127.0.0.1"}, "10.0.0.1"),
    ("as others see their launcher", {"others": {"ssh_client": "192.168.7.1"}}, "192.168.7.1"),
    ("as sshd saw it", {"first": {"ssh_server": "192.168.7.1"}}, "192.168.7.1"),
    ("sshd behind a forwarded port", {"first": {"ssh_server": "127.0.0.1"}}, "10.0.0.1"),
    ("in a network of all", {}, "10.0.0.1"),
    ("nothing in common", {"others": {"addresses": ()}}, "172.17.0.1"),
    ("netmask unknown", {"first": {"addresses": (HostAddress("10.5.0.1", "ib0", 0),)}}, "10.5.0.1"),
]


@pytest.mark.parametrize(
    ("given", "expected"), [(case[1], case[2]) for case in CHOICES], ids=[case[0] for case in CHOICES]
)
def test_address_is_one_that_was_seen_to_work(given, expected):
    chosen = choose_master_address(make_entries(3), answers(**given))
    assert chosen.address == expected and chosen.reason


def test_given_address_comes_before_the_host_list_and_that_before_what_is_found():
    entries = make_entries(3, address="192.168.7.1", source="hosts.txt, line 1")
    found = answers(reached_as="10.0.0.1")
    assert choose_master_address(entries, found, "fd77:0::1").address == "fd77::1"
    assert choose_master_address(entries, found).address == "192.168.7.1"
    assert choose_master_address(make_entries(3), found).address == "10.0.0.1"


def test_given_name_is_what_node_0_takes_it_for():
    found = answers(first={"master_address": "192.168.7.1"})
    assert choose_master_address(make_entries(3), found, "head").address == "192.168.7.1"


REFUSED = [
    ("10.0.0.2", "", "10.0.0.2: not an address of h1, the first host, which runs the scheduler; give one of "),
    ("127.0.0.1", "", "127.0.0.1: other hosts cannot reach 127.0.0.1; give an address of h1 that they can"),
    ("head", "127.0.1.1", "head: other hosts cannot reach 127.0.1.1"),
    ("head", "10.0.0.77", "head: not an address of h1"),
]


@pytest.mark.parametrize(("given", "resolved", "text"), REFUSED)
def test_address_that_node_0_does_not_have_is_refused(given, resolved, text):
    with pytest.raises(UsageError) as caught:
        choose_master_address(make_entries(3), answers(first={"master_address": resolved}), given)
    assert str(caught.value).startswith(f"--master_addr {text}")


def test_wrong_address_in_the_host_list_names_its_line():
    entries = make_entries(3, address="10.0.0.99", source="hosts.txt, line 1")
    with pytest.raises(UsageError, match=r"hosts.txt, line 1: address 10.0.0.99: not an address of h1"):
        choose_master_address(entries, answers())


def test_host_without_any_address_needs_one_given():
    with pytest.raises(UsageError, match="give --master_addr"):
        choose_master_address(make_entries(3), answers(first={"addresses": ()}))


def test_one_host_needs_no_address_that_others_reach():
    assert choose_master_address(make_entries(1), {0: answers()[0]}).address == "127.0.0.1"


ROOT = Path(__file__).resolve().parents[4]
PORT = 41233
LISTEN = f"""
import socket, sys
families = {{True: socket.AF_INET6, False: socket.AF_INET}}
servers = [socket.create_server((address, {PORT}), family=families[":" in address]) for address in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.read()
"""
TRY = """
import json, sys
from msrun.launch.preflight.checks import try_reach
from msrun.planning.record import encode_record
print(json.dumps([encode_record(try_reach(address, port, 0.5)) for address, port in json.loads(sys.argv[1])]))
"""


@pytest.mark.parametrize(
    ("address", "port", "error"), [("head", 80, "'head' is no address"), ("", 80, "'' is no address")]
)
def test_what_is_no_place_is_an_answer_and_no_exception(address, port, error):
    assert error in try_reach(address, port).error


@pytest.fixture(scope="module")
def net():
    """Two hosts; the first listens on all its addresses, the second has two interfaces."""
    with HostNet(2) as net:
        _ip(net, 1, "link", "add", "eth1", "type", "veth", "peer", "name", "nobody")
        _ip(net, 1, "link", "set", "nobody", "up")
        _ip(net, 1, "address", "add", "192.168.77.5/24", "dev", "eth1")
        _ip(net, 1, "link", "set", "eth1", "up")
        _ip(net, 1, "route", "add", "10.99.0.0/16", "dev", "eth1")
        _ip(net, 1, "route", "add", "blackhole", "10.98.0.1/32")
        _ip(net, 1, "route", "add", "unreachable", "10.97.0.1/32")
        _ip(net, 0, "address", "add", "10.77.1.1/32", "dev", "eth0")
        _ip(net, 1, "route", "add", "10.77.1.1/32", "dev", "eth0", "src", "192.168.77.5")
        _ip(net, 0, "route", "add", "blackhole", "192.168.77.0/24")  # the answers are dropped, as by a firewall
        addresses = [net.address(0), "10.77.1.1", *([net.address6(0)] if net.has_ipv6 else [])]
        listener = subprocess.Popen(
            [*net.prefix(0), sys.executable, "-c", LISTEN, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert listener.stdout is not None and listener.stdout.readline() == b"ready\n"
            yield net
        finally:
            listener.kill()
            listener.communicate()


def _ip(net, host, *words):
    subprocess.run(["ip", "-n", net.namespace(host), *words], check=True, timeout=20)


def test_each_way_that_fails_is_named_by_the_address_that_it_begins_with(net):
    cases = [
        (net.address(0), PORT, {"error": "", "source": net.address(1), "interface": "eth0"}),
        (net.address(0), PORT + 1, {"error": "refused", "source": net.address(1), "interface": "eth0"}),
        ("10.77.1.1", PORT, {"error": "timed out after 0.5 s", "source": "192.168.77.5", "interface": "eth1"}),
        ("10.99.0.1", PORT, {"error": "timed out after 0.5 s", "source": "192.168.77.5", "interface": "eth1"}),
        ("10.98.0.1", PORT, {"error": "the route there is a blackhole", "source": "", "interface": ""}),
        ("10.97.0.1", PORT, {"error": "no route to host", "source": "", "interface": ""}),
        ("203.0.113.1", PORT, {"error": "network is unreachable", "source": "", "interface": ""}),
        (net.address(1), PORT, {"error": "refused", "source": net.address(1), "interface": "eth0", "is_own": True}),
    ]
    if net.has_ipv6:
        cases.append((net.address6(0), PORT, {"error": "", "source": net.address6(1), "interface": "eth0"}))
    done = subprocess.run(
        [*net.prefix(1), sys.executable, "-c", TRY, json.dumps([case[:2] for case in cases])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [{"is_own": False, **expected} for _, _, expected in cases]
