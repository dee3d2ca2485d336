"""A new connection to an agent that runs already: passes bytes between stdin and stdout and the agent's socket."""

from __future__ import annotations

import os
import select
import socket
import sys

from msrun.launch.remote.spool import connect_in, spool_path

READ_BYTES = 1 << 16
NO_AGENT = 69
"""Exit status when there is nothing to connect to; EX_UNAVAILABLE of sysexits.h."""


def main(job_id: str, node_rank: int) -> None:
    """Serve until one side closes."""
    try:
        agent = connect_in(spool_path(job_id, node_rank))
    except OSError as error:
        sys.stderr.write(f"msrun agent: no agent of this job runs here any more ({error.strerror})\n")
        os._exit(NO_AGENT)
    sources: list[int | socket.socket] = [0, agent]
    while True:
        ready, _, _ = select.select(sources, [], [])
        for source in ready:
            data = os.read(0, READ_BYTES) if source != agent else agent.recv(READ_BYTES)
            if not data:
                os._exit(0)
            if source != agent:
                agent.sendall(data)
            else:
                _write_all(data)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
