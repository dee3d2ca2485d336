"""Bytes and seconds for people."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Return a number of bytes with a unit: 0, 512 B, 1.50 MB; powers of 1024."""
    if not count:
        return "0"
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Return a time with a unit: 1.23 s, 45.6 ms, 7 us."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
