"""Read a worker's log: the newest loss, the traceback or the last lines. Bytes that are not UTF-8 are shown escaped."""

from __future__ import annotations

import os
import re
from pathlib import Path

from msrun.agent.logs.own_file import open_own_file
from msrun.agent.logs.rotated_log import rotated_path

EXCERPT_LINES = 20
MAX_LINE_CHARS = 400
TAIL_BYTES = 256 * 1024
LOSS_BYTES = 4096

_LOSS = re.compile(rb"loss(?: is|[:=])\s*([-+0-9.eE]+|nan|inf)", re.IGNORECASE)
_STEP = re.compile(rb"(?:\b|_)step(?: is|[:=#])?\s*(\d{1,18})", re.IGNORECASE)
_OWN_FRAME = re.compile(r'  File "(.*/msrun/agent/processes/\w+\.py|<string>)", line \d+ in \S+\Z')
"""The frame below the script of a forked worker, and those of a thread of msrun's, as faulthandler writes them."""
_BEGIN = re.compile(
    r"\s*(\[rank\d+\]:\s*)?"
    r"(Traceback \(most recent call last\):|Fatal Python error: .*|uncaught \w+( at .*:\d+)?(: .*)?)\s*\Z"
)
"""First line of a traceback, of what `msrun.runtime` writes instead, of torch's copy of it with the rank before each
line, or of a crash in native code."""


def read_tail(path: Path, size_bytes: int) -> bytes:
    """Return the last bytes of a log, of its older files too when it was rotated; empty when it cannot be read."""
    data = _read_end(path, size_bytes)
    number = 1
    while len(data) < size_bytes and (
        older := _read_end(Path(rotated_path(str(path), number)), size_bytes - len(data))
    ):
        data = older + data
        number += 1
    return data


def _read_end(path: Path, size_bytes: int) -> bytes:
    try:
        with os.fdopen(open_own_file(path, os.O_RDONLY), "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size_bytes))
            return file.read()
    except OSError:
        return b""


def newest_loss(path: Path) -> str:
    """Return the text of the last loss in the last lines of a log, or an empty string."""
    found = _LOSS.findall(read_tail(path, LOSS_BYTES))
    return found[-1].decode("ascii") if found else ""


def newest_step(path: Path) -> int | None:
    """Return the number of the last step in the last lines of a log; None when there is none."""
    return parse_step(read_tail(path, LOSS_BYTES))


def parse_step(tail: bytes) -> int | None:
    """Return the number of the last step in the end of a log."""
    found = _STEP.findall(tail)
    return int(found[-1]) if found else None


def last_line(tail: bytes) -> str:
    """Return the last line of a log's end that is not empty; of a progress bar its last state."""
    for line in reversed(tail.split(b"\n")):
        text = line.rstrip(b"\r\t ").rpartition(b"\r")[2]
        if text.strip():
            return text.decode("utf-8", "backslashreplace")
    return ""


def read_excerpt(path: Path) -> list[str]:
    """Return the last traceback in the end of a log, else its last lines; long lines are cut."""
    text = read_tail(path, TAIL_BYTES).decode("utf-8", "backslashreplace")
    lines = [line for line in text.splitlines() if not _OWN_FRAME.match(line)]
    begin = next((i for i in range(len(lines) - 1, -1, -1) if _BEGIN.match(lines[i])), None)
    if begin is None:
        lines = lines[-EXCERPT_LINES:]
    else:
        lines = lines[begin:]
        if len(lines) > 2 * EXCERPT_LINES:
            lines = [
                *lines[:2],
                f"  ... {len(lines) - 2 * EXCERPT_LINES} lines left out ...",
                *lines[-2 * EXCERPT_LINES + 2 :],
            ]
    return [line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + " ..." for line in lines]
