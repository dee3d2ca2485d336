"""The first moments of a process that the fork server made: from a copy of the server to a worker or the scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import os
import re
import signal
import sys
import termios
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

from msrun import contract
from msrun.agent.own_file import open_own_file
from msrun.agent.processes.main_module import Main
from msrun.agent.processes.process_control import die_with_parent, set_open_files, sweep_job
from msrun.agent.processes.progress_board import watch_joining
from msrun.agent.processes.server_handle import SCHEDULER_ID, ProcessSpec
from msrun.planning import environment
from msrun.planning.environment import STACK_SIGNAL
from msrun.planning.hosts import fold_ranks
from msrun.planning.masking import mask_words
from msrun.planning.program import Program
from msrun.planning.record import Record

with contextlib.suppress(ImportError):
    import setproctitle  # noqa: F401 - once, for all that are forked

MPOL_PREFERRED = 1
MPOL_BIND = 2
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "loongarch64": 237, "ppc64le": 261, "s390x": 269}
"""Number of the system call by machine: no C library has a function for it without libnuma."""

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def _set_mempolicy(mode: int, nodes: Collection[int]) -> None:
    number = SET_MEMPOLICY.get(os.uname().machine, -1)  # which no kernel has
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    bits = words * _WORD_BITS + 1  # the kernel reads one bit less than it is told
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, ctypes.c_ulong(bits)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def apply_binding(who: str, cpus: Collection[int], memory_nodes: Collection[int]) -> None:
    """Bind a process that was just started, whose stderr is its log, and what it starts; empty = leave as it is.
    Without its processors it would take those of others: it ends with EXIT_CLUSTER. Memory from elsewhere is only
    slower: where the kernel allows no binding (set_mempolicy(2); in a container mostly), that is written down."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
            if (allowed := os.sched_getaffinity(0)) != set(cpus):
                raise OSError(0, f"only CPUs {fold_ranks(allowed)} were allowed")
        except OSError as error:
            _end(f"cannot bind {who} to CPUs {fold_ranks(cpus)}: {error.strerror}")
    if memory_nodes:
        try:
            try:
                _set_mempolicy(MPOL_BIND, memory_nodes)
            except OSError:
                _set_mempolicy(MPOL_PREFERRED, [min(memory_nodes)])  # this policy knows one node only
        except OSError as error:
            nodes = fold_ranks(memory_nodes)
            _say(f"cannot bind the memory of {who} to NUMA node {nodes}: {error.strerror}; going on without")


def _say(text: str) -> None:
    os.write(2, f"msrun: {text}\n".encode())


def _end(text: str, status: int = contract.EXIT_CLUSTER) -> NoReturn:
    _say(text)
    os._exit(status)


EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_BLAS_THREAD_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


class Given(Record, frozen=False):
    """What a fork server has of its job for the processes that it makes."""

    server_pid: int
    scheduler_fds: tuple[int, ...] = ()  # the scheduler's channel to the agent and the socket of its store
    blas_threads: int = 1
    open_files: int = 0  # how many of them each worker may have
    stdin_fd: int = -1  # what is stdin of one worker; -1 = there is no such


def become(spec: ProcessSpec, given: Given) -> Main:
    """Turn this freshly forked process into what `spec` says; returns in a worker that runs a program of Python's.
    Order matters: the death signal first, so that no moment exists in which the server's end goes unnoticed. The
    scheduler has none: it ends with the agent's channel and outlives a killed server to clean up if that is gone."""
    is_scheduler = spec.process_id == SCHEDULER_ID
    if not is_scheduler:
        die_with_parent(given.server_pid)
    os.setsid()
    _reset_signals()
    try:
        _open_files(spec, given.stdin_fd)
    except OSError as error:
        what = f"terminal {spec.terminal}" if spec.terminal else f"log {error.filename}"
        _end(f"cannot open the {what}: {error.strerror}")
    _open_streams()
    _close_inherited(keep=given.scheduler_fds if is_scheduler else ())
    apply_binding(spec.name, spec.cpus, spec.memory_nodes)
    set_environment(spec.env)
    if is_scheduler:
        name_process("msrun: scheduler")
        _run_scheduler(given)
    if spec.process_id >= 0:
        set_open_files(given.open_files)
    assert spec.program is not None, "only the scheduler has none"
    if spec.use_exec:
        _exec(spec.program)
    return _become_worker(spec, spec.program, given.blas_threads)


def _become_worker(spec: ProcessSpec, program: Program, blas_threads: int) -> Main:
    name_process(f"msrun: {spec.name}: {' '.join([program.target, *mask_words(program.args)])}")
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # fresh entropy, as in a fresh process; `random` does so itself after a fork
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # it holds the server's
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    if spec.env.get("OMP_NUM_THREADS"):  # other than what the server's libraries have read
        blas_threads = environment.blas_threads(os.environ, {})
        set_torch_threads()
    if blas_threads > 1:
        _set_blas_threads(blas_threads)
    watch_joining()
    try:
        return Main(program)
    except Exception:  # noqa: BLE001 - whatever it is, the interpreter has its own words for it
        _exec(program)


def set_torch_threads() -> None:
    """Give torch the worker's own number of threads, if the server has loaded it and so read another one."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _run_scheduler(given: Given) -> NoReturn:
    from msrun.cluster.rendezvous import run_scheduler

    status = run_scheduler(*given.scheduler_fds)
    if status != contract.EXIT_OK:
        run_dir = Path(os.environ[contract.MSRUN_PROGRESS]).parent
        sweep_job(given.server_pid, os.environ[contract.MSRUN_JOB_ID], str(run_dir))
    os._exit(status)


def _reset_signals() -> None:
    """Let signals in, which were held back since the fork, to what a fresh process does with them."""
    signal.set_wakeup_fd(-1)
    for reset in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if reset != signal.SIGHUP or signal.getsignal(reset) is not signal.SIG_IGN:  # nohup
            signal.signal(reset, signal.SIG_DFL)  # SIGINT until the program begins
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _open_files(spec: ProcessSpec, stdin_fd: int) -> None:
    if spec.terminal:
        input_fd = output_fd = error_fd = os.open(spec.terminal, os.O_RDWR)
        fcntl.ioctl(input_fd, termios.TIOCSCTTY, 0)
    else:
        output_fd = _open_log(spec.log_path)
        error_fd = _open_log(spec.error_log_path) if spec.error_log_path else output_fd
        input_fd = stdin_fd if spec.has_stdin else os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((input_fd, output_fd, error_fd)):
        os.dup2(descriptor, number)


def _open_streams() -> None:
    """Rebuild Python's streams on stdin, stdout and stderr. Lines are written one by one, so that the log is up to date
    and nothing is lost with a worker that is killed; a worker whose PYTHONUNBUFFERED is empty (`--env
    PYTHONUNBUFFERED=`) writes in blocks, as Python does into a file."""
    buffering = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    for number, (name, mode, errors) in enumerate(
        (("stdin", "r", sys.stdin.errors), ("stdout", "w", sys.stdout.errors), ("stderr", "w", "backslashreplace"))
    ):
        encoding = (sys.stdout if number else sys.stdin).encoding
        stream = open(  # noqa: SIM115
            number, mode, encoding=encoding, errors=errors, buffering=(-1, buffering, 1)[number], closefd=False
        )
        stream.buffer.raw.name = f"<{name}>"  # type: ignore[attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open_log(path: str) -> int:
    return open_own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _close_inherited(keep: tuple[int, ...]) -> None:
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 1 << 16)


def set_environment(env: Mapping[str, str | None]) -> None:
    """Set variables of this process; None removes one."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _exec(program: Program) -> NoReturn:
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
        signal.signal(signum, signal.SIG_DFL)
    argv = program.argv()
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - an argv list, no shell
    except OSError as error:
        status = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
        _end(f"cannot run {argv[0]}: {error.strerror}", status)


def name_process(title: str) -> None:
    """Set the title that ps shows, without writing over the environment block: a job is found by MSRUN_JOB_ID there.
    Secrets in the arguments are hidden in it. Those of a worker that is exec'd cannot be, nor those on msrun's own
    command line: /proc shows the argv of a program as it was started."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        preset = os.environ.get("SPT_NOENV")
        os.environ["SPT_NOENV"] = "1"
        setproctitle(title.encode("utf-8", "replace").decode())  # arguments may hold bytes that are no text
        logging.root.manager.loggerDict.pop("setproctitle", None)  # the program shall find no logger of ours
        set_environment({"SPT_NOENV": preset})


def _set_blas_threads(count: int) -> None:
    """Raise OpenBLAS's threads, which the server held at one so that it could fork, by its documented call."""
    maps = Path("/proc/self/maps").read_text()
    for path in sorted(set(re.findall(r"(/\S*openblas\S*)", maps))):
        library = ctypes.CDLL(path)
        for name in _BLAS_THREAD_SETTERS:
            if hasattr(library, name):
                getattr(library, name)(count)
                break
