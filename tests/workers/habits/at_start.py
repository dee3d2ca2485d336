"""What a script finds when it starts; each fact is printed, none of it torch's."""

# ruff: noqa: E402, FBT003

import builtins
import sys

LOADED = sorted(sys.modules)  # before this script has imported anything
START = {name: repr(value) for name, value in globals().items() if name.startswith("__")}

import atexit
import ctypes
import fcntl
import gc
import inspect
import json
import logging
import os
import random
import resource
import signal
import site
import subprocess
import tempfile
import threading
import tracemalloc
import warnings
import weakref

libc = ctypes.CDLL(None)


def read(name):
    with open(f"/proc/self/{name}") as file:
        return file.read()


def status(*names):
    return [line for line in read("status").splitlines(keepends=True) if line.startswith(names)]


def number_from(option):
    value = ctypes.c_int()
    libc.prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value


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


@fact
def main_is_in_sys_modules():
    import __main__

    return __main__ is sys.modules["__main__"], vars(__main__) is globals(), __main__.FACTS is FACTS


FACTS["spec_of_main"] = lambda: (repr(__spec__), __package__)
FACTS["argv"] = lambda: sys.argv
FACTS["orig_argv"] = lambda: sys.orig_argv
FACTS["path"] = lambda: sys.path
FACTS["meta_path"] = lambda: [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]
FACTS["working_directory"] = lambda: os.getcwd()
FACTS["flags"] = lambda: str(sys.flags)
FACTS["warning_filters"] = lambda: [repr(entry) for entry in warnings.filters]
FACTS["executable"] = lambda: (sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.platlibdir)
FACTS["stream_classes"] = lambda: (
    [
        (type(s).__name__, type(s.buffer).__name__, type(getattr(s.buffer, "raw", s.buffer)).__name__)
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ]
)
FACTS["stream_names"] = lambda: [s.name for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stream_encodings"] = lambda: [(s.encoding, s.errors, s.newlines) for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stream_buffering"] = lambda: [(s.line_buffering, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stream_descriptors"] = lambda: [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr)]
FACTS["stdin_is_empty"] = lambda: sys.stdin.read()
FACTS["closing_the_streams_closes_descriptors"] = lambda: [
    s.buffer.raw.closefd if hasattr(s.buffer, "raw") else None for s in (sys.stdin, sys.stdout, sys.stderr)
]
FACTS["access_of_descriptors"] = lambda: [fcntl.fcntl(n, fcntl.F_GETFL) & os.O_ACCMODE for n in (0, 1, 2)]
FACTS["open_descriptors"] = lambda: sorted(
    int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
)
FACTS["resource_limits"] = lambda: {
    name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
}
FACTS["limit_of_file_locks"] = lambda: resource.getrlimit(10)[1]
FACTS["priority"] = lambda: (
    os.getpriority(os.PRIO_PROCESS, 0),
    os.sched_getscheduler(0),
    sorted(os.sched_getaffinity(0)),
)
FACTS["scheduling_of_memory"] = lambda: read("oom_score_adj")
FACTS["capabilities"] = lambda: status("Cap", "NoNewPrivs", "Seccomp", "Umask", "THP", "Groups")
FACTS["dumpable_and_death_signal"] = lambda: [
    libc.prctl(option, 0, 0, 0, 0)
    for option in (3, 7, 30)  # DUMPABLE, KEEPCAPS, TIMERSLACK
]
FACTS["death_signal"] = lambda: number_from(2)
FACTS["is_subreaper"] = lambda: number_from(37)


@fact
def environment_is_that_of_the_kernel():
    with open("/proc/self/environ", "rb") as file:
        kernel = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    names = set(kernel) ^ set(os.environb)
    return sorted(name.decode() for name in names)


@fact
def environment_reaches_c():
    getenv = libc.getenv
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
FACTS["kernels_view_of_signals"] = lambda: status("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
FACTS["wakeup_descriptor"] = lambda: signal.set_wakeup_fd(-1)
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
def stack_depth():
    frame, names = sys._getframe(), []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


FACTS["stack_of_inspect"] = lambda: [(os.path.basename(info.filename), info.function) for info in inspect.stack()]


@fact
def recursion():
    def depth(n=0):
        try:
            return depth(n + 1)
        except RecursionError:
            return n

    return sys.getrecursionlimit(), depth()


FACTS["tracing"] = lambda: (sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing())
FACTS["collector"] = lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug())
FACTS["frozen_objects"] = lambda: gc.get_freeze_count()
FACTS["threads"] = lambda: (
    threading.active_count(),
    threading.current_thread() is threading.main_thread(),
    threading.main_thread().name,
)
FACTS["thread_identities"] = lambda: (
    threading.main_thread().native_id == os.getpid() == threading.get_native_id(),
    threading.main_thread().ident == threading.get_ident(),
)


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
FACTS["temporary_folder"] = lambda: (
    tempfile.gettempdir() == os.environ["TMPDIR"],
    tempfile.tempdir == os.environ["TMPDIR"],
)
FACTS["random_state_is_its_own"] = lambda: random.getstate()[1][0] == random.Random(0).getstate()[1][0]
FACTS["site_packages"] = lambda: (
    site.ENABLE_USER_SITE,
    site.getsitepackages(),
    "sitecustomize" in LOADED,
    "usercustomize" in LOADED,
)
FACTS["site_builtins"] = lambda: [
    hasattr(builtins, name) for name in ("exit", "quit", "copyright", "help", "_", "__build_class__")
]
FACTS["modules_loaded_that_would_not_be"] = lambda: [name for name in LOADED if "." not in name]


@fact
def source_of_main():
    return inspect.getsource(source_of_main).splitlines()[1], inspect.getfile(source_of_main)


FACTS["code_of_main"] = lambda: (fact.__code__.co_filename, fact.__code__.co_firstlineno > 1)
FACTS["future_features"] = lambda: hex(sys._getframe(0).f_code.co_flags)
FACTS["annotations_of_main"] = lambda: globals().get("__annotations__", "missing")
FACTS["title"] = lambda: read("comm").strip()
FACTS["command_line"] = lambda: read("cmdline").split("\0")[:-1]
FACTS["process_groups"] = lambda: (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid())


@fact
def controlling_terminal():
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError as error:
        return error.errno
    return "there"


FACTS["subprocess_signals"] = lambda: (
    subprocess.run(["grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status"], capture_output=True, text=True).stdout
)
FACTS["subprocess_descriptors"] = lambda: subprocess.run(
    ["ls", "/proc/self/fd"], stdout=-1, text=True, close_fds=False
).stdout.split()


if __name__ == "__main__":
    found = {}
    for name, function in FACTS.items():
        try:
            found[name] = function()
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    with open(sys.argv[1], "w") as file:
        json.dump(found, file, default=repr)
