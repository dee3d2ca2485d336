"""`python -m msrun.runtime.server`: what msrun starts in every process with MS_ROLE=MS_PSERVER."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NoReturn

from msrun import contract
from msrun.runtime.server.meeting import publish
from msrun.runtime.server.serving import Server, say

BACKLOG = 1024


def main() -> NoReturn:
    """Serve until msrun says that the workers have ended; exit status 0 then."""
    index = int(os.environ[contract.MS_NODE_ID].removeprefix(contract.server_name(0)[:-1]))
    token = bytes.fromhex(os.environ[contract.MSRUN_SERVER_TOKEN])
    own = os.environ[contract.MSRUN_SERVER_ADDRESS]
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    listener = socket.create_server((own, 0), family=family, backlog=BACKLOG)
    server = Server(listener, token, index, int(os.environ[contract.MS_WORKER_NUM]))

    def end(_signum: int, _frame: object) -> NoReturn:
        say(f"server {index} ends: {server.service.describe()}")
        sys.exit(contract.EXIT_OK)

    signal.signal(signal.SIGTERM, end)
    address, port = listener.getsockname()[:2]
    publish(index, address, port)
    say(f"server {index}, pid {os.getpid()}, listens on {address}:{port}")
    server.run()


if __name__ == "__main__":
    main()
