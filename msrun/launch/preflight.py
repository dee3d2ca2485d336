"""Checks on this host before anything starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from msrun.agent.host_facts import LOOPBACK
from msrun.cluster.rendezvous import listen
from msrun.errors import UsageError
from msrun.planning.spec import LaunchSpec


def check_host(spec: LaunchSpec) -> None:
    """Refuse what this host cannot do.

    Raises:
        UsageError: working directory missing, log directory impossible, a module that does not exist.
    """
    _check_log_dir(spec.log_dir)
    if spec.program.kind == "module":
        _check_module(spec.program.target, spec.working_directory)


def check_port(port: int) -> None:
    """Refuse a port that is taken now; the job itself takes it later.

    Raises:
        UsageError: the port is in use or not allowed.
    """
    listen(LOOPBACK, port).close()


def _check_log_dir(log_dir: Path) -> None:
    """Find the nearest existing parent and ask whether it can be written, without writing."""
    existing = log_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(f"--log_dir {log_dir}: {existing} is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"--log_dir {log_dir}: no permission to write {existing}; give a directory that you may write")


def _check_module(name: str, working_directory: Path) -> None:
    """Look for the top-level package only: finding more would import it."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    top = name.partition(".")[0]
    with contextlib.suppress(ValueError):  # a name that cannot be looked for, such as __main__
        if PathFinder.find_spec(top, [str(working_directory)]) or find_spec(top):  # find_spec also asks import hooks
            return
    raise UsageError(
        f"-m {name}: no module {top} in {working_directory} or on Python's path; check the name or --chdir"
    )
