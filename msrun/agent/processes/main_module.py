"""Run the user's program as `__main__` in a forked process, as `python script.py` or `python -m module` would.

What a script can see is as the interpreter sets it. At the end threads are waited for, `atexit` runs, the script's
modules go, with the finalizers of what they held, and streams are flushed. What msrun imported before the fork is not
torn down."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import gc
import io
import os
import re
import signal
import site
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType
from typing import NoReturn

from msrun import contract
from msrun.agent.processes.progress_board import write_own_record
from msrun.planning.program import Program

LINGER_S = 5.0  # how long a process may take to end before that is worth a word
LOOK_S = 1.0
BUSY_SHARE = 0.001  # share of a core that is a sign of life: an upload needs little
_LIBRARY = r"<|.*/lib/python3\.\d+/"
_NAME_OFFSET = contract.PROGRESS_RECORD_BYTES - contract.PROGRESS_NAME_BYTES - 8


def watch_end(status: int, ended_at: float) -> None:
    """Look, in a thread of this process, whose program has ended with `status`, whether the process ends, too."""
    time.sleep(LINGER_S)
    what = describe_wait()
    limit_s = float(os.environ.get(contract.MSRUN_EXIT_TIME_OUT) or contract.DEFAULT_EXIT_TIME_OUT_S)
    limit = f"--exit_time_out {limit_s:g}"
    _write(f"msrun: the program has ended with exit code {status}, the process waits for {what} ({limit})")
    name = what.encode("utf-8", "replace")[: contract.PROGRESS_NAME_BYTES - 1].ljust(
        contract.PROGRESS_NAME_BYTES, b"\0"
    )
    write_own_record(_NAME_OFFSET, name + struct.pack("=d", -ended_at if status else ended_at))  # < 0: it has failed
    if not status or not limit_s:
        return
    alive_at, used_s = ended_at, time.process_time()
    while (now := time.monotonic()) - alive_at < limit_s:
        time.sleep(min(LOOK_S, limit_s))
        if time.process_time() - used_s > BUSY_SHARE * (time.monotonic() - now):
            alive_at = time.monotonic()
        used_s = time.process_time()
    _write(f"msrun: the program failed, and for {limit_s:g} s ({limit}) the process waits for {what}: it is ended now")
    os._exit(status if status > 0 else contract.EXIT_SIGNAL_BASE - status)


def describe_wait() -> str:
    """Return what keeps this process from ending: a thread, or what the main thread does."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = [t for t in threading.enumerate() if t is not main and t.is_alive() and not t.daemon]
    if not threads:
        return _place(frames.get(main.ident or 0)) or "a function of atexit"
    place = _place(frames.get(threads[0].ident or 0))
    more = f" and {len(threads) - 1} more" if len(threads) > 1 else ""
    return f"thread {threads[0].name}{f' at {place}' if place else ''}{more}"


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        if not re.match(_LIBRARY, code.co_filename) and code.co_filename != __file__:
            is_ours = code.co_filename.startswith(os.path.dirname(__file__))  # noqa: PTH120
            return "" if is_ours else f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"  # noqa: PTH119
        frame = frame.f_back
    return ""


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode("utf-8", "backslashreplace"))


class Main:
    """The user's program in this process, which `server_handle.BOOT` runs: so only one frame is below the program's."""

    def __init__(self, program: Program) -> None:
        """Make this process what it is under `python` before the first line (Exception: it cannot be compiled)."""
        self._imported_before = frozenset(sys.modules)
        self._calls = [_module_call(program) if program.kind == "module" else _script_call(program)]
        self.error: BaseException | None = None  # what the program has ended with; is set by who runs it
        self.inherited: object = None  # kept open: its descriptors are other files' by now

    def take_call(self) -> Callable[[], object]:
        """Return, once, what runs the program. Ctrl-C is the program's from here on."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._calls.pop()

    def leave(self) -> NoReturn:
        """Do what the interpreter does at its end, up to tearing down what was imported before the program began."""
        error, self.error = self.error, None
        status = 0
        if isinstance(error, SystemExit):
            status = _exit_status(error)
        elif error is not None:
            _print_error(error)
            status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        del error
        _shut_down(status, self._imported_before)


def _new_main(file: str | None) -> types.ModuleType:
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=sys.modules["builtins"], __cached__=None, __annotations__={})
    if file is not None:
        vars(module).update(__file__=file, __loader__=SourceFileLoader("__main__", file))
    sys.modules["__main__"] = module
    return module


def _script_call(program: Program) -> Callable[[], object]:
    path = program.target
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.argv = [program.typed or path, *program.args]
    sys.orig_argv = program.argv()
    if not sys.flags.safe_path:
        folder = Path(path).resolve().parent
        sys.path.insert(0, str(folder))
        _forget_hidden(folder)
    return functools.partial(exec, code, vars(_new_main(path)))  # running the user's script is the purpose


def _forget_hidden(folder: Path) -> None:
    """Forget modules that the server has loaded and the script hides with one of its own, such as a `queue.py`."""
    try:
        found = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    except OSError:
        return
    own = {path.name.removesuffix(".py") for path in found} - {"msrun", "__main__", *sys.builtin_module_names}
    own &= sys.modules.keys()
    if not own:
        return
    import subprocess  # for few

    argv = [sys.executable, "-c", "import sys; print(*sys.modules)"]  # what the interpreter itself has loaded, stays
    kept = subprocess.run(argv, cwd="/", capture_output=True, text=True, check=False).stdout.split()
    for name in [name for name in sys.modules if name.partition(".")[0] in own.difference(kept)]:
        del sys.modules[name]


def _module_call(program: Program) -> Callable[[], object]:
    import runpy

    _new_main(None)
    sys.argv = [program.target, *program.args]
    sys.orig_argv = program.argv()
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    # What `python -m` itself calls: runs inside sys.modules["__main__"], so that pickle and spawn find its names.
    return functools.partial(runpy._run_module_as_main, program.target)  # type: ignore[attr-defined]


def _remove_modules(imported_before: frozenset[str]) -> None:
    """Run the finalizers of what the program's own modules hold, as the interpreter does: with their globals in place.
    A module is forgotten, and goes with all that nobody else holds (`finalize_modules` in CPython's pylifecycle.c).
    Packages stay: a thread that is a daemon, which the interpreter would have halted by now, may use them."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    gc.collect()  # twice, as the interpreter: the first time while all modules live
    packages = (str(Path(os.__file__).parent), *site.getsitepackages())
    for name, module in reversed(list(sys.modules.items())):
        file = getattr(module, "__file__", None)
        is_own = isinstance(file, str) and name not in imported_before and not file.startswith(packages)
        if name == "__main__" or is_own:
            del sys.modules[name]
    gc.collect()
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # files that packages hold
        for held in [found for found in gc.get_objects() if type(found) is kind]:
            with contextlib.suppress(Exception):
                held.flush()


def _exit_status(request: SystemExit) -> int:
    code = request.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if code.bit_length() < 64 else 0xFF
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter prints it
    return 1


def _print_error(error: BaseException) -> None:
    """Print an error through `sys.excepthook`, without the frame that has called the program."""
    kind, trace = type(error), _forget_own_frame(error)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # what runs at exit may ask for it
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _say("sys.excepthook is missing\n")
        sys.__excepthook__(kind, error, trace)
        return
    try:
        hook(kind, error, trace)
    except Exception as of_hook:  # noqa: BLE001 - as the interpreter tells it
        _say("Error in sys.excepthook:\n")
        sys.__excepthook__(type(of_hook), of_hook, _forget_own_frame(of_hook))
        _say("\nOriginal exception was:\n")
        sys.__excepthook__(kind, error, trace)


def _forget_own_frame(error: BaseException) -> types.TracebackType | None:
    """Take msrun's frame, the first one, from a traceback and return what is left of that."""
    if error.__traceback__:
        error.__traceback__ = error.__traceback__.tb_next
    return error.__traceback__


def _tell_ignored(what: object, error: BaseException) -> None:
    frames = traceback.format_tb(_forget_own_frame(error))
    trace = f"Traceback (most recent call last):\n{''.join(frames)}" if frames else ""
    kind = type(error)
    module = f"{kind.__module__}." if kind.__module__ not in ("builtins", "__main__") else ""
    _say(f"Exception ignored in: {what!r}\n{trace}{module}{kind.__qualname__}: {error}\n")


def _say(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _shut_down(status: int, imported_before: frozenset[str]) -> NoReturn:
    with contextlib.suppress(RuntimeError):  # no thread can be started: then nothing is said
        _thread.start_new_thread(watch_end, (status, time.monotonic()))  # the program's own threads do not show it
    for what, step in (
        (threading, threading._shutdown),  # type: ignore[attr-defined]
        (atexit, atexit._run_exitfuncs),
        (sys.modules, lambda: _remove_modules(imported_before)),
    ):
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - such as Ctrl-C; the interpreter tells of it and goes on
            _tell_ignored(what, error)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:  # noqa: BLE001 - such as a full disk; the program's own stream may raise anything
            _tell_ignored(stream, error)
            status = status or 120  # what the interpreter exits with when flushing fails
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
