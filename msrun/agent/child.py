"""The first moments of a process that the fork server made: from a copy of the server to a worker or the scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from msrun import contract
from msrun.agent.process_control import die_with_parent
from msrun.planning.program import Program

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
SCHEDULER_ID = -1
"""Process id within the job of the scheduler; workers have their global rank."""

_BLAS_THREAD_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


@dataclass(frozen=True)
class ProcessSpec:
    """One process that the fork server is asked to start."""

    process_id: int
    """Global rank, or SCHEDULER_ID."""
    log_path: str
    """Existing file; stdout and stderr go to its end."""
    program: Program | None = None
    """None for the scheduler."""
    use_exec: bool = False
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Set over the server's environment; None removes a name."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        program = self.program.to_json() if self.program else None
        return {
            "process_id": self.process_id,
            "log_path": self.log_path,
            "program": program,
            "use_exec": self.use_exec,
            "env": dict(self.env),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProcessSpec:
        """Inverse of `to_json`."""
        program = Program.from_json(value["program"]) if value["program"] else None
        return cls(value["process_id"], value["log_path"], program, value["use_exec"], value["env"])


def become(spec: ProcessSpec, *, server_pid: int, scheduler_fds: tuple[int, int], blas_threads: int) -> NoReturn:
    """Turn this freshly forked process into what `spec` says; does not return.

    Order matters: the death signal first, so that no moment exists in which the server's end goes unnoticed. The
    scheduler has none: it ends with the agent's channel and outlives a killed server to clean up if the agent is gone.
    """
    is_scheduler = spec.process_id == SCHEDULER_ID
    if not is_scheduler:
        die_with_parent(server_pid)
    os.setsid()
    _reset_signals()
    _redirect(spec.log_path)
    _close_inherited(keep=scheduler_fds if is_scheduler else ())
    _set_environment(spec.env)
    if is_scheduler:
        _name_process("msrun: scheduler")
        _run_scheduler(server_pid, scheduler_fds)
    if spec.program is None:
        raise ValueError(f"process {spec.process_id} has no program")
    if spec.use_exec:
        _exec(spec.program)
    _name_process(f"msrun: worker {spec.process_id}: {' '.join([spec.program.target, *spec.program.args])}")
    _reseed()
    if blas_threads > 1:
        _set_blas_threads(blas_threads)
    from msrun.agent.main_module import run_main

    run_main(spec.program)


def _run_scheduler(server_pid: int, descriptors: tuple[int, int]) -> NoReturn:
    from msrun.cluster.scheduler import run_scheduler

    status = run_scheduler(*descriptors)
    if status != contract.EXIT_OK:
        from msrun.agent.last_resort import sweep_job

        store = os.environ[contract.MSRUN_RENDEZVOUS].removeprefix("file://")
        sweep_job(server_pid, os.environ[contract.MSRUN_JOB_ID], str(Path(store).parent))
    os._exit(status)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect(log_path: str) -> None:
    """Make the log file stdout and stderr, and rebuild Python's streams on it, whole lines at a time."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(  # type: ignore[misc]  # noqa: SIM115
        1, "w", encoding=encoding, errors=errors, buffering=1, closefd=False
    )
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
        2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False
    )


def _close_inherited(keep: tuple[int, ...]) -> None:
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 1 << 16)


def _set_environment(env: Mapping[str, str | None]) -> None:
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _exec(program: Program) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
        signal.signal(signum, signal.SIG_DFL)
    argv = program.argv()
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - an argv list, no shell
    except OSError as error:
        os.write(2, f"msrun: cannot run {argv[0]}: {error.strerror}\n".encode())
        os._exit(EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE)


def _name_process(title: str) -> None:
    """Set the title that ps shows, without writing over the environment block: a job is found by MSRUN_JOB_ID there."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        preset = os.environ.get("SPT_NOENV")
        os.environ["SPT_NOENV"] = "1"
        setproctitle(title.encode("utf-8", "replace").decode())  # arguments may hold bytes that are no text
        _set_environment({"SPT_NOENV": preset})


def _reseed() -> None:
    """Give numpy's global generator fresh entropy, as a fresh process has; `random` does so itself after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_blas_threads(count: int) -> None:
    """Raise OpenBLAS's threads, which the server held at one so that it could fork.

    OpenBLAS reads its variable only when it is loaded; this is its documented call for changing the number later.
    """
    maps = Path("/proc/self/maps").read_text()
    for path in sorted(set(re.findall(r"(/\S*openblas\S*)", maps))):
        library = ctypes.CDLL(path)
        for name in _BLAS_THREAD_SETTERS:
            if hasattr(library, name):
                getattr(library, name)(count)
                break
