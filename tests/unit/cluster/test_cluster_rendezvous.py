"""The listening socket of the store: on the address of the job only, and refused with its name when taken."""

from __future__ import annotations

import socket

import pytest

from msrun.cluster.rendezvous import listen
from msrun.errors import UsageError


def test_free_port_is_taken_on_the_given_address() -> None:
    with listen("127.0.0.1", 0) as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1" and port > 0
        with socket.create_connection((address, port), timeout=5):
            pass


def test_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"--master_port {port}: cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_port_is_free_again_right_after_a_job_used_it() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            listener.accept()[0].close()
    listen("127.0.0.1", port).close()
