"""How large worker logs may grow: the words of --log_max_bytes and --log_keep."""

from __future__ import annotations

import re

from msrun.errors import UsageError

MIN_LOG_BYTES = 4096
"""A smaller file would be exchanged at almost every line."""
MAX_LOG_KEEP = 1000

_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)(?:I?B)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(option: str, text: str) -> int:
    """Turn `100M`, `1G`, `64KiB` or plain bytes into bytes; units are powers of 1024.

    Raises:
        UsageError: not such a size.
    """
    match = _SIZE.match(text.strip())
    if not match:
        raise UsageError(f"{option} {text}: not a size; give bytes, or a whole number with K, M, G or T such as 100M")
    return int(match[1]) * _UNITS[match[2].upper()]


def format_size(size_bytes: int) -> str:
    """Return a size with the largest unit that leaves it whole: `100 MiB`, `1500 bytes`."""
    for unit in ("T", "G", "M", "K"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]} {unit}iB"
    return f"{size_bytes} bytes"


def check_log_rotation(max_bytes: int, keep: int) -> None:
    """Refuse what cannot be done.

    Raises:
        UsageError: naming the option, its value, the constraint and the remedy.
    """
    if max_bytes < 0 or 0 < max_bytes < MIN_LOG_BYTES:
        raise UsageError(
            f"--log_max_bytes {max_bytes}: must be {MIN_LOG_BYTES} bytes or more, e.g. 100M; 0 never rotates"
        )
    if not 1 <= keep <= MAX_LOG_KEEP:
        raise UsageError(
            f"--log_keep {keep}: must be 1 to {MAX_LOG_KEEP} older files per worker; "
            "to keep everything in one file leave --log_max_bytes out"
        )
