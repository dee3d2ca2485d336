"""Files that hold a secret: nobody but their owner may read them."""

from __future__ import annotations

import stat

from msrun.errors import UsageError


def check_private(mode: int, place: str, path: object) -> None:
    """Refuse a file that others may read or write.

    Args:
        mode: `st_mode` of the file.
        place: which option or key names it.

    Raises:
        UsageError: naming the mode and the remedy.
    """
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{place}: others may read it (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}")
