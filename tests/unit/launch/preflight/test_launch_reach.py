"""Whether a host reaches an address and port, over which way, and why not: between hosts where that is needed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_net import HostNet

from msrun.cluster.protocol import ReachResult
from msrun.launch.preflight.host_look import try_reach

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
from msrun.launch.preflight.host_look import try_reach
from msrun.planning.record_json import encode_record
print(json.dumps([encode_record(try_reach(address, port, 0.5)) for address, port in json.loads(sys.argv[1])]))
"""


def test_open_port_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert try_reach("127.0.0.1", server.getsockname()[1]) == ReachResult("", "127.0.0.1", "lo", is_own=True)


def test_closed_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert try_reach("127.0.0.1", port).error == "refused"


@pytest.mark.parametrize(
    ("address", "port", "error"),
    [("head", 80, "'head' is no address"), ("", 80, "'' is no address")],
)
def test_what_is_no_place_is_an_answer_and_no_exception(address: str, port: int, error: str) -> None:
    assert error in try_reach(address, port).error


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
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
            [*net.prefix(0), sys.executable, "-c", LISTEN, *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert listener.stdout is not None and listener.stdout.readline() == b"ready\n"
            yield net
        finally:
            listener.kill()
            listener.communicate()


def _ip(net: HostNet, host: int, *words: str) -> None:
    subprocess.run(["ip", "-n", net.namespace(host), *words], check=True, timeout=20)


def test_each_way_that_fails_is_named_by_the_address_that_it_begins_with(net: HostNet) -> None:
    cases: list[tuple[str, int, dict[str, Any]]] = [
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
