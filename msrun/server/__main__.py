"""`python -m msrun.server`: what every process with MS_ROLE=MS_PSERVER runs, of msrun or started by hand."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NoReturn

from msrun import contract
from msrun.errors import MsrunError
from msrun.runtime.joining.launchers import OWN_ADDRESS, find_cluster, joining_limit_s, silence_limit_s
from msrun.runtime.joining.meet import SERVER, Lifeline, describe_process, join, tell_server_places
from msrun.server.connection import publish
from msrun.server.serving import Server, say

BACKLOG = 1024
JOIN_S = 1800.0
"""Without MS_TOPO_TIMEOUT."""


def main() -> NoReturn:
    """Serve until msrun, or the scheduler of MS_ROLE, says that the workers have ended; exit status 0 then."""
    lifeline = None
    if contract.MSRUN_SERVER_TOKEN in os.environ:
        index = int(os.environ[contract.MS_NODE_ID].removeprefix(contract.server_name(0)[:-1]))
        own = os.environ[contract.MSRUN_SERVER_ADDRESS]
    else:
        try:
            index, own, lifeline = _register()
        except MsrunError as error:
            sys.stderr.write(f"msrun: error: {error}\n")
            sys.exit(error.exit_code)
    token = bytes.fromhex(os.environ[contract.MSRUN_SERVER_TOKEN])
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    listener = socket.create_server((own, 0), family=family, backlog=BACKLOG)
    server = Server(listener, token, index, int(os.environ[contract.MS_WORKER_NUM]))

    def end(_signum: int, _frame: object) -> NoReturn:
        say(f"server {index} ends: {server.service.describe()}")
        sys.exit(contract.EXIT_CLUSTER if lifeline is not None and lifeline.has_failed else contract.EXIT_OK)

    signal.signal(signal.SIGTERM, end)
    address, port = listener.getsockname()[:2]
    publish(index, address, port)
    say(f"server {index}, pid {os.getpid()}, listens on {address}:{port}")
    server.run()


def _register() -> tuple[int, str, Lifeline]:
    """Register with the scheduler of a job that was started by hand; returns the number, and the address of this host.

    Raises:
        WorldError: the variables of MS_ROLE=MS_PSERVER are not right, or not everybody came in time.
    """
    environ = os.environ
    found = find_cluster(environ, contract.ROLE_SERVER)
    assert found is not None, "the caller has this role"
    meeting, workers, _ = found
    limit_s, silence_s = joining_limit_s(environ, JOIN_S), silence_limit_s(environ)
    source = environ.get(OWN_ADDRESS, "")
    joined = join(meeting, workers, SERVER, -1, describe_process(environ), limit_s, silence_s, source)
    tell_server_places(environ, joined)
    return joined.rank, joined.own_address, Lifeline(joined.line, meeting.place)


if __name__ == "__main__":
    main()
