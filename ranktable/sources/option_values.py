"""The values of options of `generate` and `convert` that have a grammar of their own.

Which hosts stand in which super pod: `0=node[1-2]`, several times or with `;` between.

Device addresses for the generator: from a pattern with {server} and {device}, or from a YAML or JSON file.

A pattern such as `192.168.{device+1}.{server+10}` suits clusters that were numbered by rule. A file maps each
server id to its addresses: `10.0.0.1: [192.168.1.10, 192.168.2.10]`, in the order of the devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ranktable.bounded_text import TextError, load_yaml
from ranktable.errors import BuildError
from ranktable.files import read_bytes
from ranktable.hosts.host_list import parse_names

_FIELD = re.compile(r"\{(server|device)(?:\+(\d{1,6}))?\}")


def parse_super_pods(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the server ids of each super pod; raises BuildError, HostListError.

    >>> parse_super_pods(["0=node[1-2];1=node3"])
    {'0': ('node1', 'node2'), '1': ('node3',)}
    """
    pods: dict[str, tuple[str, ...]] = {}
    for part in (part.strip() for text in texts for part in text.split(";")):
        pod_id, equals, hosts = part.partition("=")
        if not equals or not pod_id.strip():
            raise BuildError(f"--super_pods: {part!r} has no id before its hosts", "write --super_pods 0=node[1-2]")
        if pod_id.strip() in pods:
            raise BuildError(f"--super_pods: super pod {pod_id.strip()!r} is given twice", "name all its hosts at once")
        pods[pod_id.strip()] = tuple(parse_names(hosts, f"--super_pods {part!r}"))
    return pods


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
    try:
        loaded = load_yaml(read_bytes(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BuildError(f"{path} is not YAML: not UTF-8", f"write lines such as  host-a: [{example}]") from error
    except TextError as error:
        raise BuildError(f"{path}: {error.place}{error.problem}", error.remedy) from error
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
