"""The words of `--bind_core` and `--bind_numa`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from msrun.errors import UsageError
from msrun.planning.settings import read_truth

SCHEDULER_KEY = "scheduler"

_DEVICE_KEY = re.compile(r"device(0|[1-9]\d{0,5})\Z")
_EXAMPLE = """{"device0": ["0-3", "8"], "device1": ["4-7"]}"""


@dataclass(frozen=True)
class CoreBinding:
    """What `--bind_core` asked for."""

    is_auto: bool = True
    """True: msrun shares the cores out."""
    devices: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Processors by physical device number; an empty tuple leaves that worker unbound."""
    scheduler: tuple[int, ...] = ()
    """Processors of the scheduler; empty = not bound."""


def parse_bind_core(text: str) -> CoreBinding | None:
    """Turn True, False or MindSpore's dict into what it asks for; None = no binding (UsageError: neither of these).

    The dict is a JSON object: `device<physical number>` or `scheduler` -> list of "N" and "N-M". An empty list
    leaves that process unbound.
    """
    with suppress(ValueError):
        return CoreBinding() if read_truth(text.strip()) else None
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, _RepeatedKey) else "neither True, False nor a JSON object"
        raise UsageError(f"--bind_core {text}: {what}; give e.g. --bind_core='{_EXAMPLE}'") from None
    if not isinstance(value, dict) or not value:
        raise UsageError(f"--bind_core {text}: not a JSON object of devices; give e.g. --bind_core='{_EXAMPLE}'")
    lists = {key: _parse_cpus(key, items) for key, items in value.items()}
    scheduler = lists.pop(SCHEDULER_KEY, ())
    for wrong in (key for key in lists if not _DEVICE_KEY.match(key)):
        raise UsageError(f"--bind_core: {wrong!r} is no device; keys are device0, device1, ... and {SCHEDULER_KEY}")
    devices = {int(key.removeprefix("device")): cpus for key, cpus in lists.items()}
    return CoreBinding(is_auto=False, devices=devices, scheduler=scheduler)


class _RepeatedKey(ValueError):
    """A key of a JSON object is there twice."""


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise _RepeatedKey(f"{key!r} is there {count} times")
    return dict(pairs)


def _parse_cpus(key: str, items: object) -> tuple[int, ...]:
    from msrun.planning.placement.host import parse_cpu_range  # not for --help

    remedy = f'give a list of strings, e.g. "{key}": ["0-3", "8"]'
    if not isinstance(items, list):
        raise UsageError(f"--bind_core: {key!r} has {json.dumps(items)}, which is no list; {remedy}")
    numbers: set[int] = set()
    for item in items:
        if not isinstance(item, str):
            raise UsageError(f"--bind_core: {key!r} has {json.dumps(item)}, which is no string; {remedy}")
        try:
            numbers.update(parse_cpu_range(item))
        except ValueError as error:
            raise UsageError(f"--bind_core: {key!r}: {error}; {remedy}") from None
    return tuple(sorted(numbers))
