"""Record calls of msrun's functions in every process whose PYTHONPATH has this folder: see `followed_walks`.

A line a call and a line a return: when it was called, the function, and whether the value that is followed is among
its arguments, its variables, what it returns, or is WORLD_SIZE of the process.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from typing import Any


def follow(path: str, names: set[str], value: str) -> None:
    """Record the functions of these qualified names from now on, in all threads and in processes that are forked.

    Args:
        value: a pattern of the text of the value.
    """
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    found = re.compile(value)
    called: dict[Any, int] = {}

    def note(frame: Any, event: str, returned: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or code.co_qualname not in names or "/msrun/" not in code.co_filename:
            return
        holds = found.search(repr([*frame.f_locals.values(), returned, os.environ.get("WORLD_SIZE")]))
        at = called.setdefault(frame, time.time_ns())
        if event == "return":
            del called[frame]
        line = {"at": at, "name": code.co_qualname, "holds": holds is not None}
        os.write(out, json.dumps(line).encode() + b"\n")

    threading.setprofile(note)
    sys.setprofile(note)


if _path := os.environ.get("CALL_RECORD_FILE"):
    follow(_path, set(os.environ["CALL_RECORD_NAMES"].split()), os.environ["CALL_RECORD_VALUE"])
