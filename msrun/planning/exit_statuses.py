"""Exit statuses: lists of them, as `--restart_on` and `--no_restart_on` take them, and what some of them mean."""

from __future__ import annotations

import signal

from msrun.errors import UsageError
from msrun.planning.program import Program

MAX_STATUS = 255
_NO_TESTS = 5
"""Of pytest (its reference, "Exit codes")."""


def parse_statuses(option: str, text: str) -> tuple[int, ...]:
    """Turn `137,SIGTERM,HUP` into exit statuses; a signal is 128 + its number, as msrun ends after it.

    Raises:
        UsageError: neither a status from 1 to 255 nor the name of a signal.
    """
    return tuple(dict.fromkeys(_parse_status(option, text, piece.strip()) for piece in text.split(","))) if text else ()


def _parse_status(option: str, text: str, word: str) -> int:
    name = f"SIG{word.upper().removeprefix('SIG')}"
    if name in signal.Signals.__members__:
        return 128 + signal.Signals[name]
    if word.isascii() and word.isdigit() and len(word) <= len(str(MAX_STATUS)) and 0 < int(word) <= MAX_STATUS:
        return int(word)
    raise UsageError(
        f"{option} {text}: {word!r} is neither an exit status from 1 to {MAX_STATUS} nor a signal; "
        "give a list such as 75,137,SIGTERM"
    )


def check_statuses(restart_on: tuple[int, ...], no_restart_on: tuple[int, ...], max_restarts: int) -> None:
    """Refuse lists that contradict each other, or that nothing asks.

    Raises:
        UsageError: one of both.
    """
    if both := sorted({*restart_on} & {*no_restart_on}):
        raise UsageError(f"--restart_on and --no_restart_on: both name {both[0]}; give it in one of the two")
    if restart_on and not max_restarts:
        raise UsageError("--restart_on: starts nothing again with --max_restarts 0; give --max_restarts 1 or more")


def explain_no_tests(program: Program, exit_code: int) -> str:
    """Return why pytest has failed though the file that it was given ran to its end; empty when that is not why."""
    if exit_code != _NO_TESTS or (program.kind, program.target) != ("module", "pytest"):
        return ""
    return "pytest found no test there; it had run the file to look for some: name it to msrun without pytest"
