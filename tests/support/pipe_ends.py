"""Reading and writing of an agent's pipe by a test that has nothing else to do."""

from __future__ import annotations

from job_runner import wait_until

from msrun.launch.transport.link import AgentPipe


def read(pipe: AgentPipe) -> bytes:
    """Return the next bytes; empty at the end."""
    return bytes(wait_until(lambda: (data := pipe.read()) is not None and [data], "bytes have come")[0])


def write_all(pipe: AgentPipe, data: bytes) -> None:
    """Send all bytes; OSError when the other side has gone."""

    def is_sent() -> bool:
        nonlocal data
        data = data[pipe.write(data) :]
        return not data

    wait_until(is_sent, "there is room for all")
