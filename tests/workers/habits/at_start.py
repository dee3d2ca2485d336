"""What a script finds when it starts; each fact is printed, none of it torch's."""

# ruff: noqa: E402, FBT003

import builtins
import sys

LOADED = sorted(sys.modules)  # before this script has imported anything
START = {name: repr(value) for name, value in globals().items() if name.startswith("__")}

import asyncio
import atexit
import codecs
import contextvars
import decimal
import faulthandler
import gc
import importlib.metadata
import inspect
import json
import linecache
import locale
import logging
import os
import platform
import random
import re
import resource
import shutil
import signal
import site
import socket
import ssl
import stat
import tempfile
import threading
import time
import tracemalloc
import warnings
import weakref

FACTS = {}


def fact(function):
    FACTS[function.__name__] = function
    return function


FACTS["names_of_main"] = lambda: {
    name: text for name, text in START.items() if name not in ("__builtins__", "__loader__", "__cached__")
}
FACTS["keys_of_main"] = lambda: sorted(START)


@fact
def loader_of_main():
    loader = globals()["__loader__"]
    return type(loader).__name__, getattr(loader, "name", None), getattr(loader, "path", None)


FACTS["builtins_of_main"] = lambda: globals()["__builtins__"] is builtins
FACTS["cached_of_main"] = lambda: __cached__ if "__cached__" in globals() else "missing"
FACTS["doc_of_main"] = lambda: __doc__


@fact
def main_is_in_sys_modules():
    import __main__

    return __main__ is sys.modules["__main__"], vars(__main__) is globals(), __main__.FACTS is FACTS


FACTS["spec_of_main"] = lambda: (repr(__spec__), __package__)
FACTS["repr_of_main"] = lambda: repr(sys.modules["__main__"])
FACTS["file_of_main"] = lambda: __file__
FACTS["argv"] = lambda: sys.argv
FACTS["orig_argv"] = lambda: sys.orig_argv
FACTS["path_0"] = lambda: sys.path[0]
FACTS["path"] = lambda: sys.path
FACTS["meta_path"] = lambda: [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]
FACTS["path_hooks"] = lambda: [getattr(hook, "__qualname__", "") for hook in sys.path_hooks]
FACTS["working_directory"] = lambda: os.getcwd()
FACTS["flags"] = lambda: str(sys.flags)
FACTS["x_options"] = lambda: sys._xoptions
FACTS["warn_options"] = lambda: sys.warnoptions
FACTS["warning_filters"] = lambda: [repr(entry) for entry in warnings.filters]


@fact
def warning_is_shown_once_a_line():
    seen = []
    show = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: seen.append(str(message))
    try:
        for _ in range(3):
            warnings.warn("of main", DeprecationWarning, stacklevel=1)
            warnings.warn("of users", UserWarning, stacklevel=1)
    finally:
        warnings.showwarning = show
    return seen


FACTS["executable"] = lambda: (sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.platlibdir)
FACTS["implementation"] = lambda: (sys.version, sys.implementation.cache_tag, platform.python_implementation())


@fact
def dont_write_bytecode():
    return sys.dont_write_bytecode, sys.pycache_prefix


FACTS["encodings"] = lambda: (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.getdefaultencoding())
FACTS["locale_settings"] = lambda: (
    locale.setlocale(locale.LC_ALL),
    locale.getpreferredencoding(False),
    locale.getencoding(),
)


@fact
def codec_of_files():
    with open(os.devnull) as file:
        return file.encoding, file.errors


FACTS["stream_classes"] = lambda: (
    [
        (type(s).__name__, type(s.buffer).__name__, type(getattr(s.buffer, "raw", s.buffer)).__name__)
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ]
)
FACTS["stream_modes"] = lambda: [s.mode for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stream_names"] = lambda: [s.name for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stream_encodings"] = lambda: [(s.encoding, s.errors, s.newlines) for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stream_buffering"] = lambda: [(s.line_buffering, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stream_descriptors"] = lambda: [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["streams_are_terminals"] = lambda: [s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["streams_are_the_first_ones"] = lambda: (
    sys.stdin is sys.__stdin__,
    sys.stdout is sys.__stdout__,
    sys.stderr is sys.__stderr__,
)
FACTS["stdin_is_empty"] = lambda: sys.stdin.read()
FACTS["closing_the_streams_closes_descriptors"] = lambda: [
    s.buffer.raw.closefd if hasattr(s.buffer, "raw") else None for s in (sys.stdin, sys.stdout, sys.stderr)
]


@fact
def stream_can_be_reconfigured():
    sys.stdout.reconfigure(line_buffering=True, encoding="utf-8", errors="replace")
    return sys.stdout.encoding, sys.stdout.errors


@fact
def access_of_descriptors():
    import fcntl

    return [fcntl.fcntl(n, fcntl.F_GETFL) & os.O_ACCMODE for n in (0, 1, 2)]


FACTS["descriptors_are_blocking"] = lambda: [os.get_blocking(n) for n in (0, 1, 2)]
FACTS["open_descriptors"] = lambda: sorted(
    int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
)


@fact
def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


FACTS["resource_limits"] = lambda: {
    name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
}
FACTS["limit_of_file_locks"] = lambda: resource.getrlimit(10)[1]
FACTS["priority"] = lambda: (
    os.getpriority(os.PRIO_PROCESS, 0),
    os.sched_getscheduler(0),
    sorted(os.sched_getaffinity(0)),
)


@fact
def scheduling_of_memory():
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


FACTS["identity"] = lambda: (os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups())


@fact
def capabilities():
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith(("Cap", "NoNewPrivs", "Seccomp", "Umask", "THP", "Groups"))]


@fact
def dumpable_and_death_signal():
    import ctypes

    libc = ctypes.CDLL(None)
    return [libc.prctl(option, 0, 0, 0, 0) for option in (3, 7, 30)]  # DUMPABLE, KEEPCAPS, TIMERSLACK


@fact
def death_signal():
    import ctypes

    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(value), 0, 0, 0)
    return value.value


@fact
def is_subreaper():
    import ctypes

    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(value), 0, 0, 0)
    return value.value


@fact
def environment_is_that_of_the_kernel():
    with open("/proc/self/environ", "rb") as file:
        kernel = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    names = set(kernel) ^ set(os.environb)
    return sorted(name.decode() for name in names)


@fact
def environment_reaches_c():
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    os.environ["SET_BY_SCRIPT"] = "1"
    return getenv(b"SET_BY_SCRIPT"), [getenv(n.encode()) == os.environb.get(n.encode()) for n in ("PATH", "HOME")]


FACTS["signal_handlers"] = lambda: (
    {
        signal.Signals(n).name if n in set(signal.Signals) else n: repr(signal.getsignal(n))
        for n in sorted(signal.valid_signals())
        if n < 32
    }
)
FACTS["real_time_signal_handlers"] = lambda: {
    n: repr(signal.getsignal(n)) for n in sorted(signal.valid_signals()) if n >= 32
}


@fact
def kernels_view_of_signals():
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith(("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd"))]


FACTS["blocked_signals"] = lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
FACTS["wakeup_descriptor"] = lambda: signal.set_wakeup_fd(-1)
FACTS["timers"] = lambda: [
    signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
]


@fact
def alternate_signal_stack():
    return faulthandler.is_enabled()


FACTS["hooks"] = lambda: (
    [
        (name, getattr(sys, name) is getattr(sys, f"__{name}__"), repr(getattr(sys, name)))
        for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
    ]
)
FACTS["threading_hook"] = lambda: (
    threading.excepthook is threading.__excepthook__,
    threading.gettrace(),
    threading.getprofile(),
)
FACTS["last_error"] = lambda: (
    [hasattr(sys, name) for name in ("last_type", "last_value", "last_traceback", "last_exc")],
    sys.exc_info(),
)


@fact
def exception_context():
    try:
        raise KeyError(1)
    except KeyError as error:
        return error.__context__, error.__cause__


@fact
def stack_depth():
    frame, names = sys._getframe(), []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@fact
def stack_of_inspect():
    return [(os.path.basename(info.filename), info.function) for info in inspect.stack()]


@fact
def recursion():
    def depth(n=0):
        try:
            return depth(n + 1)
        except RecursionError:
            return n

    return sys.getrecursionlimit(), depth()


FACTS["switch_interval"] = lambda: sys.getswitchinterval()
FACTS["int_digits"] = lambda: sys.get_int_max_str_digits()
FACTS["tracing"] = lambda: (sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing())
FACTS["coroutine_hooks"] = lambda: (sys.get_coroutine_origin_tracking_depth(), repr(sys.get_asyncgen_hooks()))
FACTS["collector"] = lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug())
FACTS["frozen_objects"] = lambda: gc.get_freeze_count()
FACTS["collector_callbacks"] = lambda: [repr(callback) for callback in gc.callbacks]
FACTS["threads"] = lambda: (
    threading.active_count(),
    threading.current_thread() is threading.main_thread(),
    threading.main_thread().name,
)


@fact
def thread_identities():
    main = threading.main_thread()
    return main.native_id == os.getpid() == threading.get_native_id(), main.ident == threading.get_ident()


FACTS["tasks_of_the_kernel"] = lambda: len(os.listdir("/proc/self/task"))


@fact
def thread_stack_size():
    return threading.stack_size()


@fact
def children():
    import multiprocessing

    return multiprocessing.active_children(), multiprocessing.current_process().name, multiprocessing.parent_process()


@fact
def child_processes_to_wait_for():
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return "none"


@fact
def multiprocessing_start():
    import multiprocessing

    return multiprocessing.get_start_method(allow_none=True), multiprocessing.get_all_start_methods()


FACTS["functions_at_exit"] = lambda: atexit._ncallbacks()
FACTS["finalizers"] = lambda: len(getattr(weakref.finalize, "_registry", ()))
FACTS["loggers"] = lambda: (
    sorted(logging.root.manager.loggerDict),
    logging.root.level,
    logging.root.handlers,
    logging.lastResort.level,
)
FACTS["logging_state"] = lambda: (
    logging.raiseExceptions,
    logging.getLogRecordFactory().__name__,
    logging.getLoggerClass().__name__,
)
FACTS["decimal_context"] = lambda: str(decimal.getcontext())
FACTS["context_variables"] = lambda: len(contextvars.copy_context())
FACTS["event_loop"] = lambda: (type(asyncio.get_event_loop_policy()).__name__, asyncio._get_running_loop())


@fact
def child_watcher():
    async def run():
        process = await asyncio.create_subprocess_exec("sh", "-c", "echo out; exit 3", stdout=-1)
        out, _ = await process.communicate()
        return out.decode(), process.returncode

    return asyncio.run(run())


FACTS["processor_time_begins_with_the_process"] = lambda: time.process_time() < 5
FACTS["temporary_folder"] = lambda: (
    tempfile.gettempdir() == os.environ["TMPDIR"],
    tempfile.tempdir == os.environ["TMPDIR"],
)
FACTS["names_of_temporary_files"] = lambda: tempfile._name_sequence is None
FACTS["random_state_is_its_own"] = lambda: random.getstate()[1][0] == random.Random(0).getstate()[1][0]
FACTS["hash_of_text"] = lambda: hash("text") if os.environ.get("PYTHONHASHSEED") else "random"
FACTS["site_packages"] = lambda: (
    site.ENABLE_USER_SITE,
    site.getsitepackages(),
    "sitecustomize" in LOADED,
    "usercustomize" in LOADED,
)
FACTS["site_builtins"] = lambda: [
    hasattr(builtins, name) for name in ("exit", "quit", "copyright", "help", "_", "__build_class__")
]


@fact
def interactive():
    return hasattr(sys, "ps1"), sys.flags.interactive, bool(sys.flags.inspect)


FACTS["modules_loaded_that_would_not_be"] = lambda: [name for name in LOADED if "." not in name]


@fact
def source_of_main():
    return inspect.getsource(source_of_main).splitlines()[1], inspect.getfile(source_of_main)


@fact
def lines_of_main():
    return linecache.getline(__file__, 1)


@fact
def module_of_a_function():
    return inspect.getmodule(module_of_a_function) is sys.modules["__main__"], module_of_a_function.__module__


@fact
def code_of_main():
    code = module_of_a_function.__code__
    return code.co_filename, code.co_firstlineno > 1


@fact
def future_features():
    return hex(sys._getframe(0).f_code.co_flags)


FACTS["annotations_of_main"] = lambda: globals().get("__annotations__", "missing")
FACTS["distributions"] = lambda: (
    importlib.metadata.version("pytest"),
    importlib.metadata.distribution("msrun").metadata["Name"],
)
FACTS["default_sockets"] = lambda: (socket.getdefaulttimeout(), ssl.OPENSSL_VERSION)


@fact
def default_open_flags():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x")
        with open(path, "w"):
            pass
        return stat.S_IMODE(os.stat(path).st_mode)


FACTS["terminal_size"] = lambda: shutil.get_terminal_size()
FACTS["caches"] = lambda: (re._MAXCACHE, codecs.lookup("utf-8").name)


@fact
def title():
    with open("/proc/self/comm") as file:
        return file.read().strip()


@fact
def command_line():
    with open("/proc/self/cmdline") as file:
        return file.read().split("\0")[:-1]


FACTS["process_groups"] = lambda: (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid())


@fact
def controlling_terminal():
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError as error:
        return error.errno
    return "there"


FACTS["root_folder_and_executable"] = lambda: (os.readlink("/proc/self/root"), os.readlink("/proc/self/exe"))


@fact
def audit_hook_can_be_added():
    seen = []
    is_open = [True]
    sys.addaudithook(lambda event, args: seen.append(event) if is_open[0] and event == "habit" else None)
    sys.audit("habit")
    is_open[0] = False
    return seen


@fact
def alarm_arrives():
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append("alarm"))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.sigtimedwait([], 0) if False else signal.pause()
    signal.signal(signal.SIGALRM, before)
    return seen


@fact
def own_signals_arrive():
    seen = []
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGWINCH):
        before = signal.signal(signum, lambda n, _: seen.append(n))
        os.kill(os.getpid(), signum)
        signal.signal(signum, before)
    return seen


@fact
def own_interrupt_arrives():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        return "interrupted"


@fact
def broken_pipe_is_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        os.write(writer, b"x")
    except BrokenPipeError:
        return "EPIPE"
    finally:
        os.close(writer)


@fact
def subprocess_signals():
    import subprocess

    return subprocess.run(
        ["grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status"], capture_output=True, text=True
    ).stdout


@fact
def subprocess_descriptors():
    import subprocess

    return subprocess.run(["ls", "/proc/self/fd"], stdout=-1, text=True, close_fds=False).stdout.split()


@fact
def fork_runs_hooks():
    reader, writer = os.pipe()
    os.register_at_fork(after_in_child=lambda: os.write(writer, b"child "))
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    text = os.read(reader, 100).decode()
    return text, os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    found = {}
    for name, function in FACTS.items():
        try:
            found[name] = function()
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    with open(sys.argv[1], "w") as file:
        json.dump(found, file, default=repr)
