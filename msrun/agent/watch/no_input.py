"""Evidence of a worker that wanted to read from its user: a debugger or input() without a terminal."""

from __future__ import annotations

import re

from msrun.agent.logs.own_file import read_end

LOOK_BYTES = 4096
_NO_INPUT = re.compile(rb"^(?:bdb\.BdbQuit|EOFError: EOF when reading a line)\s*\Z", re.MULTILINE)


def explain_no_input(log: str, global_rank: int, has_input: bool) -> str:
    """Return that a rank whose log ends so has no standard input, for the failure report; empty when that is not why.

    Args:
        has_input: the user's standard input belongs to it.
    """
    if has_input:
        return ""
    end = read_end(log, LOOK_BYTES)
    return f"its standard input is empty: --interactive={global_rank} gives it yours" if _NO_INPUT.search(end) else ""
