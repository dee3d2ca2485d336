"""A worker whose program is over and whose process goes on: it says so, and what it waits for.

Threads that are no daemons and functions of `atexit` may have good work to do, such as the upload of a checkpoint. It
says on the progress board that it lingers. One whose program has finished the agent judges; one whose program has
failed ends itself, with its own exit status, when it has shown no sign of life for --exit_time_out.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import struct
import sys
import threading
import time
from types import FrameType

from msrun import contract

LINGER_S = 5.0
"""How long a process may take to end before that is worth a word."""
LOOK_S = 1.0
BUSY_SHARE = 0.001
"""Share of a core that is a sign of life: an upload needs little."""
_LIBRARY = re.compile(r"<|.*/lib/python3\.\d+/")
_NAME_OFFSET = contract.PROGRESS_RECORD_BYTES - contract.PROGRESS_NAME_BYTES - 8


def watch_end(status: int) -> None:
    """Have a thread of this process, whose program has ended with `status`, look whether the process ends, too."""
    with contextlib.suppress(RuntimeError):  # no thread can be started: then nothing is said
        _thread.start_new_thread(_watch, (status, time.monotonic()))  # the program's own threads do not show it


def _watch(status: int, ended_at: float) -> None:
    time.sleep(LINGER_S)
    what = describe_wait()
    limit_s = float(os.environ.get(contract.MSRUN_EXIT_TIME_OUT) or contract.DEFAULT_EXIT_TIME_OUT_S)
    limit = f"--exit_time_out {limit_s:g}"
    _write(f"msrun: the program has ended with exit code {status}, the process waits for {what} ({limit})")
    _tell(what, -ended_at if status else ended_at)
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
    """Return the innermost frame of the user's own code."""
    while frame is not None:
        code = frame.f_code
        if not _LIBRARY.match(code.co_filename) and code.co_filename != __file__:
            is_ours = code.co_filename.startswith(os.path.dirname(__file__))  # noqa: PTH120
            return "" if is_ours else f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"  # noqa: PTH119
        frame = frame.f_back
    return ""


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode("utf-8", "backslashreplace"))


def _tell(what: str, ended_at: float) -> None:
    """Write it into this worker's record; `ended_at` is negative for a program that has failed."""
    name = what.encode("utf-8", "replace")[: contract.PROGRESS_NAME_BYTES - 1].ljust(
        contract.PROGRESS_NAME_BYTES, b"\0"
    )
    with contextlib.suppress(OSError, KeyError, ValueError):  # the program has changed its variables
        begin = int(os.environ[contract.RANK]) * contract.PROGRESS_RECORD_BYTES
        board = os.open(os.environ[contract.MSRUN_PROGRESS], os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(board, name + struct.pack("=d", ended_at), begin + _NAME_OFFSET)
        finally:
            os.close(board)
