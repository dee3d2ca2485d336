"""A new connection to an agent that runs already: passes bytes between stdin and stdout and the agent's socket."""

from __future__ import annotations

import os
import selectors
import socket
import sys

from msrun.launch.remote.spool import connect_in, spool_path

READ_BYTES = 1 << 16
NO_AGENT = 69
"""Exit status when there is nothing to connect to; EX_UNAVAILABLE of sysexits.h."""


def main(job_id: str, number: int) -> None:
    """Serve until one side closes."""
    try:
        agent = connect_in(spool_path(job_id, number))
    except OSError as error:
        sys.stderr.write(f"msrun agent: no agent of this job runs here any more ({error.strerror})\n")
        os._exit(NO_AGENT)
    with selectors.PollSelector() as selector:  # epoll refuses a stdin that is a plain file
        for source in (0, agent):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                _pass_on(key.fileobj, agent)


def _pass_on(source: object, agent: socket.socket) -> None:
    data = agent.recv(READ_BYTES) if source is agent else os.read(0, READ_BYTES)
    if not data:
        os._exit(0)
    if source is agent:
        _write_all(data)
    else:
        agent.sendall(data)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
