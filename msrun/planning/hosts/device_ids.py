"""Device ids in a host list: `0,2` or `0-3`."""

from __future__ import annotations

import re

from msrun.errors import UsageError
from ranktable.hostlist.brackets import shorten

MAX_DEVICE_ID = 4095

_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?\Z")


def parse_device_ids(text: str, source: str) -> tuple[int, ...]:
    """Turn `0,2` or `0-3` into device ids, in this order.

    Raises:
        UsageError: naming source and value: not such a list, beyond `MAX_DEVICE_ID`, or an id given twice.
    """
    found: dict[int, None] = {}
    for piece in text.split(","):
        match = _RANGE.match(piece.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > MAX_DEVICE_ID:
            raise UsageError(
                f"{source}: devices {shorten(text)!r}: {shorten(piece)!r} is no device id and no range of them; give "
                f"some of 0 to {MAX_DEVICE_ID} such as 0,2 or 0-3"
            )
        for device_id in range(first, last + 1):
            if device_id in found:
                raise UsageError(f"{source}: devices {shorten(text)!r}: {device_id} is given twice; give each id once")
            found[device_id] = None
    return tuple(found)
