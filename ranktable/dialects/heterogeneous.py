"""Version 1.1: `node_list[]`, groups that mix devices and hosts. Every scalar is a string.

A rank without a device has number -1, in the file and in the model; a missing device_id means that and is written as
"-1". HCCL takes an empty rank_ip for the address of the node; with heterog_sub_version every rank needs the key. `sdid`
is the model's `super_device_id`. 1.1-offline is for compiling a model without devices, with node_id and item_id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ranktable.dialects.foreign import has_any
from ranktable.dialects.servers import TableForm
from ranktable.kinds import DeviceEntry, Dialect, Survey, find_repeats, rule_ids
from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.registry import rule
from ranktable.schema import Field, Members, Schema, list_objects
from ranktable.values import parse_address, parse_number

_ONLINE, _OFFLINE, _VERSION = "1.1", "1.1-offline", "1.1"
_RULES = "R7 R8 R9 R13 R15 R33"
_MAX_BYTES = 10 * 1024
_RANK_ID = Field("rank_id", "number", missing="error", rule="R9", role="rank_id")
_RANK_IP = Field("rank_ip", role="device_ip", empty_is_none=True)
_MAX_COLLECTIVE_ID = 127
_MAX_PORT = 65535
_HOST_DEVICE = "-1"
_ROLES = {"rank_ip": "device_ip", "sdid": "super_device_id"}
_NEEDED_ON_A3 = ("device_id", "port", "rank_ip", "sdid")


@rule(
    "R33",
    "version 1.1: collective_id, mode, node addresses and ports are what HCCL reads",
    severity="error or warning",
    sources=(citations.HETEROGENEOUS, citations.OFFLINE),
)
def check_heterogeneous(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The online form is checked whole; the offline form has only its equal numbers of devices."""
    if survey.dialect == _OFFLINE:
        yield from _check_equal_devices(survey)
        return
    yield from _check_head(survey)
    for server in survey.servers:
        text = server.server_id
        if text and parse_address(text) is None:
            remedy = "write the address of the host, not its name"
            yield server.complain("server_id", "R33", "error", "node_addr must be an IPv4 or IPv6 address", remedy)
    yield from _check_ports(survey)
    if survey.has("heterog_sub_version"):
        for device in survey.devices:
            yield from _check_a3_keys(device)


def _check_head(survey: Survey) -> Iterator[Problem]:
    collective_id = survey.text("collective_id")
    if collective_id is not None and len(collective_id.encode("utf-8", "surrogatepass")) > _MAX_COLLECTIVE_ID:
        message = f"the id is longer than {_MAX_COLLECTIVE_ID} bytes"
        yield survey.complain("collective_id", "R33", "error", message, "shorten it")
    if survey.text("mode") not in (None, "tcp", "rdma"):
        yield survey.complain("mode", "R33", "error", "the mode is neither tcp nor rdma", "write one of the two")
    if survey.text("heterog_sub_version") not in (None, "1.2"):
        message = "the only sub-version that HCCL knows is 1.2"
        yield survey.complain("heterog_sub_version", "R33", "error", message, 'write "1.2", or leave the key out')


def _check_ports(survey: Survey) -> Iterator[Problem]:
    """Port 0 stands for the default. A rank without an address of its own listens on that of its node."""
    owners = {device.path: server for server in survey.servers for device in server.devices}

    def place(device: DeviceEntry) -> tuple[str, int] | None:
        port, owner = parse_number(device.members.get("port")), owners[device.path]
        return (device.text("device_ip") or owner.server_id or owner.path, port) if port and port <= _MAX_PORT else None

    for device in survey.devices:
        if (parse_number(device.members.get("port")) or 0) > _MAX_PORT:
            message = f"ports go up to {_MAX_PORT}"
            yield device.complain("port", "R33", "error", message, 'write a port, or "0" for the default')
    same, remedy = "the same address and port stand at {}", "give each rank of an address its own port"
    yield from find_repeats(survey.devices, "port", "R33", same, remedy, place, severity="warning")


def _check_a3_keys(device: DeviceEntry) -> Iterator[Problem]:
    is_on_host = device.text("device_id") == _HOST_DEVICE
    for key in (*_NEEDED_ON_A3, "bind_device_id") if is_on_host else _NEEDED_ON_A3:
        is_there = device.has(key) or device.has(_ROLES.get(key, key))
        if not is_there:
            message = "the key is missing; with heterog_sub_version every rank needs it"
            yield device.complain(key, "R33", "error", message, f"add {key!r}")


def _check_equal_devices(survey: Survey) -> Iterator[Problem]:
    counts = [sum(device.device_id is not None for device in server.devices) for server in survey.servers]
    usual = Counter(counts).most_common(1)[0][0] if counts else 0
    for server, count in zip(survey.servers, counts, strict=True):
        if count != usual:
            message = f"the number of devices is {count} here and {usual} on the other nodes"
            remedy = "list as many devices on every node"
            yield Problem(server.path_of("rank_list"), "R33", "error", message, remedy)


def _is_offline(value: Members) -> str:
    keys = {key for node in list_objects(value, "node_list") for key in node}
    return next((f"node_list with {key}" for key in ("rank_list", "node_id") if key in keys), "")


def _hybrid(id_key: str, ranks_key: str, ranks: tuple[Field, ...], *more: Field) -> Schema:
    node = Schema(
        (
            Field(id_key, missing="error", role="server_id"),
            Field(ranks_key, "list", missing="error", role="devices", of=Schema(ranks)),
        )
    )
    nodes = Field("node_list", "list", missing="error", role="servers", of=node)
    return Schema((Field("version"), Field("status", missing="error"), *more, Field("mode"), nodes))


DIALECTS = (
    Dialect(
        name=_OFFLINE,
        title="a heterogeneous rank table for offline compilation (version 1.1)",
        consumer="HCCL without devices",
        recognise=_is_offline,
        sources=(citations.OFFLINE,),
        codec=TableForm(
            _OFFLINE,
            _VERSION,
            _hybrid(
                "node_id",
                "rank_list",
                (
                    _RANK_ID,
                    Field("item_id", "device_number", missing="error", rule="R8", role="device_id"),
                    _RANK_IP,
                ),
                Field("collective_id"),
            ),
        ),
        rules=rule_ids(_RULES),
        refusal="the item ids of offline compilation cannot be made up; take the table of its tools",
    ),
    Dialect(
        name=_ONLINE,
        title="a heterogeneous rank table (version 1.1)",
        consumer="HCCL groups of hosts and devices",
        recognise=has_any("node_list", "collective_id"),
        keys=("node_list", "collective_id"),
        sources=(citations.HETEROGENEOUS,),
        codec=TableForm(
            _ONLINE,
            _VERSION,
            _hybrid(
                "node_addr",
                "ranks",
                (
                    _RANK_ID,
                    Field("device_id", "device_number", rule="R8", role="device_id"),
                    _RANK_IP,
                    Field("port", "number", rule="R33"),
                    Field("sdid", "number", rule="R33", role="super_device_id"),
                    Field("bind_device_id", "device_number", rule="R8"),
                ),
                Field("collective_id", missing="error"),
                Field("heterog_sub_version"),
            ),
        ),
        rules=rule_ids(_RULES, "P1"),
        readers=frozenset({"hccl", "mindspore"}),
        max_bytes=_MAX_BYTES,
        refusal="the collective_id and the ports of heterogeneous groups cannot be made up; take the table of their "
        "tools",
    ),
)
