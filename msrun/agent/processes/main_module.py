"""Run the user's program as `__main__` in a forked process, as `python script.py` or `python -m module` would.

What a script can see is set as the interpreter sets it: `sys.argv`, `sys.path[0]`, `__main__` and its `__file__` and
`__spec__` (spawn-based multiprocessing re-imports the script from these), the traceback of an uncaught error, the exit
status of SystemExit. At the end threads are waited for, `atexit` runs, the script's modules go, with the finalizers of
what they held, and streams are flushed. What msrun imported before the fork is not torn down.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import NoReturn

from msrun.agent.processes.lingering import watch_end
from msrun.planning.program import Program


def run_main(program: Program) -> NoReturn:
    """Run a script or module to its end and leave the process with its exit status."""
    imported_before = frozenset(sys.modules)
    _shut_down(_run(program), imported_before)


def _run(program: Program) -> int:
    try:
        if program.kind == "module":
            _run_module(program)
        else:
            _run_script(program)
    except SystemExit as exit_request:
        return _exit_status(exit_request)
    except KeyboardInterrupt:
        _print_error()
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001 - the interpreter's own top level does the same
        _print_error()
        return 1
    return 0


def _new_main(file: str | None) -> types.ModuleType:
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=sys.modules["builtins"], __cached__=None, __annotations__={})
    if file is not None:
        vars(module).update(__file__=file)
    sys.modules["__main__"] = module
    return module


def _run_script(program: Program) -> None:
    path = program.target
    module = _new_main(path)
    sys.argv = [path, *program.args]
    sys.orig_argv = program.argv()
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(path).resolve().parent))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))  # noqa: S102 - running the user's script is the purpose


def _run_module(program: Program) -> None:
    import runpy

    _new_main(None)
    sys.argv = [program.target, *program.args]
    sys.orig_argv = program.argv()
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    # What `python -m` itself calls: runs inside sys.modules["__main__"], so that pickle and spawn find its names.
    runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]


def _remove_modules(imported_before: frozenset[str]) -> None:
    """Run the finalizers of what the program's own modules hold, as the interpreter does: with their globals in place.

    A module is forgotten, and goes with all that nobody else holds (`finalize_modules` in CPython's pylifecycle.c).
    Packages stay: a thread that is a daemon, which the interpreter would have halted by now, may use them.
    """
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    packages = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    for name, module in reversed(list(sys.modules.items())):
        file = getattr(module, "__file__", None)
        is_own = isinstance(file, str) and name not in imported_before and not file.startswith(packages)
        if name == "__main__" or is_own:
            del sys.modules[name]
    gc.collect()


def _exit_status(request: SystemExit) -> int:
    code = request.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter prints it
    return 1


def _print_error() -> None:
    """Print the current error through `sys.excepthook`, without msrun's own frames."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if error is not None and kind is not None:
        error.__traceback__ = trace
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # what runs at exit may ask for it
        with contextlib.suppress(Exception):
            sys.excepthook(kind, error, trace)


def _shut_down(status: int, imported_before: frozenset[str]) -> NoReturn:
    """Do what the interpreter does at its end, up to tearing down what was imported before the program began."""
    watch_end(status)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _remove_modules(imported_before)
    except BaseException:  # noqa: BLE001 - nothing may keep the process from ending
        _print_error()
        status = status or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # disk full, closed by the script
            status = status or 120  # what the interpreter exits with when flushing fails
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
