"""The scheduler of MS_ROLE by hand: the training script started with MS_ROLE=MS_SCHED, which ends inside init(), as one
with MS_ROLE=MS_PSERVER does."""

from __future__ import annotations

import atexit
import os
import runpy
import secrets
import sys
from collections.abc import Mapping
from typing import NoReturn

from msrun import contract
from msrun.errors import ClusterError, MsrunError, RendezvousTimeout
from msrun.runtime.joining.meet import serve_store
from msrun.runtime.joining.ms_role import RECOVERY, RECOVERY_NOTE, TIME_OUT, joining_limit_s, silence_limit_s
from msrun.runtime.joining.network import listen_at, listen_beside
from msrun.runtime.joining.registrar import Registrar
from msrun.runtime.joining.registry import Registry
from msrun.runtime.joining.spec import Meeting

TOKEN_BYTES = 32
INTERRUPTED = contract.EXIT_SIGNAL_BASE + 2
SERVER_PROGRAM = "msrun.runtime.server"
"""What msrun starts, too; run by its name, for it stands above this module."""


def run_scheduler(
    meeting: Meeting, world_size: int, servers: int, environ: Mapping[str, str], timeout_s: float
) -> NoReturn:
    """Serve the workers until all have left, then end this process, with 0 when all went well.

    The process ends here, whatever it was started by: pytest, which the documents start scripts with, would take a
    SystemExit for an error of its own. Functions registered with atexit run. Source: MindSpore's scheduler calls exit.
    """
    if environ.get(RECOVERY) == "1":
        sys.stderr.write(f"msrun: scheduler: {RECOVERY_NOTE}\n")
    try:
        serve(meeting, world_size, joining_limit_s(environ, timeout_s), silence_limit_s(environ), servers)
        status = contract.EXIT_OK
    except MsrunError as error:
        sys.stderr.write(f"msrun: error: {error}\n")
        status = error.exit_code
    except KeyboardInterrupt:
        status = INTERRUPTED
    _end_program(status)


def run_server() -> NoReturn:
    """Be a parameter server until all workers have left, then end this process, as `run_scheduler` does."""
    try:
        runpy.run_module(SERVER_PROGRAM, run_name="__main__")
        status = contract.EXIT_OK
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else contract.EXIT_OK
    except KeyboardInterrupt:
        status = INTERRUPTED
    _end_program(status)


def _end_program(status: int) -> NoReturn:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve(meeting: Meeting, world_size: int, limit_s: float, silence_s: int, servers: int = 0) -> None:
    """Take workers and parameter servers in, give them ranks and a store, and wait until all workers have left.

    Raises:
        RendezvousTimeout: not everybody came within the limit; those who did are told who is missing.
        ClusterError: a worker ended without leaving the world; the others are told.
        WorldError: the address cannot be listened on.
    """
    listener = listen_at(meeting)
    registrar = Registrar(listener, Registry(meeting.key, world_size, servers), "scheduler", silence_s)
    try:
        also = f" and {servers} parameter servers" if servers else ""
        registrar.say(f"waiting for {world_size} workers{also}")
        missing = registrar.gather(limit_s)
        if missing:
            reason = f"{TIME_OUT} {limit_s:g}: {missing}"
            registrar.fail(reason)
            raise RendezvousTimeout(reason)
        store_listener = listen_beside(listener)
        port = int(store_listener.getsockname()[1])
        store = serve_store(store_listener)
        registrar.answer(port, secrets.token_hex(TOKEN_BYTES) if servers else "")
        registrar.say(f"all {world_size} workers{also} have come")
        lost = registrar.watch()
        if lost:
            reason = f"{lost} ended without release(): it failed, or its host is lost"
            registrar.fail(reason)
            raise ClusterError(reason)
        registrar.say("all workers have left")
        del store
    finally:
        registrar.close()
