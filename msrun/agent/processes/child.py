"""The first moments of a process that the fork server made: from a copy of the server to a worker or the scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import importlib.util
import logging
import os
import platform
import re
import signal
import struct
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from msrun import contract
from msrun.agent.logs.own_file import open_own_file
from msrun.agent.processes.flight_recorder import watch_flight_recorder
from msrun.agent.processes.log_pipes import LogPipes
from msrun.agent.processes.process_control import die_with_parent, set_open_files
from msrun.agent.processes.process_spec import LOG_WRITER_ID, LOG_WRITER_TITLE, SCHEDULER_ID, ProcessSpec
from msrun.planning import environment
from msrun.planning.environment import STACK_SIGNAL
from msrun.planning.masking import mask_words
from msrun.planning.program import Program
from msrun.planning.ranks import fold_ranks

if TYPE_CHECKING:
    from msrun.agent.processes.main_module import Main


MPOL_PREFERRED = 1
MPOL_BIND = 2
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "loongarch64": 237, "ppc64le": 261, "s390x": 269}
"""Number of the system call by machine: no C library has a function for it without libnuma."""

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_cpus(cpus: Collection[int]) -> None:
    """Let this process, and what it starts, run on these processors only. Raises OSError: the kernel does not allow it,
    or not all of them.
    """
    os.sched_setaffinity(0, cpus)
    allowed = os.sched_getaffinity(0)
    if allowed != set(cpus):
        raise OSError(0, f"only CPUs {fold_ranks(allowed)} were allowed")


def bind_memory(nodes: Collection[int]) -> None:
    """Let this process take new memory from these NUMA nodes: only from them, or from them first where that fails.

    The policy passes to what the process starts. See set_mempolicy(2). Raises OSError: the kernel allows neither (in a
    container mostly: CAP_SYS_NICE is missing).
    """
    try:
        _set_mempolicy(MPOL_BIND, nodes)
    except OSError:
        _set_mempolicy(MPOL_PREFERRED, [min(nodes)])  # this policy knows one node only


def _set_mempolicy(mode: int, nodes: Collection[int]) -> None:
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(0, f"set_mempolicy is not known on {platform.machine()}")
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
    """Bind a process that was just started, whose stderr is its log; empty = leave as it is.

    Without its processors a process would take those of others: it ends with EXIT_CLUSTER. Memory from elsewhere
    is only slower: that is written down and the process goes on.
    """
    if cpus:
        try:
            bind_cpus(cpus)
        except OSError as error:
            _write_line(f"msrun: cannot bind {who} to CPUs {fold_ranks(cpus)}: {error.strerror}")
            os._exit(contract.EXIT_CLUSTER)
    if memory_nodes:
        try:
            bind_memory(memory_nodes)
        except OSError as error:
            _write_line(
                f"msrun: cannot bind the memory of {who} to NUMA node {fold_ranks(memory_nodes)}: "
                f"{error.strerror}; going on without"
            )


def _write_line(text: str) -> None:
    os.write(2, f"{text}\n".encode())


RENDEZVOUS = "torch.distributed.rendezvous"
HANDLERS = "_rendezvous_handlers"
"""torch's private name: URL scheme -> what `init_process_group` and `init_rpc` meet by."""

Handler = Callable[..., Iterator[Any]]


def watch_joining() -> None:
    """Have this process say when it joins the world of its job; now, or when torch is imported."""
    if RENDEZVOUS in sys.modules:
        _watch(sys.modules[RENDEZVOUS])
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Sees the import of torch's rendezvous, once."""

    def find_spec(
        self,
        fullname: str,
        _path: Sequence[str] | None,
        _target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _watch(module)

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch(module: ModuleType) -> None:
    handlers: dict[str, Handler] = getattr(module, HANDLERS, {})
    for scheme, handler in list(handlers.items()):
        handlers[scheme] = _telling(handler)


def _telling(handler: Handler) -> Handler:
    def meet(url: str, *args: Any, **settings: Any) -> Iterator[Any]:
        given = parse_qs(urlsplit(url).query).get("world_size", [""])[0]
        size = os.environ.get(contract.WORLD_SIZE, "")
        if size and (given or size) == size:
            _tell()
            watch_flight_recorder()
        return handler(url, *args, **settings)

    return meet


def _tell() -> None:
    """Write the phase into this worker's record, unless the runtime keeps it."""
    with contextlib.suppress(OSError, KeyError, ValueError):  # the program has changed its variables
        begin = int(os.environ[contract.RANK]) * contract.PROGRESS_RECORD_BYTES
        board = os.open(os.environ[contract.MSRUN_PROGRESS], os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.pread(board, 8, begin) == struct.pack("=Q", contract.PHASE_UNKNOWN):
                os.pwrite(board, struct.pack("=Q", contract.PHASE_PLAIN_TORCH), begin)
        finally:
            os.close(board)


EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_BLAS_THREAD_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def become(
    spec: ProcessSpec,
    *,
    server_pid: int,
    scheduler_fds: tuple[int, int],
    blas_threads: int,
    open_files: int,
    log_pipes: LogPipes | None = None,
    stdin_fd: int = -1,
) -> Main:
    """Turn this freshly forked process into what `spec` says; returns in a worker that runs a program of Python's.

    Order matters: the death signal first, so that no moment exists in which the server's end goes unnoticed. The
    scheduler has none: it ends with the agent's channel and outlives a killed server to clean up if the agent is gone.
    Nor has the log writer, which ends with its pipes or with the server's channel, after the workers' last words.
    """
    is_scheduler = spec.process_id == SCHEDULER_ID
    is_log_writer = spec.process_id == LOG_WRITER_ID
    if not is_scheduler and not is_log_writer:
        die_with_parent(server_pid)
    os.setsid()
    _reset_signals(ignored=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if is_log_writer else ())
    if spec.terminal:
        _take_terminal(spec.terminal)
    else:
        pipe_fd = log_pipes.output_fd(spec.process_id) if log_pipes else None
        output_fd = _open_log(spec.log_path) if pipe_fd is None else pipe_fd
        error_fd = _open_log(spec.error_log_path) if spec.error_log_path else output_fd
        _redirect(output_fd, error_fd, stdin_fd if spec.has_stdin else None)
    _open_streams()
    writer_fds = log_pipes.log_writer_fds if is_log_writer and log_pipes else ()
    _close_inherited(keep=scheduler_fds if is_scheduler else writer_fds)
    apply_binding(spec.name, spec.cpus, spec.memory_nodes)
    set_environment(spec.env)
    if is_scheduler:
        name_process("msrun: scheduler")
        _run_scheduler(server_pid, scheduler_fds)
    if is_log_writer and log_pipes:
        name_process(LOG_WRITER_TITLE)
        _run_log_writer(log_pipes)
    if spec.process_id >= 0:
        set_open_files(open_files)
    if spec.program is None:
        raise ValueError(f"process {spec.process_id} has no program")
    if spec.use_exec:
        _exec(spec.program)
    name_process(f"msrun: {spec.name}: {' '.join([spec.program.target, *mask_words(spec.program.args)])}")
    _reseed()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # it holds the server's
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    if spec.env.get("OMP_NUM_THREADS"):  # other than what the server's libraries have read
        blas_threads = environment.blas_threads(os.environ, {})
        _set_torch_threads()
    if blas_threads > 1:
        _set_blas_threads(blas_threads)
    from msrun.agent.processes.main_module import Main

    watch_joining()
    try:
        return Main(spec.program)
    except Exception:  # noqa: BLE001 - whatever it is, the interpreter has its own words for it
        _exec(spec.program)


def _run_scheduler(server_pid: int, descriptors: tuple[int, int]) -> NoReturn:
    from msrun.cluster.rendezvous import run_scheduler

    status = run_scheduler(*descriptors)
    if status != contract.EXIT_OK:
        from msrun.agent.processes.job_mark import sweep_job

        run_dir = Path(os.environ[contract.MSRUN_PROGRESS]).parent
        sweep_job(server_pid, os.environ[contract.MSRUN_JOB_ID], str(run_dir))
    os._exit(status)


def _run_log_writer(log_pipes: LogPipes) -> NoReturn:
    status = contract.EXIT_CLUSTER
    try:
        status = log_pipes.run_log_writer()
    except BaseException:  # noqa: BLE001 - whatever it was, it is for scheduler.log, and the job has to end
        traceback.print_exc()
    os._exit(status)


def _reset_signals(ignored: tuple[int, ...]) -> None:
    """Let signals in, which were held back since the fork, to what a fresh process does with them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the program begins
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect(output_fd: int, error_fd: int, stdin_fd: int | None) -> None:
    """Make descriptors stdout, stderr and stdin; None = /dev/null."""
    os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin_fd is None else stdin_fd, 0)
    os.dup2(output_fd, 1)
    os.dup2(error_fd, 2)


def _take_terminal(path: str) -> None:
    """Make a terminal that of this process's session, and its stdin, stdout and stderr."""
    try:
        terminal = os.open(path, os.O_RDWR)
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    except OSError as error:
        os.write(2, f"msrun: cannot open the terminal {path}: {error.strerror}\n".encode())
        os._exit(contract.EXIT_CLUSTER)
    for descriptor in range(3):
        os.dup2(terminal, descriptor)


def _open_streams() -> None:
    """Rebuild Python's streams on stdin, stdout and stderr.

    Lines are written one by one, so that the log is up to date and nothing is lost with a worker that is killed; a
    worker whose PYTHONUNBUFFERED is empty (`--env PYTHONUNBUFFERED=`) writes in blocks, as Python does into a file.
    """
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    buffering = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    sys.stdin = sys.__stdin__ = open(  # type: ignore[misc]  # noqa: SIM115
        0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False
    )
    sys.stdout = sys.__stdout__ = open(  # type: ignore[misc]  # noqa: SIM115
        1, "w", encoding=encoding, errors=errors, buffering=buffering, closefd=False
    )
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
        2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False
    )
    for stream, name in ((sys.stdin, "<stdin>"), (sys.stdout, "<stdout>"), (sys.stderr, "<stderr>")):
        stream.buffer.raw.name = name  # type: ignore[attr-defined]


def _open_log(path: str) -> int:
    try:
        return open_own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        os.write(2, f"msrun: cannot open the log {path}: {error.strerror}\n".encode())
        os._exit(contract.EXIT_CLUSTER)


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
        os.write(2, f"msrun: cannot run {argv[0]}: {error.strerror}\n".encode())
        os._exit(EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE)


def name_process(title: str) -> None:
    """Set the title that ps shows, without writing over the environment block: a job is found by MSRUN_JOB_ID there.

    Secrets in the arguments are hidden in it. Those of a worker that is exec'd cannot be, nor those on msrun's own
    command line: /proc shows the argv of a program as it was started.
    """
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        preset = os.environ.get("SPT_NOENV")
        os.environ["SPT_NOENV"] = "1"
        setproctitle(title.encode("utf-8", "replace").decode())  # arguments may hold bytes that are no text
        logging.root.manager.loggerDict.pop("setproctitle", None)  # the program shall find no logger of ours
        set_environment({"SPT_NOENV": preset})


def _reseed() -> None:
    """Give numpy's global generator fresh entropy, as a fresh process has; `random` does so itself after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_torch_threads() -> None:
    """Give torch the worker's own number of threads, if the server has loaded it and so read another one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


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
