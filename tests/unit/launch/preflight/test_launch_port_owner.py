"""Who has a port: this very process, others, nobody, and those that cannot be seen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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


def test_owner_that_is_not_visible_gives_nothing(tmp_path: Path) -> None:
    assert describe_port_owner(80, tmp_path) == ""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0\n"
    )
    assert describe_port_owner(80, tmp_path) == ""
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "3").symlink_to("socket:[4242]")
    (tmp_path / "7" / "cmdline").write_bytes(b"nginx\0-g\0")
    assert describe_port_owner(80, tmp_path) == "pid 7 (nginx -g)"
    assert describe_port_owner(81, tmp_path) == ""
