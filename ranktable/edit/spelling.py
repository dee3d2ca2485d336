"""The keys of every dialect by the object that they belong to, and which of them a strange key is meant to be.

A key is taken for another when they differ in letter case, underscores, dashes or a plural s only (`deviceIp`,
`devices`), and also in a letter or two when the other is required and missing. Keys that are known for other readers
stay as they are. Sources: those of the codecs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property

_SEPARATORS = re.compile(r"[\s_-]+")
_CLOSE = 0.85


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of object: its required keys, its other keys, and the kind of the objects in its arrays."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    items: Mapping[str, Kind] = field(default_factory=dict)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every known key."""
        return frozenset((*self.required, *self.optional, *self.items))

    @cached_property
    def by_form(self) -> dict[str, str]:
        """Every known key by its normal form."""
        return {_normalise(key): key for key in self.keys}


_PORTS = ("device_port", "device_vnic_port", "host_port", "backup_device_ip", "backup_device_port")
_FOREIGN_IN_DEVICE = ("device_logical_id", "dpu_ip", "numa_id", "eid", "tor_ip", "tor_port", "pod_name")
_FOREIGN_IN_SERVER = ("host_nic_ip", "container_ip", "server_ip", "pod_name", "hardware_type")
_COUNTS = ("server_count", "group_count", "rank_count")
_OF_LAB = ("board_id", "chip_info", "deploy_mode")
_OF_LAB_NICS = ("para_plane_nic_location", "para_plane_nic_name", "para_plane_nic_num")
_OF_HYBRID = ("mode", "collective_id", "heterog_sub_version", "Servers", "Clients")
_OF_OTHERS = ("data_version", "hardware_type", "oxc_group_list", "endpoint_list", "cluster_id")
_OF_VLLM = ("prefill_device_list", "decode_device_list")

_DEVICE = Kind(
    ("device_id", "rank_id"),
    ("device_ip", "super_device_id", *_PORTS, "net_position", "net_protocol", *_FOREIGN_IN_DEVICE),
)
_SERVER = Kind(
    ("server_id", "device"),
    ("host_ip", "pod_ip", *_FOREIGN_IN_SERVER),
    {"device": _DEVICE},
)
_NAMED_SERVER = Kind(("server_id",))
_SUPER_POD = Kind(("super_pod_id", "server_list"), items={"server_list": _NAMED_SERVER})
_CLUSTER = Kind(
    ("cluster_id",),
    ("az_id", "region_id"),
    {"server_list": _NAMED_SERVER, "super_pod_list": Kind(("super_pod_id",))},
)
_OLD_DEVICE = Kind(("device_id",), ("device_ip",))
_INSTANCE = Kind(("server_id", "devices"), ("pod_name", "rank_id"), {"devices": _OLD_DEVICE})
_GROUP = Kind(
    ("instance_list",),
    ("group_name", "instance_count", "device_count", "device_num", "server_num"),
    {"instance_list": _INSTANCE},
)
_SERVER_GROUP = Kind(
    ("group_id",), ("server_count", "deploy_server"), {"server_list": _SERVER, "super_pod_list": _SUPER_POD}
)
_HYBRID_RANK = Kind(
    ("rank_id",), ("device_id", "item_id", "rank_ip", "port", "sdid", "bind_device_id", "host_ip", "local_id")
)
_NODE = Kind((), ("node_addr", "node_id"), {"ranks": _HYBRID_RANK, "rank_list": _HYBRID_RANK})
_RANK_ADDRESS = Kind(("addr_type", "addr"), ("ports", "plane_id", "backup_addr"))
_LEVEL = Kind(("net_layer", "net_instance_id", "net_type"), ("net_attr",), {"rank_addr_list": _RANK_ADDRESS})
_RANK = Kind(
    ("rank_id", "device_id"),
    ("local_id", "replaced_local_id", "device_port", "host_port", "control_plane"),
    {"level_list": _LEVEL},
)
TABLE = Kind(
    ("status",),
    ("version", "detour", *_COUNTS, *_OF_LAB, *_OF_LAB_NICS, *_OF_HYBRID, *_OF_OTHERS, *_OF_VLLM),
    {
        "server_list": _SERVER,
        "super_pod_list": _SUPER_POD,
        "cluster_list": _CLUSTER,
        "group_list": _GROUP,
        "server_group_list": _SERVER_GROUP,
        "node_list": _NODE,
        "rank_list": _RANK,
    },
)
"""The top of a table of any dialect."""

_LISTS = ("server_list", "group_list", "rank_list", "node_list", "server_group_list")


def find_misspelt(members: Mapping[str, object], kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield each strange key of an object of that kind with the known key that it is meant to be."""
    if members.keys() <= kind.keys:
        return
    taken = set(members)
    for name in members:
        if name in kind.keys:
            continue
        meant = kind.by_form.get(_normalise(name)) or _find_close(name, _wanted(members, kind))
        if meant is not None and meant not in taken:
            taken.add(meant)
            yield name, meant


def _wanted(members: Mapping[str, object], kind: Kind) -> list[str]:
    """Return the required keys that are missing; a table needs one of several lists."""
    if kind is TABLE and not any(name in members for name in _LISTS):
        return [*kind.required, *_LISTS]
    return [key for key in kind.required if key not in members]


def _find_close(name: str, wanted: list[str]) -> str | None:
    by_form = {_normalise(key): key for key in wanted}
    close = get_close_matches(_normalise(name), by_form, n=1, cutoff=_CLOSE)
    return by_form[close[0]] if close else None


def _normalise(name: str) -> str:
    return _SEPARATORS.sub("", name).lower().rstrip("s")
