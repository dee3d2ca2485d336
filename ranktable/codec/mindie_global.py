"""Dialect "mindie-global": `server_group_list[].server_list[]`, the table of an inference service of MindIE.

Group 0 holds the coordinators and group 1 the controllers, which have no devices and often only a `server_ip`; every
other group holds instances, and the ranks start from 0 in each. Version "1.0" for A2, "1.2" for A3, where devices have
a `super_device_id`. In the model a server without a `server_id` goes by its `server_ip`; a version other than 1.0, and
what belongs to a group (`server_count`, `deploy_server`, `super_pod_list`), is kept in `extra`.
Source: the MindCluster documentation of global-ranktable, and what MindIE-Motor's loader reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ranktable.codec.codec import Codec
from ranktable.codec.holdings import check_super_pods, survey_holdings
from ranktable.codec.server_list import check_version
from ranktable.codec.servers import (
    SERVER_EXTRAS,
    check_server,
    decode_server,
    encode_server,
    objects_of,
    survey_servers,
)
from ranktable.codec.shape import Key, check_shape, parse_number
from ranktable.codec.v1_2 import SUPER_POD_SERVERS
from ranktable.errors import BuildError
from ranktable.model import Group, RankTable, Server
from ranktable.problem import Problem, join_key, show_value
from ranktable.survey import Survey

DIALECT = "mindie-global"
VERSIONS = ("1.0", "1.2")
COORDINATORS, CONTROLLERS = "0", "1"
"""Ids of the two groups without devices."""

_TABLE_KEYS = (Key("version"), Key("status", missing="error"), Key("server_group_list", "list", missing="error"))
_GROUP_KEYS = (
    Key("group_id", missing="error"),
    Key("server_count", "number", missing="warning", rule="R6"),
    Key("server_list", "list", missing="error"),
    Key("deploy_server"),
    Key("super_pod_list", "list"),
)
_EMPTY_GROUP_KEYS = tuple(key for key in _GROUP_KEYS if key.name != "server_list")
_CONTROL_KEYS = (Key("server_ip", missing="error"), Key("server_id"), Key("device", "list"))
_INSTANCE_KEYS = (Key("server_ip", missing="error"),)
_PORTS = frozenset({"predict_port", "mgmt_port", "metric_port", "inter_comm_port"})
_CONTROL_EXTRAS = SERVER_EXTRAS | _PORTS | {"host_ip", "pod_ip"}
_SERVERS = replace(SUPER_POD_SERVERS, server_extras=SERVER_EXTRAS | _PORTS)


def check_structure(value: Mapping[str, object]) -> list[Problem]:
    """Return every fault of the structure (R2, R4, R5, R31, P5 and malformed numbers)."""
    problems = [*check_version(value, VERSIONS), *check_shape(value, "", _TABLE_KEYS, ())]
    seen: dict[object, str] = {}
    for path, group in objects_of(value, "", "server_group_list"):
        # A group whose pods have not started has no servers yet, and MindIE-Motor reads it all the same.
        keys = _EMPTY_GROUP_KEYS if group.get("server_list") == [] else _GROUP_KEYS
        problems += check_shape(group, path, keys, ("server_list",))
        problems += _check_group_id(group, path, seen)
        problems += check_super_pods(group, path)
        for server_path, server in objects_of(group, path, "server_list"):
            problems += _check_server(server, server_path, _is_control(group.get("group_id")))
    return problems


def _check_group_id(group: Mapping[str, object], path: str, seen: dict[object, str]) -> Iterator[Problem]:
    """Groups are told apart by their ids alone."""
    place, group_id = join_key(path, "group_id"), group.get("group_id")
    if not isinstance(group_id, str):
        return
    if group_id in seen:
        message = f"the same group_id stands at {seen[group_id]}"
        yield Problem(place, "P5", "error", message, "give each group its own id", show_value(group_id))
    seen.setdefault(group_id, place)


def _check_server(server: Mapping[str, object], path: str, is_control: bool) -> Iterator[Problem]:
    if is_control:
        yield from check_shape(server, path, _CONTROL_KEYS, _CONTROL_EXTRAS)
        for device_path, device in objects_of(server, path, "device"):
            yield from check_shape(device, device_path, _SERVERS.device_keys, _SERVERS.device_extras)
    else:
        if "server_ip" not in server:
            yield from check_shape({}, path, _INSTANCE_KEYS, ())
        yield from check_server(server, path, _SERVERS)


def survey(value: Mapping[str, object]) -> Survey:
    """Return what can be read of the object; the groups are surveys of their own."""
    groups = tuple(
        Survey(
            path,
            group,
            survey_servers(group, path),
            parse_number(group.get("server_count")),
            DIALECT,
            survey_holdings(group, path, "super_pod_list"),
        )
        for path, group in objects_of(value, "", "server_group_list")
    )
    servers = tuple(server for group in groups for server in group.servers)
    return Survey("", value, servers, dialect=DIALECT, groups=groups)


def decode(value: Mapping[str, object]) -> RankTable:
    """Return the table. `value` must have passed `check_structure` without an error."""
    rest = dict(value)
    groups, servers = [], []
    for _, members in objects_of(rest, "", "server_group_list"):
        others = dict(members)
        name = str(others.pop("group_id"))
        servers += [_decode_server(server, name) for _, server in objects_of(others, "", "server_list")]
        del others["server_list"]
        groups.append(Group(name, others))
    del rest["server_group_list"]
    if rest["version"] == VERSIONS[0]:
        del rest["version"]
    return RankTable(DIALECT, tuple(servers), str(rest.pop("status")), groups=tuple(groups), extra=rest)


def _decode_server(members: Mapping[str, object], group: str) -> Server:
    if "server_id" in members:
        return decode_server(members, _SERVERS, group)
    named = {key: value for key, value in members.items() if key != "server_ip"}
    return decode_server({"server_id": members["server_ip"], **named}, _SERVERS, group)


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`, whose servers stand in the order of its groups; decoding it gives `table`.

    Raises BuildError for a server without a group of the table, and for what this dialect has no place for.
    """
    members = _gather(table)
    groups = [
        {
            "group_id": group.name,
            **group.extra,
            "server_list": [_encode_server(server) for server in members[group.name]],
        }
        for group in table.groups
    ]
    return {"version": VERSIONS[0], "status": table.status, "server_group_list": groups, **table.extra}


def _gather(table: RankTable) -> dict[str, list[Server]]:
    if table.super_pods or table.clusters or table.declared_server_count is not None:
        message = f"super pods, clusters and a server count of the whole table cannot be written in {DIALECT!r}"
        raise BuildError(message, "keep them in the groups")
    members: dict[str, list[Server]] = {group.name: [] for group in table.groups}
    for server in table.servers:
        if server.group not in members:
            message = f"server {server.server_id!r} is in no group of the table"
            raise BuildError(message, "name a group of the table in Server.group")
        members[server.group].append(server)
    return members


def _encode_server(server: Server) -> dict[str, object]:
    encoded = encode_server(server)
    if _is_control(server.group):
        if not server.devices:
            del encoded["device"]
        if "server_ip" not in server.extra:
            encoded = {"server_ip": encoded.pop("server_id"), **encoded}
    return encoded


def _is_control(group_id: object) -> bool:
    return group_id in (COORDINATORS, CONTROLLERS)


CODEC = Codec(check_structure, survey, decode, encode)
