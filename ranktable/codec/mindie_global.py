"""Dialect "mindie-global": `server_group_list[].server_list[]`, the table of an inference service of MindIE.

Group 0 holds the coordinators and group 1 the controllers, which have no devices and often only a `server_ip`; every
other group holds instances, and the ranks start from 0 in each. Version "1.0" for A2, "1.2" for A3, where devices have
a `super_device_id`. In the model a server without a `server_id` goes by its `server_ip`; a version other than 1.0, and
what belongs to a group (`server_count`, `deploy_server`, `super_pod_list`), is kept in `extra`.
Source: the MindCluster documentation of global-ranktable, and what MindIE-Motor's loader reads.
"""

from __future__ import annotations

from ranktable.codec import Codec
from ranktable.codec.schema import Count, Field, Members, Schema, check_tree, check_version, list_objects, walk_objects
from ranktable.codec.servers import (
    SERVER_EXTRAS,
    SUPER_POD,
    SUPER_POD_DEVICE,
    decode_server,
    encode_server,
    server_fields,
    servers_of_groups,
    survey_holdings,
    survey_servers,
)
from ranktable.errors import BuildError
from ranktable.model import Group, RankTable, Server
from ranktable.problem import Problem
from ranktable.survey import Entry, Survey, find_repeats

DIALECT = "mindie-global"
VERSIONS = ("1.0", "1.2")
COORDINATORS, CONTROLLERS = "0", "1"
"""Ids of the two groups without devices."""

_PORTS = frozenset({"predict_port", "mgmt_port", "metric_port", "inter_comm_port"})
_SERVER_IP = Field("server_ip", missing="error")
_SERVER = Schema((_SERVER_IP, *server_fields(SUPER_POD_DEVICE)), (SERVER_EXTRAS - {"server_ip"}) | _PORTS)
_CONTROL = Schema(
    (_SERVER_IP, Field("server_id"), Field("device", "list", of=SUPER_POD_DEVICE)),
    (SERVER_EXTRAS - {"server_ip"}) | _PORTS | {"host_ip", "pod_ip"},
)
"""A server of coordinators or controllers, which has no devices and often no id."""


def _server_of(group: Members) -> Schema:
    return _CONTROL if _is_control(group.get("group_id")) else _SERVER


_GROUP = Schema(
    (
        Field("group_id", missing="error", role="group"),
        Field("server_count", "number", missing="warning", rule="R6", count=Count(("server_list",), "server")),
        # A group whose pods have not started has no servers yet, and MindIE-Motor reads it all the same.
        Field("server_list", "any_list", missing="error", of=_server_of),
        Field("deploy_server"),
        Field("super_pod_list", "list", of=SUPER_POD),
    )
)
_SCHEMA = Schema(
    (
        Field("version"),
        Field("status", missing="error"),
        Field("server_group_list", "list", missing="error", of=_GROUP),
    )
)


def check_structure(value: Members) -> list[Problem]:
    """Return every fault of the structure (R2, R4, R5, R31, P5 and malformed numbers)."""
    groups = (Entry(path, group) for path, group in walk_objects(value, "", "server_group_list"))
    otherwise = "the version is not known for a table with server_list"
    return [
        *check_version(value, VERSIONS, otherwise),
        *check_tree(value, _SCHEMA),
        # Groups are told apart by their ids alone.
        *find_repeats(groups, "group_id", "P5", "the same group_id stands at {}", "give each group its own id"),
    ]


def survey(value: Members) -> Survey:
    """Return what can be read of the object; the groups are surveys of their own."""
    groups = tuple(
        Survey(
            path,
            group,
            survey_servers(group, path, "server_list", _SERVER),
            DIALECT,
            survey_holdings(group, path, "super_pod_list"),
        )
        for path, group in walk_objects(value, "", "server_group_list")
    )
    servers = tuple(server for group in groups for server in group.servers)
    return Survey("", value, servers, dialect=DIALECT, groups=groups)


def decode(value: Members) -> RankTable:
    """Return the table. `value` must have passed `check_structure` without an error."""
    rest = dict(value)
    groups, servers = [], []
    for members in list_objects(rest, "server_group_list"):
        others = dict(members)
        name = str(others.pop("group_id"))
        servers += [_decode_server(server, name) for server in list_objects(others, "server_list")]
        del others["server_list"]
        groups.append(Group(name, others))
    del rest["server_group_list"]
    if rest["version"] == VERSIONS[0]:
        del rest["version"]
    return RankTable(DIALECT, tuple(servers), str(rest.pop("status")), groups=tuple(groups), extra=rest)


def _decode_server(members: Members, group: str) -> Server:
    if "server_id" in members:
        return decode_server(members, _SERVER, group)
    named = {key: value for key, value in members.items() if key != "server_ip"}
    return decode_server({"server_id": members["server_ip"], **named}, _SERVER, group)


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`, whose servers stand in the order of its groups; decoding it gives `table`.

    Raises BuildError for a server without a group of the table, and for what this dialect has no place for.
    """
    if table.super_pods or table.clusters or table.declared_server_count is not None:
        message = f"super pods, clusters and a server count of the whole table cannot be written in {DIALECT!r}"
        raise BuildError(message, "keep them in the groups")
    members = servers_of_groups(table)
    groups = [
        {
            "group_id": group.name,
            **group.extra,
            "server_list": [_encode_server(server) for server in members[group.name]],
        }
        for group in table.groups
    ]
    return {"version": VERSIONS[0], "status": table.status, "server_group_list": groups, **table.extra}


def _encode_server(server: Server) -> dict[str, object]:
    encoded = encode_server(server, _SERVER)
    if _is_control(server.group):
        if not server.devices:
            del encoded["device"]
        if "server_ip" not in server.extra:
            encoded = {"server_ip": encoded.pop("server_id"), **encoded}
    return encoded


def _is_control(group_id: object) -> bool:
    return group_id in (COORDINATORS, CONTROLLERS)


CODECS = {DIALECT: Codec(_SCHEMA, check_structure, survey, decode, encode)}
