"""Who has a port: this very process, others, nobody, and those that cannot be seen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from msrun.launch.preflight.checks import describe_port_owner


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_own_port_is_found(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
        taken.listen()
        port = taken.getsockname()[1]
        assert describe_port_owner(port).startswith(f"pid {os.getpid()} (")
    assert describe_port_owner(port) == ""


def test_connected_socket_of_the_port_is_no_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            own_port = client.getsockname()[1]
            assert describe_port_owner(own_port) == ""


def test_command_is_shown_without_secrets_and_cut() -> None:
    program = (
        "import socket, sys\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True)\nsys.stdin.read()"
    )
    words = [sys.executable, "-c", program, "--token", "hunter2", "x" * 500]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = describe_port_owner(int(process.stdout.readline()))
        assert process.stdin is not None
        process.stdin.close()
    assert text.startswith(f"pid {process.pid} ({sys.executable} -c ")
    assert "hunter2" not in text and len(text) < 120
