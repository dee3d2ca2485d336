"""Device ids in a host list: `0,2` or `0-3`."""

from __future__ import annotations

from collections import Counter

from msrun.errors import UsageError
from ranktable.hostlist.brackets import shorten
from ranktable.hostlist.ranges import RangeError, read_ranges

MAX_DEVICE_ID = 4095


def parse_device_ids(text: str, source: str) -> tuple[int, ...]:
    """Turn `0,2` or `0-3` into device ids, in this order.

    Raises:
        UsageError: naming source and value: not such a list, beyond `MAX_DEVICE_ID`, or an id given twice.
    """
    place = f"{source}: devices {shorten(text)!r}"
    try:
        found = read_ranges(text, 2 * (MAX_DEVICE_ID + 1), MAX_DEVICE_ID)
    except RangeError as error:
        if error.reason == "many":
            raise UsageError(f"{place}: {error.piece} is given twice; give each id once") from None
        raise UsageError(
            f"{place}: {shorten(error.piece)!r} is no device id and no range of them; give "
            f"some of 0 to {MAX_DEVICE_ID} such as 0,2 or 0-3"
        ) from None
    number, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{place}: {number} is given twice; give each id once")
    return tuple(found)
