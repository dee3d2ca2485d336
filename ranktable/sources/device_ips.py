"""Device addresses for the generator: from a pattern with {server} and {device}, or from a YAML or JSON file.

A pattern such as `192.168.{device+1}.{server+10}` suits clusters that were numbered by rule. A file maps each
server id to its addresses: `10.0.0.1: [192.168.1.10, 192.168.2.10]`, in the order of the devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ranktable.errors import BuildError
from ranktable.reading.source import read_bytes

_FIELD = re.compile(r"\{(server|device)(?:\+(\d{1,6}))?\}")


def is_pattern(text: str) -> bool:
    """True when `text` is meant as a pattern, not as the name of a file."""
    return "{" in text


def expand_pattern(pattern: str, servers: Iterable[tuple[str, Sequence[int]]]) -> dict[str, list[str]]:
    """Return the addresses of every device of `servers`, ids with device ids in the order of the host list.

    `{server}` is the place of the server in that list from 0, `{device}` the device id; `+N` adds to either.
    Raises BuildError for other fields. The addresses themselves are checked by `build_table`.
    """
    rest = _FIELD.sub("", pattern)
    if "{" in rest or "}" in rest:
        raise BuildError(f"device_ips pattern {pattern!r} has an unknown field", "use {server}, {device}, {device+1}")
    return {
        server_id: [_fill(pattern, {"server": place, "device": device_id}) for device_id in device_ids]
        for place, (server_id, device_ids) in enumerate(servers)
    }


def read_device_ips(path: str) -> dict[str, list[str]]:
    """Return the addresses in a YAML or JSON file that maps server ids to lists; raises ReadError, BuildError."""
    return _read_lists(path, "lists of addresses", "192.168.1.1")


def read_super_device_ids(path: str) -> dict[str, list[str]]:
    """Return the SDIDs in a YAML or JSON file that maps server ids to lists, one number per device in their order.

    Raises ReadError, BuildError.
    """
    return _read_lists(path, "lists of SDIDs", "37748736")


def _read_lists(path: str, what: str, example: str) -> dict[str, list[str]]:
    import yaml  # not needed by those who only read and check tables

    try:
        loaded = yaml.safe_load(read_bytes(path).decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BuildError(f"{path} is not YAML: {reason}", f"write lines such as  host-a: [{example}]") from error
    takes_numbers = example.isdecimal()
    if not isinstance(loaded, dict) or not all(_is_entry(*entry, takes_numbers) for entry in loaded.items()):
        raise BuildError(f"{path} does not map server ids to {what}", f"write  host-a: [{example}]")
    return {server_id: [str(item) for item in items] for server_id, items in loaded.items()}


def _fill(pattern: str, places: dict[str, int]) -> str:
    return _FIELD.sub(lambda match: str(places[match.group(1)] + int(match.group(2) or 0)), pattern)


def _is_entry(server_id: object, items: object, takes_numbers: bool) -> bool:
    return (
        isinstance(server_id, str)
        and isinstance(items, list)
        and all(isinstance(item, str) or (takes_numbers and type(item) is int) for item in items)
    )
