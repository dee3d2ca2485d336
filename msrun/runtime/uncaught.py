"""What a worker's log says of an exception that nobody caught: the error and the user's line first.

    uncaught ValueError at train.py:11: three rows are needed
        raise ValueError("three rows are needed")
      called at train.py:14, in <module>
        net(x, y)
      13 frames inside libraries left out; MSRUN_DEBUG=1 shows them

An error of msrun's own is one line, at the line of the user's code that it is about. With MSRUN_DEBUG=1, and for an
exception that msrun itself has raised by mistake, the whole traceback follows.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from msrun import contract
from msrun.errors import MsrunError, ParallelError

_OWN = str(Path(contract.__file__).parent) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_INSTALLED = (f"{_LIBRARY}site-packages{os.sep}", f"{_LIBRARY}dist-packages{os.sep}")
_AS_EVER = (KeyboardInterrupt, SyntaxError, BaseExceptionGroup)
"""What the interpreter's own words are best for."""
_WITHOUT_VALUES = (
    "  in a dry run parameters have no values: do not use them before the first call of AutoParallel, or start with "
    "--sim_level 3"
)


def install() -> None:
    """Print uncaught exceptions in this way from now on, unless the program has a hook of its own.

    torch's hook, which writes the rank before every line, goes around ours; in a worker of msrun, which has a log of
    its own, ours takes its place.
    """
    is_torchs = getattr(sys.excepthook, "__module__", "").startswith("torch.distributed")
    if sys.excepthook is sys.__excepthook__ or (is_torchs and contract.MSRUN_JOB_ID in os.environ):
        sys.excepthook = print_uncaught


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nobody caught; a `sys.excepthook`."""
    try:
        text = render_uncaught(error, trace, is_debug=os.environ.get(contract.MSRUN_DEBUG, "0") not in ("", "0"))
    except Exception:  # noqa: BLE001 - an error whose own text fails must not hide itself
        text = ""
    if text:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the log
    else:
        sys.__excepthook__(kind, error, trace)


def render_uncaught(error: BaseException, trace: TracebackType | None, *, is_debug: bool = False) -> str:
    """Return what to print of an exception; "" when the interpreter's own words are to be kept.

    Args:
        is_debug: the whole traceback follows.
    """
    frames = list(traceback.extract_tb(trace))
    if isinstance(error, _AS_EVER) or not any(map(_is_users, frames)):
        return ""
    lines = [_headline("uncaught ", error, trace)]
    is_internal = frames[-1].filename.startswith(_OWN) and not isinstance(error, MsrunError)
    if is_debug or is_internal:
        return "\n".join([*lines, *_whole(error, trace)])
    if not isinstance(error, MsrunError):
        lines += _source(frames)
        if contract.MSRUN_SIM_LEVEL in os.environ and "meta" in str(error):
            lines.append(_WITHOUT_VALUES)
        for cause in _causes(error):
            lines += [_headline("caused by ", cause, cause.__traceback__)]
            lines += _source(list(traceback.extract_tb(cause.__traceback__)))
    return "\n".join(lines)


def _headline(before: str, error: BaseException, trace: TracebackType | None) -> str:
    """Return the exception's name, the user's line and the message."""
    message = error.message if isinstance(error, ParallelError) else str(error)
    notes = getattr(error, "__notes__", [])
    where = _where(error, trace)
    text = "\n".join([message, *map(str, notes)])
    return f"{before}{type(error).__qualname__}{f' at {where}' if where else ''}{f': {text}' if text else ''}"


def _where(error: BaseException, trace: TracebackType | None) -> str:
    """Return FILE:LINE of the user's code that an exception is about, or an empty string.

    That is what an error of ours says itself; else the innermost line of what it was made of, or where it was raised.
    """
    if isinstance(error, ParallelError) and error.where:
        return error.where
    if isinstance(error, MsrunError) and error.__cause__ is not None:
        within = _where(error.__cause__, error.__cause__.__traceback__)
        if within:
            return within
    return find_user_line(error, trace)


def find_user_line(error: BaseException, trace: TracebackType | None = None) -> str:
    """Return FILE:LINE of the innermost of the user's lines where an exception was raised, or an empty string."""
    found = [frame for frame in traceback.extract_tb(trace or error.__traceback__) if _is_users(frame)]
    return f"{_short(found[-1].filename)}:{found[-1].lineno}" if found else ""


def _source(frames: list[traceback.FrameSummary]) -> list[str]:
    """Return the user's lines of a traceback, the innermost first, and how many frames are left out."""
    lines: list[str] = []
    for frame in reversed([frame for frame in frames if _is_users(frame)]):
        lines += [f"  called at {_short(frame.filename)}:{frame.lineno}, in {frame.name}"] if lines else []
        lines += [f"    {frame.line}"] if frame.line else []
    left_out = sum(not _is_users(frame) for frame in frames)
    if left_out:
        count = f"{left_out} frame{'s' if left_out > 1 else ''}"
        lines.append(f"  {count} inside libraries left out; {contract.MSRUN_DEBUG}=1 shows them")
    return lines


def _whole(error: BaseException, trace: TracebackType | None) -> list[str]:
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip().splitlines()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield what an exception was made of, as the interpreter's traceback would show it, newest first."""
    seen = {id(error)}
    while True:
        following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if following is None or id(following) in seen:
            return
        seen.add(id(following))
        yield following
        error = following


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Return False for frames inside msrun, torch and Python's own library, and in generated code."""
    torch = sys.modules.get("torch")
    inside = (_OWN, str(Path(str(torch.__file__)).parent) + os.sep) if torch is not None else (_OWN,)
    path = frame.filename
    return not path.startswith(("<", *inside)) and (not path.startswith(_LIBRARY) or path.startswith(_INSTALLED))


def _short(path: str) -> str:
    """Return a path as seen from the working directory when it lies below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return path
